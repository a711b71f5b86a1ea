"""Batches whose chunks are stream or team chunks, drawn from a generator; and the plans that take them."""

from dataclasses import replace

import numpy as np
from combinations import draw, draw_by_groups
from programs import Case


def columns(plan) -> list[int]:
    """Returns the column of each member, numbered as its device lies, within a slot of a row."""
    return [member % plan.ulysses * plan.ring + member // plan.ulysses for member in range(plan.mesh.seq)]


def deal(rng, num_members, num_slots, first, largest):
    """Deals documents, numbered from `first`, to aligned teams of at most `largest` members, until little is left.

    Returns:
        Documents and positions [members, slots], and the next number.
    """
    documents, positions = np.full((num_members, num_slots), -1), np.zeros((num_members, num_slots), int)
    filled = np.zeros(num_members, int)
    for _ in range(int(rng.integers(1, 12 * num_members))):
        size = 1 << int(rng.integers(largest.bit_length()))
        team = size * int(rng.integers(num_members // size)) + np.arange(size)
        space = size * int((num_slots - filled[team]).min())
        if not space:
            continue
        length, offset = int(rng.integers(1, space + 1)), int(rng.integers(size))
        for position in range(length):
            member = team[(offset + position) % size]
            documents[member, filled[member]], positions[member, filled[member]] = first, position
            filled[member] += 1
        first += 1
    return documents, positions, first


def stream(rng, length, first, goes_on):
    """Draws documents in natural order; the first may go on with a document of the chunk before at some position.

    Returns:
        Documents and positions [length], and the next number.
    """
    documents, positions, at = np.full(length, -1), np.zeros(length, int), 0
    end = length - int(rng.integers(length)) if rng.random() < 0.3 else length
    while at < end:
        size = min(int(rng.integers(1, 2 * length)), end - at)
        begin = goes_on[1] + 1 if goes_on else 0
        documents[at : at + size] = goes_on[0] if goes_on else first
        positions[at : at + size] = begin + np.arange(size)
        first, at, goes_on = first + (not goes_on), at + size, None
    return documents, positions, first


def row(rng, plan, is_stream, largest=None):
    """Draws documents and positions [S] of a row.

    Args:
        rng: numpy's generator.
        plan: gives the chunks and the members.
        is_stream: of each chunk.
        largest: members of the largest team; half of all by default.
    """
    members, largest = plan.mesh.seq, largest or plan.mesh.seq // 2
    parts, first, last = [], 0, None
    for length, streams in zip(plan.chunk_lengths, is_stream, strict=True):
        if streams:
            goes_on = last if last and last[0] >= 0 and rng.random() < 0.7 else None
            documents, positions, first = stream(rng, length, first, goes_on)
            last = int(documents[-1]), int(positions[-1])
        else:
            *dealt, first = deal(rng, members, length // members, first, largest)
            documents, positions = (np.empty((length // members, members), int) for _ in range(2))
            for to, x in zip((documents, positions), dealt, strict=True):
                to[:, columns(plan)] = x.T
            last = None
        parts.append((documents.reshape(-1), positions.reshape(-1)))
    return [np.concatenate(x) for x in zip(*parts, strict=True)]


def with_tokens(rng, rows, vocab_size) -> dict:
    """Makes a batch of rows of documents and positions; every token of a document has a target."""
    documents, positions = (np.stack(x).astype(np.int32) for x in zip(*rows, strict=True))
    tokens, targets = (rng.integers(0, vocab_size, documents.shape).astype(np.int32) for _ in range(2))
    return {
        "tokens": tokens,
        "targets": np.where(documents >= 0, targets, -1).astype(np.int32),
        "positions": positions,
        "document_ids": documents,
    }


def batches(rng, plan, vocab_size, count):
    """Draws batches: chunks of both kinds, then team chunks alone, stream ones alone, and both again."""
    for index in range(count):
        share = [0.4, 0.0, 1.0][index % 3]
        kinds = rng.random((plan.num_sequences, len(plan.chunk_lengths))) < share
        yield with_tokens(rng, [row(rng, plan, each) for each in kinds], vocab_size)


def case(seed) -> Case | None:
    """Draws a program with teams; None where the mesh of the seed has no teams."""
    return _with_teams(draw(seed))


def breadth_first_case(seed) -> Case | None:
    """Draws a breadth-first program with teams; None where the mesh of the seed has none."""
    return _with_teams(draw_by_groups(seed))


def _with_teams(drawn: Case) -> Case | None:
    if drawn.plan["mesh"][2] not in (2, 4, 8):
        return None
    return replace(drawn, plan={**drawn.plan, "groups": "flex"})
