"""Sequences of the needle tasks: one sample each, fitted to the sequence, with targets on the answer alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sppo_jax.config.data import DataConfig
from sppo_jax.data.rows.protocol import Batch
from sppo_jax.data.rows.recall import TRAINING
from sppo_jax.data.tasks.fit import fit_needles
from sppo_jax.data.tasks.haystack import read_haystack
from sppo_jax.data.tasks.needles import draw_needles
from sppo_jax.data.tasks.prompts import Prompter

NEEDLES = "needles"  # as a source
# Sequences never repeat, so the length of an epoch has no effect on the data.
_ROWS_PER_EPOCH = 1 << 20


class NeedleRows:
    """Sequences of the needle tasks by number, each drawn when it is read."""

    def __init__(self, data: DataConfig, prompter: Prompter, *, length: int, stream: int = TRAINING) -> None:
        """Checks that a sample of each task fits into a sequence.

        Args:
            data: gives the tasks, the haystack and the seed.
            prompter: writes prompts.
            length: tokens of a sequence.
            stream: sequences of different streams differ.

        Raises:
            ValueError: the sequence is too short, or the haystack cannot be read.
        """
        self._data, self._prompter, self.length, self._stream = data, prompter, length, stream
        self._haystack = None if data.needles.haystack is None else read_haystack(data.needles.haystack)
        for number, _ in enumerate(data.needles.tasks):
            self[number]

    def __len__(self) -> int:
        return _ROWS_PER_EPOCH

    def __getitem__(self, index: int) -> Batch:
        """Draws sequence `index`.

        Returns:
            int32 [length] each of tokens, targets (-1 except at the answer), positions and document_ids (-1: padding).
        """
        tasks = self._data.needles.tasks
        task = tasks[index % len(tasks)]
        seed = self._data.seed
        drawn = draw_needles(task, seed=seed, stream=self._stream, number=index // len(tasks), haystack=self._haystack)
        try:
            fitted = fit_needles(drawn, self._prompter, self.length)
        except ValueError as error:
            raise ValueError(f"data.source=needles with {task}: {error}") from None
        return row_of([(fitted.prompt, fitted.answers[0].tokens)], self.length)


def row_of(documents: Sequence[tuple[np.ndarray, Sequence[int]]], length: int) -> Batch:
    """Lays out prompts and their answers as documents of one sequence.

    Args:
        documents: integer [num_tokens] of a prompt, at least one token, and the tokens of its answer.
        length: tokens of the sequence, which has room for all.

    Returns:
        int32 [length] each of tokens, targets (-1 except at answers), positions and document_ids (-1: padding).
    """
    row = {name: np.full(length, fill, np.int32) for name, fill in _EMPTY.items()}
    begin = 0
    for number, (prompt, answer) in enumerate(documents):
        first, end = begin + len(prompt), begin + len(prompt) + len(answer)
        row["tokens"][begin:first], row["tokens"][first:end] = prompt, answer
        row["targets"][first - 1 : end - 1] = answer
        row["positions"][begin:end] = np.arange(end - begin)
        row["document_ids"][begin:end] = number
        begin = end
    return row


_EMPTY = {"tokens": 0, "targets": -1, "positions": 0, "document_ids": -1}
