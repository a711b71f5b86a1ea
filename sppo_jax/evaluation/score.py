"""Scores of answers by forward passes alone.

Decoding without randomness writes an answer if and only if each of its tokens is the most likely one behind the tokens
before it. So one forward pass of prompt and answer says whether it would be written. Choices are compared by losses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sppo_jax.evaluation.placement import local_rows, place_batch
from sppo_jax.evaluation.samples import AnswerRows, AskedAnswer, TaskSample, lay_out_answers
from sppo_jax.evaluation.validate import Scores, prepare_scores
from sppo_jax.pipeline.api import TokenScores
from sppo_jax.plan.plan import Plan

# Makes the function that gives each token's loss, for a plan; and takes parameters for it.
ScoresOf = Callable[[Plan], tuple[Scores, nnx.State, Mesh]]


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What a pass says of an answer.

    Args:
        nats: loss of all its tokens.
        count: its tokens.
        is_hit: whether each is the most likely token.
        joins: whether the tokens are those of prompt and answer together.
    """

    nats: float
    count: int
    is_hit: bool
    joins: bool


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """What was found of all samples of a task.

    Args:
        best: of each sample the answer that counts: the first that is a hit, or else that with the fewest nats a token;
            of choices the right one.
        hits: whether a sample is right, bool [num_samples].
        hits_by_byte: the same where choices are compared by nats a byte; None: there are no choices.
        depths: of the samples; None: not known.
        seconds: without compiling.
    """

    best: tuple[Answered, ...]
    hits: np.ndarray
    hits_by_byte: np.ndarray | None
    depths: tuple[float, ...] | None
    seconds: float


def score(
    samples: Sequence[TaskSample], plan: Plan, scores_of: ScoresOf, beat: Callable[[], None] = lambda: None
) -> TaskResult:
    """Scores all samples; all processes must call it with the same ones.

    Of several ways of writing an answer, a later one is tried where all before are no hits.

    Args:
        samples: at least one; each fits a row of the plan.
        plan: of the evaluation.
        scores_of: makes the program.
        beat: called before each batch.
    """
    found: dict[tuple[int, int], Answered] = {}
    seconds, number = 0.0, 0
    while wanted := _wanted(samples, found, number):
        rows = lay_out_answers(samples, wanted, plan.sequence_length, shared=not plan.has_one_document)
        more, took_s = _pass(samples, rows, plan, scores_of, beat)
        found |= more
        seconds, number = seconds + took_s, number + 1
    return _result(samples, found, seconds)


def _wanted(
    samples: Sequence[TaskSample], found: dict[tuple[int, int], Answered], number: int
) -> list[tuple[int, int]]:
    """Returns what is scored in a round: all choices at once, and of each sample without a hit another answer."""
    choices = [
        (at, answer) for at, one in enumerate(samples) if one.right is not None for answer in range(len(one.answers))
    ]
    missed = [
        (at, number)
        for at, one in enumerate(samples)
        if one.right is None
        and number < len(one.answers)
        and not any(found[at, before].is_hit for before in range(number))
    ]
    return sorted([*(choices if number == 0 else ()), *missed])


def _pass(
    samples: Sequence[TaskSample], rows: AnswerRows, plan: Plan, scores_of: ScoresOf, beat: Callable[[], None]
) -> tuple[dict[tuple[int, int], Answered], float]:
    """Scores answers that are laid out; returns what was found by the numbers of sample and answer, and the seconds."""
    token_scores, params, mesh = scores_of(plan)
    own, compile_s, begin_s = local_rows(mesh, plan.num_sequences), 0.0, time.perf_counter()
    batches = [*rows.batches(plan.num_sequences)]
    most = max(sum(one.count for one in asked) for _, asked in batches)
    pick = _picker(mesh)
    found = {}
    for number, (batch, asked) in enumerate(batches):
        beat()
        placed = place_batch({name: row[own] for name, row in batch.items()}, plan, mesh)
        compile_s += 0.0 if number else prepare_scores(token_scores, params, placed)
        losses_A, hits_A = pick(token_scores(params, placed), _places(asked, plan, most))
        losses, hits, begin = np.asarray(losses_A).astype(np.float64), np.asarray(hits_A), 0
        for one in asked:
            here = slice(begin, begin + one.count)
            found[one.sample, one.answer] = Answered(
                nats=float(losses[here].sum()),
                count=one.count,
                is_hit=bool(hits[here].all()),
                joins=samples[one.sample].answers[one.answer].joins,
            )
            begin += one.count
    return found, time.perf_counter() - begin_s - compile_s


def _places(asked: Sequence[AskedAnswer], plan: Plan, most: int) -> np.ndarray:
    """Returns row and place in the batch of each token of answers, int32 [2, most]; zeros behind the last one."""
    places = np.zeros((2, most), np.int32)
    begin = 0
    for one in asked:
        places[0, begin : begin + one.count] = one.row % plan.num_sequences
        places[1, begin : begin + one.count] = np.arange(one.first, one.first + one.count)
        begin += one.count
    return places


@lru_cache(maxsize=4)
def _picker(mesh: Mesh) -> Callable[[TokenScores, np.ndarray], tuple[jax.Array, jax.Array]]:
    """Returns a function that gives every process the losses and hits of some tokens, and of these alone."""

    def pick(scores: TokenScores, places_2A: jax.Array) -> tuple[jax.Array, jax.Array]:
        return scores.losses_BS[places_2A[0], places_2A[1]], scores.hits_BS[places_2A[0], places_2A[1]]

    return jax.jit(pick, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _result(samples: Sequence[TaskSample], found: dict[tuple[int, int], Answered], seconds: float) -> TaskResult:
    best, hits, by_byte = [], [], []
    for number, sample in enumerate(samples):
        answers = [found[number, at] for at in range(len(sample.answers)) if (number, at) in found]
        if sample.right is None:
            best.append(min(answers, key=lambda one: (not one.is_hit, one.nats / one.count)))
            hits.append(best[-1].is_hit)
        else:
            best.append(answers[sample.right])
            nats = np.array([one.nats for one in answers])
            hits.append(int(nats.argmin()) == sample.right)
            by_byte.append(int((nats / np.array(sample.sizes)).argmin()) == sample.right)
    depths = tuple(sample.depth for sample in samples if sample.depth is not None)
    return TaskResult(
        best=tuple(best),
        hits=np.array(hits, bool),
        hits_by_byte=np.array(by_byte, bool) if by_byte else None,
        depths=depths if len(depths) == len(samples) else None,
        seconds=seconds,
    )
