"""What the parts share: the device that programs are made for, and a program with the shapes of its arguments."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from bench.gpu_parts.room import cluster_of
from sppo_jax.compat import compiler_options
from sppo_jax.fit.figures import Figures
from sppo_jax.hardware import DEVICES, Cluster, Device
from sppo_jax.profile.timing import Timer

TIMED_RUNS = 3
_MOST_THREADS = 8


@dataclass(frozen=True)
class Target:
    """One device or several of a kind, which may be absent.

    Args:
        device: the planner's figures of the device.
        devices: jax devices, or some that programs can only be compiled for.
    """

    device: Device
    devices: tuple[Any, ...]

    @property
    def platform(self) -> str:
        """The compiler's name of the device: "cpu" or "gpu"."""
        return self.device.platform

    @property
    def cluster(self) -> Cluster:
        """The devices as a cluster."""
        return cluster_of(self.device, len(self.devices))

    def shape(self, *dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        """Describe an array on the first device."""
        return jax.ShapeDtypeStruct(dims, dtype, sharding=SingleDeviceSharding(self.devices[0]))

    def jit(self, f: Callable, *, uses_host: bool = False, **options: Any) -> Callable:
        """Jit a function with the compiler options of a training step."""
        return jax.jit(f, compiler_options=compiler_options(self.platform, uses_host, 1), **options)


def target_here(name: str, num_devices: int = 1) -> Target:
    """Return the first devices of this process.

    Args:
        name: of the device, in `sppo_jax.hardware.DEVICES`.
        num_devices: how many.
    """
    return Target(DEVICES[name], tuple(jax.devices()[:num_devices]))


@dataclass(frozen=True)
class Program:
    """A jitted function with the shapes of its arguments.

    Args:
        name: in results.
        function: jitted.
        arguments: shapes, dtypes and shardings.
        turn_shares: of loops of at most one turn, see `sppo_jax.fit.turns`.
        context: makes a context in which the function is traced.
    """

    name: str
    function: Callable
    arguments: tuple[Any, ...]
    turn_shares: Mapping[str, float] = field(default_factory=dict)
    context: Callable[[], AbstractContextManager] = nullcontext

    def lower(self) -> jax.stages.Lowered:
        """Lower the function for its device."""
        with self.context():
            return self.function.lower(*self.arguments)


def compile_together(programs: Sequence[Program]) -> dict[str, jax.stages.Compiled]:
    """Compile programs side by side: XLA compiles one program on one core for most of the time.

    Not for programs that are timed, whose kernels XLA chooses by trying them on the device.

    Args:
        programs: traced one after the other.

    Returns:
        What was compiled, by the program's name.
    """
    lowered = {program.name: program.lower() for program in programs}
    with ThreadPoolExecutor(max_workers=min(_MOST_THREADS, len(lowered))) as pool:
        compiled = pool.map(lambda one: one.compile(), lowered.values())
        return dict(zip(lowered, compiled, strict=True))


def figures_of(compiled: jax.stages.Compiled, turn_shares: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the compiler's figures, or why there are none: a program out of a cache need not have them.

    Args:
        compiled: the program.
        turn_shares: of loops of at most one turn, see `sppo_jax.fit.turns`.
    """
    try:
        return dict(Figures.of(compiled, turn_shares, platform=jax.default_backend()).to_dict())
    except Exception as error:  # what was measured must not be lost for it
        return {"unknown": f"{type(error).__name__}: {error}"[:200]}


def random_arrays(shapes: Sequence[jax.ShapeDtypeStruct], *, seed: int = 0) -> list[jax.Array]:
    """Draw normal values of some shapes, on their devices."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))

    def draw(key: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        make = jax.jit(
            lambda key: jax.random.normal(key, shape.shape, jnp.float32).astype(shape.dtype),
            out_shardings=shape.sharding,
        )
        return make(key)

    return [draw(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def timer_of(settings: dict, target: Target) -> Timer:
    """Return the timer of a case on the devices of a target."""
    return Timer(devices=target.devices, run_s=settings["run_s"], runs=TIMED_RUNS)


def timed(call: Callable[[], Any], *, runs: int = TIMED_RUNS) -> list[float]:
    """Return the seconds of each of some calls, after one that is not timed."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(runs):
        begin_s = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin_s)
    return seconds


def median(seconds: Sequence[float]) -> float:
    """Return the median of some seconds."""
    return statistics.median(seconds)
