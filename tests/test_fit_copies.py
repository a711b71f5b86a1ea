"""Reading host copies off a compiled schedule."""

from sppo_jax.fit.copies import host_copies

# A write behind a loop with a product, a fetch behind nothing, and a copy without start and done, in a loop of 3 turns.
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


def test_a_fusion_with_a_convolution_is_a_product_too():
    fused = "%fused (p: f32[2]) -> f32[2] {\n  ROOT %c = f32[2]{0} convolution(%p, %p)\n}\n"
    between = "%out = f32[2]{0} fusion(%p), kind=kOutput, calls=%fused"
    text = HLO.replace("%read-done", between + "\n  %read-done") + fused
    copies = host_copies(text)
    assert copies.overlapped_bytes == 3 * (8 * 4 + 2 * 8 * 4)
