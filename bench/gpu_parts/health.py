"""Part `health`: what the machine can do at best: matrix products, host copies each way and at once, both together.

Letters: R rows of a host buffer, N rows and columns of a matrix, H elements of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.program import Program, Target, median, random_arrays, target_here, timed, timer_of
from bench.gpu_parts.room import needed_gib
from sppo_jax.arrays import buffers
from sppo_jax.compat import to_device, to_host
from sppo_jax.profile.measure import matmul_work

# What a turn of a loop does besides nothing: matrix products, attention, a copy to the host, a copy back; rows by
# counter (the compiler makes a DMA of such a copy) or looked up in a table that the compiler does not know (a kernel,
# which reads and writes the host's memory).
FILL = "copy out"
LOOPS = {
    FILL: None,
    "products": {"products": True},
    "copy back": {"back": True},
    "copy both ways": {"out": True, "back": True},
    "products, copy both ways": {"products": True, "out": True, "back": True},
    "copy both ways, rows by table": {"out": True, "back": True, "by_table": True},
    "products, copy both ways, rows by table": {"products": True, "out": True, "back": True, "by_table": True},
    "attention": {"attention": True},
    "attention, copy both ways": {"attention": True, "out": True, "back": True},
    "attention, copy both ways, rows by table": {"attention": True, "out": True, "back": True, "by_table": True},
}
_HEAD_DIM = 128
# Rows of a bfloat16 matrix that a TPU copies at least.
_TILE_ROWS = 16


def cases(*, tiny: bool) -> list[Case]:
    """List the cases."""
    loops = [FILL, "products, copy both ways, rows by table", "attention, copy both ways"]
    settings = {"squares": [64], "side": 64, "turns": 4, "num_products": 2, "run_s": 0.001, "loops": loops}
    if not tiny:
        # 128 MiB a row: 2.5 ms at 50 GB/s, about as long as two products of 8192.
        settings = {"squares": [8192, 16384], "side": 8192, "turns": 16, "num_products": 3, "run_s": 0.3}
        settings["loops"] = list(LOOPS)
    needs = {} if tiny else {"hbm_gib": 16.0, "host_gib": needed_gib(5)}
    return [
        Case(part="health", name="ceilings", settings=settings, expected_s=10 if tiny else 50, limit_s=240, **needs)
    ]


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List the programs of a case."""
    for size in settings["squares"]:
        yield Program(
            f"matmul {size}", *timer_of(settings, target).program(*matmul_work(size, size, size, jnp.bfloat16))
        )
    side, turns = settings["side"], settings["turns"]
    square = target.shape(side, side)
    for name in settings["loops"]:
        kernel = "cudnn" if target.platform == "gpu" else "xla"
        loop = target.jit(functools.partial(copy_loop, settings | {"kernel": kernel}, LOOPS[name]), uses_host=True)
        yield Program(name, loop, (square, square, target.shape(turns, dtype=jnp.int32)))


def run(settings: dict, device: str, emit: Emit) -> None:
    """Measure each ceiling; a row each."""
    target = target_here(device)
    stats = target.devices[0].memory_stats() or {}
    emit({"what": "memory that jax may take", "bytes": stats.get("bytes_limit")})
    for size in settings["squares"]:
        seconds = timer_of(settings, target).seconds(*matmul_work(size, size, size, jnp.bfloat16))
        emit({"what": f"matmul {size}", "flops_s": 4.0 * size**3 / seconds})
    fill_s = 0.0
    for program in programs(settings, target):
        if program.name in LOOPS:
            row = _measure_loop(settings, program, fill_s)
            fill_s = median(row["turn_s"]) if program.name == FILL else fill_s
            emit(row)


def _measure_loop(settings: dict, program: Program, fill_s: float) -> dict:
    """Time a program and charge its second loop: its turns, less those that fill the buffer."""
    x, w, rows = program.arguments
    arrays = [*random_arrays([x, w]), jnp.arange(rows.shape[0], dtype=jnp.int32)]
    seconds = [s / settings["turns"] - fill_s for s in timed(lambda: program.function(*arrays))]
    kinds = LOOPS[program.name] or {"out": True}
    copied_bytes = settings["side"] ** 2 * x.dtype.itemsize * (kinds.get("out", False) + kinds.get("back", False))
    flops = 2 * settings["side"] ** 3 * settings["num_products"] * kinds.get("products", False)
    flops += 4 * settings["side"] ** 3 * kinds.get("attention", False)
    return {
        "what": program.name,
        "turn_s": seconds,
        "bytes_s": copied_bytes / median(seconds) if copied_bytes else None,
        "flops_s": flops / median(seconds) if flops else None,
    }


def copy_loop(settings: dict, kinds: dict | None, x_NN: jax.Array, w_NN: jax.Array, rows_R: jax.Array) -> tuple:
    """Fill a buffer in pinned host memory row by row; then run turns of products and copies that can overlap.

    Args:
        settings: number of turns and of products a turn, and the kernel of attention.
        kinds: what a turn of the second loop does; None leaves the loop out.
        x_NN, w_NN: matrices; x is what is copied out.
        rows_R: row of the buffer for each turn, where rows are looked up.

    Returns:
        What was computed, and a piece of each buffer, so that nothing is left out.
    """
    turns, side = settings["turns"], settings["side"]
    shape = (turns, side, side)
    w_NN = w_NN * jnp.asarray(side**-0.5, w_NN.dtype)  # so that products keep their size

    def fill(i, carry):
        x, host = carry
        return x + x, buffers.write(host, (i,), to_host(x))

    x_NN, waiting = lax.fori_loop(0, turns, fill, (x_NN, to_host(jnp.zeros(shape, x_NN.dtype))))
    written, seen_NN = None, jnp.zeros_like(x_NN)
    if kinds is not None and kinds.get("out"):
        # One row more, or the compiler makes one buffer of the two.
        written = to_host(jnp.zeros((turns + 1, side, side), x_NN.dtype))
    if kinds is not None:
        turn = functools.partial(_turn, settings, kinds, rows_R, w_NN, waiting)
        x_NN, seen_NN, written = lax.fori_loop(0, turns, turn, (x_NN, seen_NN, written))
    hosts = [host for host in (waiting, written) if host is not None]
    piece = (_TILE_ROWS, side)
    return x_NN, seen_NN, [to_device(buffers.read(host, (0, 0), piece)) for host in hosts]


def _turn(settings: dict, kinds: dict, rows_R: jax.Array, w_NN: jax.Array, waiting: jax.Array, i, carry) -> tuple:
    x, seen, written = carry
    row = rows_R[i] if kinds.get("by_table") else i
    if kinds.get("out"):
        written = buffers.write(written, (row,), to_host(x))
    if kinds.get("back"):
        seen = seen + to_device(buffers.read(waiting, (row,), x.shape))
    if kinds.get("products"):
        for _ in range(settings["num_products"]):
            x = x @ w_NN
    elif kinds.get("attention"):
        x = _attend(x, settings["kernel"])
    else:
        x = x + x  # what is copied out differs from turn to turn
    return x, seen, written


def _attend(x_NN: jax.Array, kernel: str) -> jax.Array:
    """Let each of N tokens attend to all N, with N / H heads."""
    size = x_NN.shape[0]
    heads = x_NN.reshape(1, size, -1, min(_HEAD_DIM, size))
    with jax.numpy_dtype_promotion("standard"):  # jax's own kernel for CPUs mixes dtypes
        return jax.nn.dot_product_attention(heads, heads, heads, implementation=kernel).reshape(x_NN.shape)
