"""Iterations of loops, read off a compiled schedule."""

import pytest

from sppo_jax.fit.hlo.text import computations_of, loop_of

# As XLA:TPU writes a loop of 5 - 2 iterations: the counter is copied, and is not the first of what the loop carries.
LOOP = """
%test (p: (f32[2], s32[])) -> pred[] {
  %p = (f32[2]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %end = s32[]{:T(128)} constant(5), metadata={op_name="jit(step)"}
  %i = s32[]{:T(128)} get-tuple-element(%p), index=1, metadata={op_name="jit(step)"}
  ROOT %lt = pred[]{:T(512)} compare(%i, %end), direction=LT, metadata={op_name="jit(step)/while/cond/lt"}
}

%body (p: (f32[2], s32[])) -> (f32[2], s32[]) {
  %p = (f32[2]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %x = f32[2]{0:T(128)} get-tuple-element(%p), index=0
  %i = s32[]{:T(128)} get-tuple-element(%p), index=1
  %copy.1 = s32[]{:T(128)} copy(%i)
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%copy.1, %one), metadata={op_name="jit(step)/while/body/add"}
  ROOT %out = (f32[2]{0:T(128)}, /*index=1*/s32[]{:T(128)}) tuple(%x, %next)
}

ENTRY %main (x: f32[2], n: s32[]) -> f32[2] {
  %x = f32[2]{0:T(128)} parameter(0)
  %n = s32[]{:T(128)} parameter(1)
  %begin = s32[]{:T(128)} constant(2)
  %copy-start = (s32[]{:T(128)S(1)}, s32[]{:T(128)}, u32[]{:S(2)}) copy-start(%begin)
  %copy-done = s32[]{:T(128)S(1)} copy-done(%copy-start)
  %t = (f32[2]{0:T(128)}, /*index=1*/s32[]{:T(128)}) tuple(%x, %copy-done)
  %loop = (f32[2]{0:T(128)}, s32[]{:T(128)}) while(%t), condition=%test, body=%body
  ROOT %y = f32[2]{0:T(128)} get-tuple-element(%loop), index=0
}
"""


def iterations(text):
    computations, entry = computations_of(text)
    return [loop_of(line)[1] for line in computations[entry] if loop_of(line)]


def test_a_loop_with_a_counter_has_as_many_iterations_as_it_counts():
    assert iterations(LOOP) == [3]
    assert iterations(LOOP.replace("constant(2)", "constant(7)")) == [0]


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("copy-start(%begin)", "copy-start(%n)"),
        ("%end = s32[]{:T(128)} constant(5)", "%end = s32[]{:T(128)} get-tuple-element(%p), index=1"),
        ("direction=LT", "direction=NE"),
        ("constant(1)", "constant(2)"),
        ("add(%copy.1, %one)", "multiply(%copy.1, %one)"),
        ("tuple(%x, %next)", "tuple(%next, %x)"),
        ("index=1\n  %copy.1", "index=0\n  %copy.1"),
        ("ROOT %out = (f32[2]{0:T(128)}, /*index=1*/s32[]{:T(128)}) tuple(%x, %next)", "ROOT %out = s32[] add(%n, %n)"),
        ("while(%t)", "while(%x)"),
    ],
)
def test_any_other_loop_has_iterations_that_are_not_known(what, instead):
    assert what in LOOP
    assert iterations(LOOP.replace(what, instead)) == [None]


def test_a_text_that_says_iterations_itself_is_left_alone():
    """XLA:GPU says the iterations of every loop whose predicate it need not read from the device."""
    said = '\n%other (p: f32[]) -> f32[] {\n  %w = f32[] while(%p), body=%b, x={"known_trip_count":{"n":"4"}}\n}\n'
    assert iterations(LOOP + said) == [None]
