"""cuDNN's workspace in a lowered program."""

import re

import jax
import jax.numpy as jnp
import pytest

from sppo_jax import compat
from sppo_jax.fit.workspace import reserve_workspace
from sppo_jax.predict.workspace import backward_bytes


def attend(q, k, v, out, lse, dout):
    operands = q, k, v, jnp.int32(4), jnp.int32(8)
    forward = compat.cudnn_forward(operands, causal=False, scale=1.0)
    return forward, compat.cudnn_backward(operands, (out, lse, dout), causal=False, scale=1.0)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_each_backward_has_the_bytes_of_the_formula(kv_heads):
    q, kv = jnp.zeros((4, 16, 64), jnp.bfloat16), jnp.zeros((kv_heads, 32, 64), jnp.bfloat16)
    traced = jax.jit(attend).trace(q, kv, kv, q, jnp.zeros((4, 16), jnp.float32), q)
    lowered = traced.lower(lowering_platforms=("cuda",))
    want = backward_bytes(num_heads=4, num_kv_heads=kv_heads, head_dim=64, queries=16, keys=32, compute_bytes=2)
    assert reserve_workspace(lowered) == want
    calls = [line for line in lowered.as_text().splitlines() if "__cudnn$fmha" in line]
    sizes = {"Backward" in call: re.findall(r"tensor<(\d+)xui8>", call) for call in calls}
    assert sizes == {False: ["0"], True: [str(want)]}


def test_a_program_without_such_calls_stays(capsys):
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    text = lowered.as_text()
    assert reserve_workspace(lowered) == 0 and lowered.as_text() == text
