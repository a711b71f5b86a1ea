"""What context is worth: the same rows with their documents cut every K tokens, scored by the same program.

Cuts lie at two offsets, K / 2 apart. So each target that has more than K tokens before it in its document is scored
once with K / 2 to K of them. A cut changes positions and document ids alone.

Letters: B sequences, S tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from sppo_jax.data.positions import ContextGain
from sppo_jax.data.rows.protocol import Batch
from sppo_jax.plan.plan import Plan

# The fewest tokens between two cuts that a table of several shows.
LEAST_TOKENS = 64
# At the end of a run documents are cut at this share of the length.
_OF_LENGTH = 8


def context_sizes(length: int) -> tuple[int, ...]:
    """Returns the tokens at which documents are cut, falling: a half of the length, a quarter, ... down to 64.

    Raises:
        ValueError: the length is too short for one.
    """
    halves = (_even(length >> power) for power in range(1, length.bit_length()))
    found = tuple(size for size in halves if size >= LEAST_TOKENS)
    if not found:
        raise ValueError(
            f"the gain by context must have a sequence.length of at least {2 * LEAST_TOKENS}, got {length}; raise "
            "sequence.length"
        )
    return found


def context_size_of_run(length: int) -> int:
    """Returns the tokens at which the last validation of a run cuts documents: an eighth of the length, 2 at least."""
    return max(2, _even(length // _OF_LENGTH))


def plan_for_cuts(plan: Plan) -> Plan:
    """Returns a plan whose program takes cut documents: several in a sequence, each on all members of a stage."""
    if plan.groups == "static" and not plan.has_one_document:
        return plan  # an equal plan has its program already
    reasons = {name: why for name, why in plan.reasons.items() if name not in ("sequence_documents", "groups")}
    return dataclasses.replace(plan, sequence_documents="many", groups="static", reasons=reasons)


def cut(batch: Batch, size: int, offset: int) -> Batch:
    """Returns a batch whose documents are cut `offset` tokens behind their begin, and then every `size` tokens.

    Args:
        batch: int32 [B, S] each of positions, from 0 in each document, document_ids (-1 = padding), and others.
        size: tokens between two cuts.
        offset: tokens before the first cut, below `size`; 0: it is `size` tokens behind the begin.

    Returns:
        The batch with other positions and document_ids; each piece is a document, and ids count from 0 in each row.
    """
    positions_BS, ids_BS = batch["positions"], batch["document_ids"]
    is_real_BS = ids_BS >= 0
    begin_BS = np.maximum((positions_BS - offset) // size * size + offset, 0)
    own_BS = np.where(is_real_BS, positions_BS - begin_BS, positions_BS)
    numbers_BS = np.cumsum(is_real_BS & (own_BS == 0), axis=1) - 1
    cut_ids_BS = np.where(is_real_BS, numbers_BS, ids_BS)
    return {**batch, "positions": own_BS.astype(np.int32), "document_ids": cut_ids_BS.astype(np.int32)}


class Gains:
    """Sums up the losses of targets with all their context and with less, over batches."""

    def __init__(self, sizes: Sequence[int]):
        """Takes the tokens at which documents are cut, each an even number."""
        self._sums = {size: np.zeros(2) for size in sizes}  # with all context, with less
        self._counts = dict.fromkeys(sizes, 0)

    def add(self, batch: Batch, losses_BS: np.ndarray, score: Callable[[Batch], np.ndarray]) -> None:
        """Scores a batch again with its documents cut.

        Args:
            batch: as for `cut`, with targets (-1 = no loss).
            losses_BS: float64, the losses of the batch as it is.
            score: returns the losses of a batch, float64 [B, S].
        """
        for size, sums in self._sums.items():
            counts_BS = (batch["targets"] >= 0) & (batch["positions"] >= size)
            self._counts[size] += int(counts_BS.sum())
            sums[0] += losses_BS[counts_BS].sum()
            for offset in (0, size // 2):
                pieces = cut(batch, size, offset)
                chosen_BS = counts_BS & (pieces["positions"] >= size // 2)
                sums[1] += score(pieces)[chosen_BS].sum()

    def found(self) -> tuple[ContextGain, ...]:
        """Returns the means, most tokens first; without the sizes beyond which no target is."""
        return tuple(
            ContextGain(beyond=size, num_targets=count, whole=float(sums[0] / count), cut=float(sums[1] / count))
            for (size, sums), count in zip(self._sums.items(), self._counts.values(), strict=True)
            if count
        )


def _even(number: int) -> int:
    return number // 2 * 2
