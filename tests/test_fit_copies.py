"""Reading host copies off a compiled schedule."""

import pytest

from sppo_jax.fit.hlo.copies import host_copies

# A write behind a loop with a product, a fetch behind nothing, and a copy without start and done, in a loop of 3
# iterations.
HLO = """
%tick (p: f32[4,8]) -> f32[4,8] {
  %write-start = ((f32[4,8]{1,0:S(5)}, f32[1,8]{1,0}), f32[4,8]{1,0:S(5)}, u32[]) fusion-start(%a, %b), calls=%w
  %layers = (s32[]) while(%t), condition=%c, body=%layer, backend_config={"known_trip_count":{"n":"2"}}
  %write-done = f32[4,8]{1,0:S(5)} fusion-done(%write-start)
  %read-start = ((f32[4,8]{1,0:S(5)}, s32[]), f32[2,8]{1,0}, u32[]) fusion-start(%a, %i), calls=%r
  %read-done = f32[2,8]{1,0} fusion-done(%read-start)
  ROOT %copy.1 = bf16[4,8]{1,0} copy(%h), metadata={op_name="S(5)"}
}

%layer (p: f32[4,8]) -> f32[4,8] {
  ROOT %gemm_fusion_dot.1 = f32[4,8]{1,0} fusion(%p), kind=kCustom, calls=%d
}

ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %ticks = (s32[], f32[4]{0:S(5)}) while(%t), condition=%c, body=%tick, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_counts_host_copies_by_what_hides_them():
    copies = host_copies(HLO)
    assert copies.overlapped_bytes == 3 * 8 * 4
    assert copies.exposed_bytes == 3 * (2 * 8 * 4 + 4 * 8 * 2)
    assert copies.loops_unknown == 0


# A write at an offset that XLA finds linear; a fetch whose offset is looked up.
SLICES = """
%w (h: f32[4,8], x: f32[1,8], i: s32[]) -> f32[4,8] {
  ROOT %u = f32[4,8]{1,0:S(5)} dynamic-update-slice(%h, %x, %i), backend_config={"dynamic_slice_config":{}}
}

%r (h: f32[4,8], i: s32[]) -> f32[2,8] {
  ROOT %wrapped = f32[2,8]{1,0} fusion(%h, %i), kind=kLoop, calls=%inner
}

