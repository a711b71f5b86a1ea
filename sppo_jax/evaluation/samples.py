"""Samples of a task: what a model reads, and what it must write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sppo_jax.data.rows.needles import row_of
from sppo_jax.data.rows.protocol import Batch
from sppo_jax.data.tasks.prompts import Continuation


@dataclass(frozen=True, kw_only=True)
class TaskSample:
    """A prompt and its answers.

    Args:
        prompt: int64 [num_tokens], at least one token.
        answers: ways of writing a right answer, of which one is enough; or all choices.
        depth: of what is asked for, a share of the text in [0, 1]; None: not known.
        right: the number of the right choice; None: the answers are no choices.
        sizes: bytes of each choice as UTF-8.
    """

    prompt: np.ndarray
    answers: tuple[Continuation, ...]
    depth: float | None = None
    right: int | None = None
    sizes: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt with its longest answer."""
        return len(self.prompt) + max(len(one.tokens) for one in self.answers)


@dataclass(frozen=True, kw_only=True)
class AskedAnswer:
    """One answer of one sample, and where the row of it is.

    Args:
        sample: number of the sample.
        answer: number of the answer.
        row: number of the row.
        first: place in the row whose target is the first token of the answer.
        count: tokens of the answer.
    """

    sample: int
    answer: int
    row: int
    first: int
    count: int


@dataclass(frozen=True, kw_only=True)
class AnswerRows:
    """Answers laid out in rows of one length.

    Args:
        asked: all answers, in the order of their rows.
        documents: prompt and answer of each, by row.
        length: tokens of a row.
    """

    asked: tuple[AskedAnswer, ...]
    documents: tuple[tuple[tuple[np.ndarray, tuple[int, ...]], ...], ...]
    length: int

    @property
    def has_one_document(self) -> bool:
        """Whether each row holds one document."""
        return all(len(documents) == 1 for documents in self.documents)

    def batches(self, num_sequences: int) -> Iterator[tuple[Batch, list[AskedAnswer]]]:
        """Yields batches of so many rows and the answers in them; rows without documents fill up the last one."""
        for begin in range(0, len(self.documents), num_sequences):
            rows = [row_of(documents, self.length) for documents in self.documents[begin : begin + num_sequences]]
            rows += [row_of([], self.length)] * (num_sequences - len(rows))
            here = [asked for asked in self.asked if begin <= asked.row < begin + num_sequences]
            yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}, here


def lay_out_answers(
    samples: Sequence[TaskSample], wanted: Sequence[tuple[int, int]], length: int, *, shared: bool
) -> AnswerRows:
    """Lays out answers behind their prompts, in their order.

    Args:
        samples: all of them.
        wanted: numbers of sample and answer.
        length: tokens of a row, in which each sample fits.
        shared: whether several documents may share a row.
    """
    rows: list[list[tuple[np.ndarray, tuple[int, ...]]]] = []
    asked, used = [], length
    for sample, answer in wanted:
        prompt, tokens = samples[sample].prompt, samples[sample].answers[answer].tokens
        size = len(prompt) + len(tokens)
        if not rows or not shared or used + size > length:
            rows.append([])
            used = 0
        rows[-1].append((prompt, tokens))
        first = used + len(prompt) - 1
        asked.append(AskedAnswer(sample=sample, answer=answer, row=len(rows) - 1, first=first, count=len(tokens)))
        used += size
    return AnswerRows(asked=tuple(asked), documents=tuple(map(tuple, rows)), length=length)
