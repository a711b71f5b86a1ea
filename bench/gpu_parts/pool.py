"""Part `pool`: how much host memory XLA pins for a program's host buffers, and how fast.

XLA's pool asks for a region of the next power of two, and every page of the region is taken, unless a limit cuts it.
The first call of a program pins; later calls copy alone.

Letters: N rows and columns of a matrix.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.program import Program, Target, median, random_arrays, target_here, timed
from bench.gpu_parts.room import needed_gib, pinned_bytes
from sppo_jax.arrays import buffers
from sppo_jax.compat import to_device, to_host
from sppo_jax.hardware import machine
from sppo_jax.hardware.pinned_limit import fill_requests
from sppo_jax.processes import host_pool
from sppo_jax.processes.environment import HOST_LIMIT

_GIB = 2**30
_ASKED_GIB = 20


def cases(*, tiny: bool) -> list[Case]:
    """List the cases: XLA's own limit, and one just above what is asked for, in a pool that a run has filled or not."""
    if tiny:
        return [Case(part="pool", name="tiny", settings={"rows": 4, "side": 64}, expected_s=10, limit_s=60)]
    settings = {"rows": _ASKED_GIB * 8, "side": 8192}  # rows of 128 MiB
    tight = {"limit_gib": _ASKED_GIB + 1}
    return [
        Case(
            part="pool",
            name=f"{_ASKED_GIB} GiB{name}",
            settings=settings | limit,
            expected_s=expected_s,
            limit_s=150,
            hbm_gib=16,
            host_gib=needed_gib(pinned_bytes(_ASKED_GIB * _GIB) / _GIB),
        )
        for name, limit, expected_s in (
            ("", {}, 25),
            (", filled beforehand", tight | {"filled": True}, 20),
            (", tight limit", tight, 20),
        )
    ]


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List the program of a case."""
    fill = target.jit(functools.partial(_fill, settings["rows"]), uses_host=True)
    yield Program("fill", fill, (target.shape(settings["side"], settings["side"]),))


def run(settings: dict, device: str, emit: Emit) -> None:
    """Fill a host buffer twice and more; the memory that is in use before and after says what was pinned."""
    if "limit_gib" in settings:
        os.environ[HOST_LIMIT] = str(settings["limit_gib"])  # before jax looks for devices
    target = target_here(device)
    program = next(programs(settings, target))
    step, arrays = program.lower().compile(), random_arrays(program.arguments)
    jax.block_until_ready(arrays)
    before_bytes, begin_s = used_bytes(), time.perf_counter()
    if "filled" in settings:
        host_pool.fill(fill_requests(settings["limit_gib"], machine.refused_bytes()), target.devices[0])
    filled_bytes, filled_s = used_bytes() - before_bytes, time.perf_counter() - begin_s
    jax.block_until_ready(step(*arrays))
    first_s = time.perf_counter() - begin_s - filled_s
    taken_bytes, later_s = used_bytes() - before_bytes, median(timed(lambda: step(*arrays)))
    asked_bytes = settings["rows"] * settings["side"] ** 2 * program.arguments[0].dtype.itemsize
    filled = {"filled_bytes": filled_bytes, "filled_s": filled_s} if "filled" in settings else {}
    emit(_row(settings, asked_bytes, taken_bytes, (first_s, later_s)) | filled)


def _row(settings: dict, asked_bytes: int, taken_bytes: int, seconds: tuple[float, float]) -> dict:
    first_s, later_s = seconds
    what, expected_bytes = "XLA's own limit", pinned_bytes(asked_bytes)
    if "limit_gib" in settings:
        what = f"limit of {settings['limit_gib']} GiB" + (", filled beforehand" if "filled" in settings else "")
        limit_bytes = settings["limit_gib"] * _GIB
        expected_bytes = limit_bytes if "filled" in settings else min(expected_bytes, limit_bytes)
    return {
        "what": what,
        "asked_bytes": asked_bytes,
        "taken_bytes": taken_bytes,
        "expected_bytes": expected_bytes,
        "first_s": first_s,
        "later_s": later_s,
        "pinned_bytes_s": taken_bytes / (first_s - later_s) if first_s > later_s and "filled" not in settings else None,
        "copied_bytes_s": asked_bytes / later_s,
    }


def used_bytes() -> int:
    """Return the memory of this machine that is in use; also right where a virtual machine's memory grows."""
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    found = {name: int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return (found["MemTotal"] - found["MemAvailable"]) * 1024


def _fill(rows: int, x_NN: jax.Array) -> tuple[jax.Array, jax.Array]:
    def turn(i, carry):
        x, host = carry
        return x + x, buffers.write(host, (i,), to_host(x))

    host = to_host(jnp.zeros((rows, *x_NN.shape), x_NN.dtype))
    x_NN, host = lax.fori_loop(0, rows, turn, (x_NN, host))
    return x_NN[:1], to_device(buffers.read(host, (rows - 1, 0), (1, x_NN.shape[1])))
