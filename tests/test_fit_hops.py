"""Bytes on the ring, read off a compiled schedule."""

import jax
import jax.numpy as jnp
import numpy as np
from exactness import quick_options
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from sppo_jax.attention.spreading import ring
from sppo_jax.fit.hlo.hops import RingHops, ring_hops


def sent(number, size, scope="ring_hop"):
    name = f'metadata={{op_name="jit(step)/backward_tick/while/body/{scope}/ppermute"}}'
    shape = f"bf16[8,{size}]{{1,0:T(8,128)(2,1)}}"
    start = f"  %start.{number} = ({shape}, {shape}, u32[]) collective-permute-start(%x), channel_id=1, {name}\n"
    return start, f"  %done.{number} = {shape} collective-permute-done(%start.{number}), {name}\n"


KERNEL = '  %attention = (f32[8,2]) custom-call(%q), custom_call_target="tpu_custom_call"\n'
PRODUCT = "  %fused = f32[2]{0} fusion(%p), kind=kOutput, calls=%product\n"
LOOP = '  %w = (s32[]) while(%t), condition=%c, body=%layers, backend_config={"known_trip_count":{"n":"3"}}\n'


def text(layer, outside=""):
    product = "%product (p: f32[2]) -> f32[2] {\n  ROOT %c = f32[2]{0} convolution(%p, %p)\n}\n"
    layers = f"\n%layers (p: f32[2]) -> f32[2] {{\n{layer}}}\n"
    return f"{product}{layers}\nENTRY %main (p: f32[2]) -> f32[2] {{\n{LOOP}{outside}}}\n"


def test_hops_are_told_by_what_runs_beside_them():
    (first, first_done), (second, second_done), (third, third_done) = (sent(n, 10 * n) for n in (1, 2, 3))
    nothing = "  %y = f32[2] add(%p, %p)\n"
    layer = first + KERNEL + second + first_done + PRODUCT + second_done + third + nothing + third_done
    size = 3 * 8 * 2
    want = RingHops(attention_bytes=10 * size, products_bytes=20 * size, exposed_bytes=30 * size)
    assert ring_hops(text(layer)) == want
    assert want.all_bytes == 60 * size


def test_a_loop_with_the_kernel_counts_as_the_kernel():
    start, done = sent(1, 10)
    assert ring_hops(text(KERNEL, start + LOOP + done)) == RingHops(attention_bytes=160)


def test_what_is_sent_between_stages_is_no_hop():
    start, done = sent(1, 10, scope="carry")
    other = "".join(sent(2, 10))
    assert ring_hops(text(other + start + done)) == ring_hops(text(other)) == RingHops(exposed_bytes=3 * 160)


def test_every_hop_of_a_compiled_ring_is_counted():
    mesh = Mesh(np.array(jax.devices()[:4]), (ring.AXIS,), axis_types=(AxisType.Auto,))

    def on_device(x):
        def hop(x, _):
            return ring._send(x, 4) + 1, None

        return jax.lax.scan(hop, ring._send(x, 4), None, length=3)[0]

    step = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=P(ring.AXIS), out_specs=P(ring.AXIS), check_vma=False))
    compiled = step.lower(jnp.ones((8, 5), jnp.float32)).compile(compiler_options=quick_options())
    assert ring_hops(compiled.as_text()).all_bytes == 4 * 2 * 5 * 4
