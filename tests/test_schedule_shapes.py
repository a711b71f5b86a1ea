"""Tick shapes: what a tick rounds up to, the shapes that pad least by brute force, and what shapes must be."""

import random
from dataclasses import replace
from itertools import combinations

import pytest

from sppo_jax.rules import MOST_SHAPES
from sppo_jax.schedule.generators import make_table
from sppo_jax.schedule.outline import all_rounds, make_outline
from sppo_jax.schedule.shapes import rounded_up, tick_shapes


def padding(lengths, shapes):
    return sum(min(shape for shape in shapes if shape >= tokens) - tokens for tokens in lengths)


def test_the_shapes_pad_least_of_all_choices():
    rng = random.Random(1)
    for _ in range(60):
        lengths = [8 * rng.randint(1, 12) for _ in range(rng.randint(1, 14))]
        values, most = sorted(set(lengths)), rng.randint(1, 4)
        found = tick_shapes(lengths, 8, most)
        longest = max(lengths)
        below = [value for value in values if value < longest]
        every = [(*some, longest) for size in range(most) for some in combinations(below, size)]
        assert list(found) == sorted(set(found)) and found[-1] == longest and len(found) <= most
        assert padding(lengths, found) == min(padding(lengths, shapes) for shapes in every)


def test_shapes_are_multiples_and_few_lengths_are_their_own_shapes():
    assert tick_shapes((20, 12, 9), 8) == (16, 24)
    assert tick_shapes((16,) * 5, 8) == (16,)
    lengths = tuple(range(1000, 40, -7))
    found = tick_shapes(lengths, 4)
    assert len(found) == MOST_SHAPES == 6 and found[-1] == 1000 and all(tokens % 4 == 0 for tokens in found)


def test_a_tick_rounds_up_to_its_shape_and_without_shapes_is_as_it_was():
    assert [rounded_up(tokens, (8, 16)) for tokens in (1, 8, 9, 16)] == [8, 8, 16, 16] and rounded_up(9, ()) == 9
    table = make_table("sppo", 2, 1, (20, 12, 8))
    assert table.bundle_tokens == (20, 20, 12, 8) and table.most_tokens == 20
    rounded = replace(table, shapes=(16, 24))
    assert rounded.bundle_tokens == (24, 24, 16, 16) and rounded.most_tokens == 24
    forward = [tokens for tokens, tick in zip(rounded.tick_tokens, rounded.ticks, strict=True) if tick.op == "F"]
    assert forward == [24, 24, 16, 16]
    assert [shape.tokens for shape in rounded.tick_shapes] == list(rounded.tick_tokens)
    assert rounded.diagonal_bundles == table.diagonal_bundles and rounded.bundle_gaps == table.bundle_gaps


@pytest.mark.parametrize("name", ["sppo", "seq1f1b", "gpipe", "interleaved-seq1f1b"])
def test_an_outline_rounds_as_its_table_does(name):
    asked = name, 2, 12, (28, 20, 12, 12), 2 if name.startswith("interleaved") else 1
    table, outline = (replace(make(*asked), shapes=(16, 32)) for make in (make_table, make_outline))
    assert outline.repeats and outline.bundle_tokens == table.bundle_tokens
    assert tuple(all_rounds(outline.tick_tokens, outline.repeats)) == table.tick_tokens
