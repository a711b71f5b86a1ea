"""The cells of FlexSP's main figure with their published gains, their documents, and the cells in simulation.

Nothing is fitted to the published gains.

Documents. For Wikipedia they are those that the authors' released scripts simulate for the same cells: the released
lengths in their order, padded to 128, longer ones dropped, 512 a batch, batches 3 to 42 (`start_iter` and `iter_num` of
`solver.py` and `scripts/solver_all.sh`). The scripts read a list called `wikipedia_1`, which was not released; we use
the only released list, `wikipedia`. The lengths of the other corpora are not published, and are guesses here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sppo_jax.flex.flexsp.costs import MEMORY_LIMIT_GB, MODELS, TeamCosts, flexsp_costs
from sppo_jax.flex.flexsp.systems import PADDING, System, batch_ns
from sppo_jax.flex.lengths import Quantiles, corpora, padded, wikipedia_documents

BATCH_SIZE = 512
# The authors' simulation of the published figure: its first batch (counted from 0) and its number of batches.
FIRST_BATCH, NUM_RELEASED = 3, 40


@dataclass(frozen=True, kw_only=True)
class PublishedCell:
    """A cell of FlexSP's main result: 64 A100-40GB, 512 documents a step; gains as printed in the figure.

    Args:
        model: key of `MODELS`.
        max_kilotokens: longest document in thousands of tokens.
        corpus: name in `lengths.corpora`.
        over_deepspeed: FlexSP's speed over DeepSpeed's.
        over_megatron: FlexSP's speed over Megatron's.
    """

    model: str
    max_kilotokens: int
    corpus: str
    over_deepspeed: float
    over_megatron: float

    @property
    def judged(self) -> bool:
        """Whether the corpus is published, so that the simulation can be judged by the cell."""
        return self.corpus == "wikipedia"

    @property
    def static_degree(self) -> int:
        """DeepSpeed's degree in the released code."""
        return 64 if self.corpus == "wikipedia" or self.max_kilotokens > 192 else 32


_GAINS = {
    ("7b", 192): ((1.45, 1.43), (1.50, 1.66), (1.72, 1.98)),
    ("13b", 192): ((1.40, 1.38), (1.35, 1.55), (1.59, 1.79)),
    ("30b", 192): ((1.44, 1.44), (1.54, 1.58), (1.64, 1.95)),
    ("7b", 384): ((1.26, 1.47), (1.42, 1.77), (1.46, 1.77)),
    ("13b", 384): ((1.29, 1.63), (1.37, 1.70), (1.43, 1.77)),
    ("30b", 384): ((1.22, 1.40), (1.33, 1.60), (1.53, 1.85)),
}
PUBLISHED = tuple(
    PublishedCell(
        model=model,
        max_kilotokens=max_kilotokens,
        corpus=corpus,
        over_deepspeed=over_deepspeed,
        over_megatron=over_megatron,
    )
    for (model, max_kilotokens), gains in _GAINS.items()
    for corpus, (over_deepspeed, over_megatron) in zip(
        ("github-assumed", "commoncrawl-assumed", "wikipedia"), gains, strict=True
    )
)


def released_batches(max_kilotokens: int, *, first: int = FIRST_BATCH, count: int = NUM_RELEASED) -> list[np.ndarray]:
    """Returns batches of 512 of Wikipedia's released lengths in their order, padded to 128; longer ones are dropped.

    Args:
        max_kilotokens: longest document in thousands of tokens, padding counted.
        first: the first batch, counted from 0; the default is that of the authors' simulation.
        count: number of batches, at most 50 - `first`.
    """
    lengths = padded(wikipedia_documents(), PADDING)
    kept = lengths[lengths <= max_kilotokens * 1000 - PADDING]
    return list(kept[first * BATCH_SIZE : (first + count) * BATCH_SIZE].reshape(count, BATCH_SIZE))


def stratified_lengths(quantiles: Quantiles, *, count: int, seed: int, longest: int) -> np.ndarray:
    """Draws one length from each of `count` equal shares of a distribution, in random order.

    Args:
        quantiles: the distribution.
        count: number of lengths, at least 1.
        seed: selects the random numbers.
        longest: the longest length; the shares are those of the documents that are no longer.

    Returns:
        int64 [count].
    """
    numbers, most = random.Random(seed), float(np.interp(longest, quantiles.tokens, quantiles.shares))
    draws = [(number + numbers.random()) / count * most for number in range(count)]
    # Not random.shuffle: Python promises to keep the numbers of random() alone.
    keys = np.array([numbers.random() for _ in range(count)])
    lengths = np.interp(np.array(draws)[np.argsort(keys, kind="stable")], quantiles.shares, quantiles.tokens)
    return np.maximum(1, lengths.astype(np.int64))


def sample_batches(corpus: str, max_kilotokens: int, num_batches: int) -> list[np.ndarray]:
    """Returns batches of 512 lengths padded to 128; longer documents are dropped, as in the released code.

    The lengths are stratified: each of equal shares of the distribution gives one document of one batch. A few batches
    so hold the rare longest documents, which decide the time of a batch, as often as the distribution does.

    Args:
        corpus: name in `lengths.corpora`.
        max_kilotokens: longest document in thousands of tokens, padding counted.
        num_batches: number of batches.
    """
    longest = (max_kilotokens * 1000 - PADDING) // PADDING * PADDING
    lengths = stratified_lengths(corpora()[corpus], count=num_batches * BATCH_SIZE, seed=0, longest=longest)
    return list(padded(lengths, PADDING).reshape(num_batches, BATCH_SIZE))


def simulate_cell(
    cell: PublishedCell,
    batches: Sequence[np.ndarray],
    systems: Sequence[System],
    *,
    memory_limit_gb: float = MEMORY_LIMIT_GB,
) -> dict[System, float]:
    """Returns simulated seconds a step of each system, the mean over batches.

    Args:
        cell: model, longest document and static degree.
        batches: lengths of the documents of each batch, int64 [documents] each.
        systems: systems to simulate.
        memory_limit_gb: see `flexsp_costs`.
    """
    costs = flexsp_costs(
        MODELS[cell.model], num_devices=64, max_kilotokens=cell.max_kilotokens, memory_limit_gb=memory_limit_gb
    )
    return {
        system: sum(batch_ns(system, lengths, costs, static_degree=cell.static_degree) for lengths in batches)
        / len(batches)
        / 1e9
        for system in systems
    }


def part_of_cluster(costs: TeamCosts, num_devices: int) -> TeamCosts:
    """Returns the costs of a part of a cluster; devices keep their share of the whole cluster's model states.

    Args:
        costs: costs of the whole cluster.
        num_devices: devices of the part: one of the cluster's degrees.

    Raises:
        ValueError: if `num_devices` is no degree of the cluster.
    """
    if num_devices not in costs.degrees:
        known = ", ".join(map(str, costs.degrees))
        raise ValueError(f"num_devices must be one of the degrees {known}, got {num_devices}; choose one of these")
    num = costs.degrees.index(num_devices) + 1
    return replace(costs, num_devices=num_devices, degrees=costs.degrees[:num], exchange_ms=costs.exchange_ms[:num])