%inner (h: f32[4,8], i: s32[]) -> f32[2,8] {
  ROOT %s = f32[2,8]{1,0} dynamic-slice(%h, %i), dynamic_slice_sizes={2,8}
}
"""


def test_a_slice_at_an_offset_that_is_not_linear_is_copied_by_a_kernel():
    assert host_copies(HLO).kernel_bytes is None
    assert host_copies(SLICES + HLO).kernel_bytes == 3 * 2 * 8 * 4
    asynchronous = HLO.replace("fusion-start", "async-start").replace("fusion-done", "async-done")
    assert host_copies(SLICES + asynchronous) == host_copies(SLICES + HLO)


def test_a_fusion_with_a_convolution_is_a_product_too():
    fused = "%fused (p: f32[2]) -> f32[2] {\n  ROOT %c = f32[2]{0} convolution(%p, %p)\n}\n"
    between = "%out = f32[2]{0} fusion(%p), kind=kOutput, calls=%fused"
    text = HLO.replace("%read-done", between + "\n  %read-done") + fused
    copies = host_copies(text)
    assert copies.overlapped_bytes == 3 * (8 * 4 + 2 * 8 * 4)


READ = "  %read-start = ((f32[4,8]{1,0:S(5)}, s32[]), f32[2,8]{1,0}, u32[]) fusion-start(%a, %i), calls=%r\n"
PRODUCT = (
    "  %a = f32[4,8]{1,0} parameter(0)\n"
    "  %x = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
)


def sized(together):
    """Returns the bytes of each copy, and the products behind its start, before the next start or end."""
    assert together.times == 3
    pairs = zip(together.events, together.events[1:], strict=False)
    return [(event.size_bytes, behind.product_flops) for event, behind in pairs if event.size_bytes]


def test_copies_wait_for_what_the_products_beside_them_leave():
    """The write has two products of 4 x 8 by 8 x 16 beside it; the fetch and the whole copy have none."""
    product = "%d (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {\n  %a = f32[4,8]{1,0} parameter(0)\n"
    product += "  ROOT %x = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n"
    copies = host_copies(HLO + product)
    flops = 2 * 2 * 4 * 8 * 16
    assert [sized(one) for one in copies.together] == [[(32, flops)], [(64, 0)], [(64, 0)]]
    assert copies.waiting_s(1.0, flops / 20, {}) == 3 * (12 + 64 + 64)
    assert copies.waiting_s(1.0, 1.0, {}) == 3 * (64 + 64)


def test_a_tick_has_what_its_chunk_takes_besides_products_beside_its_copies():
    name = 'calls=%r, metadata={op_name="jit(step)/while/body/backward_tick_without_ends/dynamic_slice"}'
    nothing, some = (host_copies(text.replace("calls=%r", name)) for text in (HLO, HLO.replace(READ, READ + PRODUCT)))
    for copies, flops in ((nothing, 0), (some, 2 * 4 * 8 * 16)):
        assert [sized(one) for one in copies.together if one.op == "B"] == [[(64, flops)]]
    assert nothing.waiting_s(1.0, 1e9, {"B": (60.0,)}) == nothing.waiting_s(1.0, 1e9, {})
    assert some.waiting_s(1.0, 1e9, {"F": (60.0,)}) == some.waiting_s(1.0, 1e9, {})
    assert some.waiting_s(1.0, 1e9, {}) - some.waiting_s(1.0, 1e9, {"B": (60.0,)}) == pytest.approx(3 * 60)
    # Of four chunks one covers a part of the 64 seconds, one nothing, and two all of them.
    chunks = {"B": (60.0, 0.0, 70.0, 1000.0)}
    assert some.waiting_s(1.0, 1e9, {}) - some.waiting_s(1.0, 1e9, chunks) == pytest.approx(3 * (60 + 64 + 64) / 4)


def test_copies_of_one_direction_that_are_under_way_together_share_the_link():
    read = "  %read-start = ((f32[4,8]{1,0:S(5)}, s32[]), f32[2,8]{1,0}, u32[]) fusion-start(%a, %i), calls=%r\n"
    twice = read + read.replace("read-start", "again-start")
    text = HLO.replace(read, twice).replace(
        "%read-done", "%again-done = f32[2,8]{1,0} fusion-done(%again-start)\n  %read-done"
    )
    copies = host_copies(text)
    assert [sized(one) for one in copies.together] == [[(32, 0)], [(64, 0), (64, 0)], [(64, 0)]]
    assert copies.waiting_s(1.0, 1.0, {}) == 3 * (32 + 128 + 64)


def test_copies_of_both_directions_run_at_the_same_time():
    """A write of 64 bytes starts before a fetch of as many; both wait for the longer one, with a product between."""
    shapes = "((f32[4,8]{1,0:S(5)}, f32[2,8]{1,0}), f32[4,8]{1,0:S(5)}, u32[])"
    start = f"  %out-start = {shapes} fusion-start(%a, %b), calls=%w\n"
    done = "  %out-done = f32[4,8]{1,0:S(5)} fusion-done(%out-start)\n  ROOT %copy.1"
    text = HLO.replace(READ, start + READ + PRODUCT).replace("  ROOT %copy.1", done)
    (_, both, _) = host_copies(text).together
    assert [event.goes_out for event in both.events if event.size_bytes] == [True, False]
    assert both.waiting_s(1.0, 1e9, 0.0) == pytest.approx(64)
    assert both.waiting_s(1.0, 2 * 4 * 8 * 16 / 10, 20.0) == pytest.approx(64 - 10 - 20)
    # Of one direction they would run one after the other.
    one_way = both._replace(events=tuple(event._replace(goes_out=True) for event in both.events))
    assert one_way.waiting_s(1.0, 1e9, 0.0) == pytest.approx(128)


def test_a_loop_of_at_most_one_iteration_counts_as_often_as_its_iterations():
    name = 'metadata={op_name="jit(step)/while/body/backward_tick/gather_turn/while"}'
    text = HLO.replace('body=%tick, backend_config={"known_trip_count":{"n":"3"}}', f"body=%tick, {name}")
    once, seldom = host_copies(text), host_copies(text, {"gather_turn": 0.25})
    assert (once.loops_unknown, seldom.loops_unknown) == (1, 0)
    assert (once.overlapped_bytes, seldom.overlapped_bytes) == (8 * 4, 8)


def test_copies_of_the_optimizer_are_counted_by_their_scopes():
    name = 'calls=%r, metadata={op_name="jit(step)/optimizer_update/while/body/dynamic_slice"}'
    assert host_copies(HLO).optimizer_bytes == 0
    assert host_copies(HLO.replace("calls=%r", name)).optimizer_bytes == 3 * 2 * 8 * 4


# A tick: products, then a loop of unknown iterations with a product in it, then products; a write is under way all the
# time.
LOOPS = """
%product (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
  %a = f32[4,8]{1,0} parameter(0)
  ROOT %x = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%attention (p: f32[4,8]) -> f32[4,8] {
  ROOT %y = f32[4,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%product
}

%layer (p: f32[4,8]) -> f32[4,8] {
  %first = f32[4,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%product
  ROOT %attend = (s32[]) while(%t), condition=%c, body=%attention
}

ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %write-start = ((f32[4,8]{1,0:S(5)}, f32[1,8]{1,0}), f32[4,8]{1,0:S(5)}, u32[]) fusion-start(%a, %b), calls=%w
  %before = f32[4,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%product
  %loop.1 = (s32[]) while(%t), condition=%c, body=%attention
  %after = f32[4,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%product
  %write-done = f32[4,8]{1,0:S(5)} fusion-done(%write-start)
}
"""
FLOPS = 2 * 4 * 8 * 16
KNOWN = ', backend_config={"known_trip_count":{"n":"2"}}'


def waits_of(text, graphed=frozenset()):
    return host_copies(SLICES + text, graphed=graphed).loop_waits


def test_a_loop_of_unknown_iterations_waits_for_a_write():
    """One product of the three hides a part of the write; then the loop's predicate waits."""
    assert waits_of(LOOPS) == (("", 1, 32, 3 * FLOPS, FLOPS),)
    copies = host_copies(SLICES + LOOPS, graphed=frozenset())
    assert (copies.overlapped_bytes, copies.exposed_bytes, copies.loop_bytes) == (32, 0, 32)
    # 32 bytes take 32 s, a product 10 s: 22 s of waiting, of which 2 s are those that all three products leave.
    assert copies.waiting_s(1.0, FLOPS / 10, {}) == pytest.approx(2)
    assert copies.loops_s(1.0, FLOPS / 10, {}) == pytest.approx(20)
    assert copies.loops_s(1.0, FLOPS / 40, {}) == 0  # the first product alone takes longer than the write


def test_a_loop_of_known_iterations_reads_no_predicate():
    known = LOOPS.replace("body=%attention", f"body=%attention{KNOWN}")
    assert waits_of(known) == () and host_copies(SLICES + known, graphed=frozenset()).loop_bytes == 0


def test_a_loop_in_a_graph_reads_no_predicate():
    assert waits_of(LOOPS, frozenset({"loop.1"})) == ()
    assert len(waits_of(LOOPS, frozenset({"loop.2"}))) == 1


def test_a_loop_within_a_loop_of_known_iterations_waits_in_its_first_iteration():
    nested = LOOPS.replace(
        "%loop.1 = (s32[]) while(%t), condition=%c, body=%attention",
        f"%l = (s32[]) while(%t), condition=%c, body=%layer{KNOWN}",
    )
    assert waits_of(nested) == (("", 1, 32, 6 * FLOPS, 2 * FLOPS),)
    assert waits_of(nested, frozenset({"attend"})) == ()


def test_what_reads_before_the_start_or_behind_the_end_of_a_write_does_not_wait():
    lines = LOOPS.splitlines()
    loop = next(line for line in lines if "%loop.1" in line)
    lines.remove(loop)
    start, end = (next(i for i, line in enumerate(lines) if word in line) for word in ("%write-start =", "%write-done"))
    for place, waits in ((start, 0), (start + 1, 1), (end, 1), (end + 1, 0)):
        assert len(waits_of("\n".join([*lines[:place], loop, *lines[place:]]))) == waits


def test_fetches_and_writes_by_kernels_do_not_hold_the_engine():
    fetch = LOOPS.replace("calls=%w", "calls=%r")
    assert (
        waits_of(fetch.replace("{1,0:S(5)}, f32[1,8]{1,0}), f32[4,8]{1,0:S(5)}", "{1,0:S(5)}, s32[]), f32[2,8]{1,0}"))
        == ()
    )
    by_kernel = SLICES.replace(', backend_config={"dynamic_slice_config":{}}', "")
    assert host_copies(by_kernel + LOOPS, graphed=frozenset()).loop_waits == ()


def test_a_conditional_reads_its_branch():
    branch = "%loop.1 = f32[4,16]{1,0} conditional(%p, %a, %a), branch_computations={%attention, %attention}"
    text = LOOPS.replace("%loop.1 = (s32[]) while(%t), condition=%c, body=%attention", branch)
    assert len(waits_of(text)) == 1 and waits_of(text, frozenset({"loop.1"})) == ()


def test_where_loops_read_nothing_nothing_waits():
    assert host_copies(SLICES + LOOPS).loop_waits == ()
