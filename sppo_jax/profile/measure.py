"""Measures what the planner assumes of a device, with our own layer and attention kernel, on the devices present.

Letters: T tokens of a chunk, D hidden size, N query heads, K key/value heads, H head dim, S keys in the buffer.
"""

import dataclasses
import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sppo_jax import hardware
from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention.pallas_blocks import target_of
from sppo_jax.attention.spreading import sequence
from sppo_jax.attention.spreading.sequence import Cache, Chunk, Split
from sppo_jax.config import ExpertsConfig, ModelConfig
from sppo_jax.hardware.measured_figures import AttentionFigure, MatmulFigure, Profile
from sppo_jax.models.counts import ATTENTION_BACKWARD, LINEAR_BACKWARD, chunk_pairs, layer_costs
from sppo_jax.models.layers import DecoderLayer
from sppo_jax.models.leaves import is_cast
from sppo_jax.pipeline.block import Block, Projected, Weights
from sppo_jax.plan.parts import cache_head_dim, cudnn_takes, pallas_takes
from sppo_jax.profile.copies import WAYS, copy_bytes_s
from sppo_jax.profile.tick import tick_seconds
from sppo_jax.profile.timing import AXIS, Timer

Say = Callable[[str], None]
# A function that makes the first state of a loop, and one that makes the next state.
Work = tuple[Callable[[], Any], Callable[[Any], Any]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and durations of the measurements.

    Args:
        tokens: tokens of a device in matmuls, layers and hops.
        square: rows and columns of the largest square matmul.
        chunks: tokens of the chunks that attend.
        prefixes: tokens before these chunks.
        stream_bytes: bytes of an array that is read and written to measure memory.
        run_s: seconds of one run of a measurement.
        runs: number of runs, whose median counts.
    """

    tokens: int
    square: int
    chunks: tuple[int, ...]
    prefixes: tuple[int, ...]
    stream_bytes: int
    run_s: float
    runs: int


_SIZES = {
    ("cpu", True): Sizes(
        tokens=512, square=1024, chunks=(512,), prefixes=(0, 2048), stream_bytes=2**26, run_s=0.05, runs=3
    ),
    ("cpu", False): Sizes(
        tokens=1024, square=2048, chunks=(512, 2048), prefixes=(0, 2048, 8192), stream_bytes=2**28, run_s=0.3, runs=5
    ),
    ("gpu", True): Sizes(
        tokens=8192, square=8192, chunks=(4096,), prefixes=(0, 65536), stream_bytes=2**30, run_s=0.1, runs=3
    ),
    ("gpu", False): Sizes(
        tokens=8192,
        square=16384,
        chunks=(2048, 8192),
        prefixes=(0, 8192, 65536, 262144),
        stream_bytes=2**32,
        run_s=0.3,
        runs=7,
    ),
}
# Shapes of a layer for each kind of device, if no config is given.
_MODELS = {
    "cpu": {
        "vocab_size": 1024,
        "hidden_size": 512,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 4,
        "mlp_size": 1536,
        "compute_dtype": "float32",
    },
    "gpu": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_layers": 2,
        "num_heads": 32,
        "num_kv_heads": 8,
        "mlp_size": 14336,
        "compute_dtype": "bfloat16",
    },
}
_FEW_TOKENS = 16
_COPY_ROWS = 8


def default_sizes(platform: str, *, quick: bool) -> Sizes:
    """Returns the sizes for a platform ("cpu", "gpu" or "tpu")."""
    return _SIZES["cpu" if platform == "cpu" else "gpu", quick]


def default_model(platform: str) -> ModelConfig:
    """Returns the shape of the layers to measure, if no config is given."""
    return ModelConfig(**_MODELS["cpu" if platform == "cpu" else "gpu"])


def measure(model: ModelConfig, sizes: Sizes, say: Say = print) -> Profile:
    """Measures every figure of the devices present.

    Args:
        model: the shape of a layer.
        sizes: sizes and durations of the measurements.
        say: takes a line on each figure, as soon as the figure is measured.

    Raises:
        ValueError: the device is not one of `hardware.DEVICES`.
    """
    devices = tuple(jax.devices())
    name = "cpu" if devices[0].platform == "cpu" else hardware.find_device(devices[0].device_kind).name
    timer = Timer(devices=devices, run_s=sizes.run_s, runs=sizes.runs)
    model = _without_experts(model)
    layer = DecoderLayer(model, rngs=nnx.Rngs(0))
    device, dtype = hardware.DEVICES[name], layer.dtype
    itemsize = jnp.dtype(dtype).itemsize
    is_taken = {
        "blockwise": True,
        "cudnn": cudnn_takes(itemsize, model.head_dim, device.fused_head_dim),
        "pallas": pallas_takes(itemsize, model.head_dim),
    }
    kernel = device.kernel if is_taken[device.kernel] else "blockwise"
    say(f"{len(devices)} x {name}, {dtype.name}, {kernel} attention, all devices at once")
    matmul = _matmuls(timer, model, sizes, dtype, say)
    layer_flops_s, overhead_tokens = _layers(timer, model, layer, sizes, say)
    attention = _attention(timer, model, kernel, sizes, dtype, say)
    hbm = _stream(timer, sizes, say)
    link = _link(timer, sizes.tokens * model.hidden_size, dtype, say)
    host_link = _host_link(timer, sizes, say)
    overhead_s = tick_seconds(timer, device, model)
    say(f"a tick of {device.tile * 16} tokens and small layers: {overhead_s * 1e6:.0f} us")
    return Profile(
        device=name,
        jax=jax.__version__,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        dtype=dtype.name,
        kernel=kernel,
        num_devices=len(devices),
        matmul_flops_s=max(figure.flops_s for figure in matmul),
        layer_flops_s=layer_flops_s,
        matmul=matmul,
        attention=attention,
        host_link_bytes_s=host_link,
        link_bytes_s=link,
        hbm_bytes_s=hbm,
        overhead_s=overhead_s,
        overhead_tokens=overhead_tokens,
        head_dim=model.head_dim,
    )


def normal(seed: int, shape: tuple[int, ...], dtype, scale: float = 1.0) -> jax.Array:
    """Returns normal values drawn in float32 from a seed."""
    return (scale * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(dtype)


def _matmuls(timer: Timer, model: ModelConfig, sizes: Sizes, dtype, say: Say) -> tuple[MatmulFigure, ...]:
    """Multiplies by a matrix and back by another, so that each turn needs the turn before."""
    hidden, width = model.hidden_size, model.num_heads * model.head_dim
    shapes = [(sizes.tokens, hidden, model.mlp_size), (sizes.tokens, hidden, width), (sizes.square,) * 3]
    figures = []
    for rows, inner, columns in dict.fromkeys(shapes):
        seconds = timer.seconds(*matmul_work(rows, inner, columns, dtype))
        flops_s = 4.0 * rows * inner * columns / seconds
        figures.append(MatmulFigure(rows=rows, inner=inner, columns=columns, flops_s=flops_s))
        say(f"matmul {rows} x {inner} x {columns}: {flops_s / 1e12:.4g} TFLOP/s")
    return tuple(figures)


def matmul_work(rows: int, inner: int, columns: int, dtype) -> Work:
    """Returns the arguments of `Timer.seconds` for a product of [rows, inner] and [inner, columns], and one back."""

    def make():
        there = normal(1, (inner, columns), dtype, inner**-0.5)
        return normal(0, (rows, inner), dtype), there, normal(2, (columns, inner), dtype, columns**-0.5)

    return make, lambda state: (state[0] @ state[1] @ state[2], *state[1:])


def _layers(timer: Timer, model: ModelConfig, layer: DecoderLayer, sizes: Sizes, say: Say) -> tuple[float, float]:
    """Times a layer without its attention, forward and backward; returns FLOP/s, and the fixed cost in tokens.

    With t(n) = a + b n seconds for n tokens, the fixed cost equals that of a / b tokens.
    """
    long_s = sum(_layer_seconds(timer, model, layer, sizes.tokens))
    short_s = sum(_layer_seconds(timer, model, layer, _FEW_TOKENS))
    # If noise hides the slope, all of the time counts as the time of tokens.
    token_s = (long_s - short_s) / (sizes.tokens - _FEW_TOKENS) if long_s > short_s else long_s / sizes.tokens
    # The forward, the forward again in the backward, and the backward itself.
    flops = layer_costs(model).linear_flops * (2 + LINEAR_BACKWARD)
    extra = max(0.0, short_s / token_s - _FEW_TOKENS)
    say(
        f"layer of {sizes.tokens} tokens, without attention: {flops / token_s / 1e12:.4g} TFLOP/s, "
        f"and a fixed cost of {extra:.0f} tokens' time"
    )
    return flops / token_s, extra


def _without_experts(model: ModelConfig) -> ModelConfig:
    """Returns a model with one MLP of the size that a token's experts have together: its products are measured."""
    experts = model.experts
    if not experts.count:
        return model
    size = experts.chosen * experts.size + (experts.shared_size or 0)
    return dataclasses.replace(model, experts=ExpertsConfig(), mlp_size=size, mlp="swiglu")


def _layer_seconds(timer: Timer, model: ModelConfig, layer: DecoderLayer, tokens: int) -> tuple[float, float]:
    block = Block(layer)
    params = nnx.state(layer, nnx.Param)
    matrices = jax.tree.map(lambda x: x.astype(layer.dtype) if is_cast(x, 0) else x, params)
    positions_T = jnp.arange(tokens, dtype=jnp.int32)
    groups = model.num_heads // model.num_kv_heads

    def make():
        return normal(0, (tokens, model.hidden_size), layer.dtype), Weights(matrices, block.others)

    def forward(state):
        x, weights = state
        q, k, v, _ = block.before(weights, x, positions_T)
        return block.after(weights, x, q + jnp.repeat(k + v, groups, axis=1))[0], weights

    def make_backward():
        return *make(), normal(1, (tokens, model.hidden_size), layer.dtype), params

    def backward(state):
        x, weights, dy, sums = state
        (q, k, _, sinks), vjp_before = block.vjp_before(weights, x, positions_T)
        after, dx, dout = block.vjp_after(weights, x, q)[1]((dy, ()))
        dk = dout.reshape(tokens, model.num_kv_heads, groups, model.head_dim).sum(2).astype(k.dtype)
        dsinks = None if sinks is None else jnp.zeros_like(sinks)
        before, more = vjp_before(Projected(dout, dk, dk, dsinks))
        sums = jax.tree.map(lambda s, a, b: s + a.astype(s.dtype) + b.astype(s.dtype), sums, after, before)
        return x, weights, dx + more, sums

    return timer.seconds(make, forward), timer.seconds(make_backward, backward)


def _attention(
    timer: Timer, model: ModelConfig, kernel: str, sizes: Sizes, dtype, say: Say
) -> tuple[AttentionFigure, ...]:
    figures = []
    for prefix in sizes.prefixes:
        for chunk in sizes.chunks:
            forward, backward = attention_work(model, kernel, chunk, prefix, dtype)
            forward_s, backward_s = timer.seconds(*forward), timer.seconds(*backward)
            flops = layer_costs(model).pair_flops * chunk_pairs(prefix, chunk)
            flops_s = flops * (1 + ATTENTION_BACKWARD) / (forward_s + backward_s)
            figures.append(
                AttentionFigure(
                    chunk_tokens=chunk,
                    prefix_tokens=prefix,
                    forward_s=forward_s,
                    backward_s=backward_s,
                    flops_s=flops_s,
                )
            )
            say(
                f"attention of {chunk} tokens behind {prefix}: forward {forward_s * 1e3:.4g} ms, "
                f"backward {backward_s * 1e3:.4g} ms, {flops_s / 1e12:.4g} TFLOP/s"
            )
    return tuple(figures)


def attention_work(model: ModelConfig, kernel: str, chunk: int, prefix: int, dtype) -> tuple[Work, Work]:
    """Returns the arguments of `Timer.seconds` for attention forward and backward, by the executor's functions.

    Args:
        model: gives heads and head size.
        kernel: "cudnn", "pallas" or "blockwise".
        chunk: number of queries: the last chunk of a sequence, on a `seq` axis of size one.
        prefix: tokens before the chunk.
        dtype: dtype of queries, keys and values.
    """
    total, target = prefix + chunk, None
    if kernel == "pallas":
        groups = model.num_heads // model.num_kv_heads
        target = target_of(jax.devices()[0].device_kind, groups, jnp.dtype(dtype).itemsize)
    split = Split(1, 1, "q", kernel, target=target)
    shape = (1, 1, model.num_kv_heads, total + chunk, cache_head_dim(kernel, model.head_dim))
    queries = (chunk, model.num_heads, model.head_dim)

    def where() -> Chunk:
        positions_S = jnp.arange(total, dtype=jnp.int32)
        keys = sequence.member_tags(positions_S, jnp.zeros_like(positions_S), split, chunk)
        tags = sequence.chunk_tags(keys, prefix, chunk, chunk, split, bound=None)
        return Chunk(jnp.int32(0), jnp.int32(prefix), jnp.int32(chunk), tags)

    def make():
        return normal(0, queries, dtype), Cache(normal(1, shape, dtype), normal(2, shape, dtype)), where()

    def without_window(at: Chunk) -> Chunk:
        """Makes static again what a loop carries as arrays."""
        return at._replace(tags=at.tags._replace(window=0, begin=0))

    def forward(state):
        q, cache, at = state
        out, _ = sequence.forward(q, cache, without_window(at), 0, split)
        return q + out, cache, at

    def make_backward():
        q, cache, at = make()
        out, lse = sequence.forward(q, cache, at, 0, split)
        sums = Cache(*(jnp.zeros(shape, accumulator(dtype)) for _ in range(2)))
        return q, cache, at, out, lse, normal(3, queries, dtype), sums

    def backward(state):
        q, cache, at, out, lse, dout, sums = state
        attended = sequence.Attended(q, out, lse, dout)
        dq, sums = sequence.backward(attended, cache, sums, without_window(at), 0, split)
        return q, cache, at, out, lse, dout + dq, sums

    return (make, forward), (make_backward, backward)


def stream_work(num_bytes: int) -> Work:
    """Returns the arguments of `Timer.seconds` for adding one array to another, like a sum of gradients.

    Args:
        num_bytes: of each; two are read and one is written.
    """

    def make():
        return jnp.zeros((num_bytes // 4,), jnp.float32), normal(0, (num_bytes // 4,), jnp.float32)

    return make, lambda state: (state[0] + state[1], state[1])


def _stream(timer: Timer, sizes: Sizes, say: Say) -> float:
    bytes_s = 3 * sizes.stream_bytes / timer.seconds(*stream_work(sizes.stream_bytes))
    say(f"device memory: {bytes_s / 1e9:.4g} GB/s")
    return bytes_s


def _link(timer: Timer, elements: int, dtype, say: Say) -> float | None:
    """Passes a chunk's activations to the next device, around a ring of all devices."""
    num_devices = len(timer.devices)
    if num_devices == 1:
        say("link: not measured, because there is only one device")
        return None
    perm = [(i, (i + 1) % num_devices) for i in range(num_devices)]
    seconds = timer.seconds(lambda: normal(0, (elements,), dtype), lambda x: lax.ppermute(x, AXIS, perm))
    bytes_s = elements * jnp.dtype(dtype).itemsize / seconds
    say(f"link to the next device: {bytes_s / 1e9:.4g} GB/s")
    return bytes_s


def _host_link(timer: Timer, sizes: Sizes, say: Say) -> float | None:
    """Copies to pinned host memory and back, on all devices at once; returns the rate of the slower way."""
    if timer.devices[0].platform == "cpu":
        say("host copies: not measured, because on a CPU host memory is device memory")
        return None
    row_bytes = sizes.stream_bytes // (8 * _COPY_ROWS)
    bytes_s = {way: timer.agreed_least(copy_bytes_s(timer, way, _COPY_ROWS, row_bytes)) for way in WAYS}
    shown = ", ".join(f"{way} {rate / 1e9:.4g} GB/s" for way, rate in bytes_s.items())
    say(f"host copies, all devices at once: {shown}")
    return min(bytes_s.values())
