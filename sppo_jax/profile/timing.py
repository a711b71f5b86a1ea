"""Seconds of a piece of work while every device does the same; no device is measured while the others are idle."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sppo_jax.processes import distributed

AXIS = "device"
# XLA makes no loop of a single turn, and then no copy of the state, which both loops must make.
_FEW_TURNS, _MOST_TURNS = 2, 10_000


@dataclass(frozen=True, kw_only=True)
class Timer:
    """Devices to measure, and for how long.

    Args:
        devices: the devices that all do the work.
        run_s: seconds that one run should take at least.
        runs: runs, of which the median counts.
    """

    devices: tuple[Any, ...]
    run_s: float
    runs: int

    @property
    def mesh(self) -> Mesh:
        return Mesh(np.asarray(self.devices), (AXIS,), axis_types=(AxisType.Auto,))

    def seconds(self, make: Callable[[], Any], turn: Callable[[Any], Any]) -> float:
        """Returns the seconds of one turn.

        Turns run in loops whose counts the compiler knows. A GPU's loop of any other count stops after each turn, for
        the host to read whether it goes on: about 25 us, or longer than a short turn.

        Args:
            make: makes the state of one device, a tree of arrays; collectives over AXIS are allowed.
            turn: makes the next state; it is compiled twice, in a short loop and in a long one.
        """
        return _agreed(max(self.device_seconds(make, turn)))

    def device_seconds(self, make: Callable[[], Any], turn: Callable[[Any], Any]) -> list[float]:
        """Returns the seconds of one turn on each device of this process, while all devices do the same.

        Args: as `seconds`.
        """
        start = self._begin(make)()
        short = self._turns(turn, _FEW_TURNS).lower(start).compile()
        seconds_of(short, start)  # loads what runs
        one_s = _agreed(max(seconds_of(short, start))) / _FEW_TURNS
        more = min(_MOST_TURNS, max(_FEW_TURNS, round(self.run_s / one_s)))
        long = self._turns(turn, _FEW_TURNS + more).lower(start).compile()
        runs = [(seconds_of(short, start), seconds_of(long, start)) for _ in range(self.runs)]
        short_s, long_s = (list(map(statistics.median, zip(*times, strict=True))) for times in zip(*runs, strict=True))

        def turn_s(short: float, long: float) -> float:
            # The difference leaves out the start of a run, and the copy of its state.
            return (long - short) / more if long > short else long / (_FEW_TURNS + more)

        return list(map(turn_s, short_s, long_s))

    def agreed_least(self, rates: list[float]) -> float:
        """Returns the least of the rates of all devices, the same in all processes."""
        return 1.0 / _agreed(1.0 / min(rates))

    def program(self, make: Callable[[], Any], turn: Callable[[Any], Any]) -> tuple[Callable, tuple[Any, ...]]:
        """Returns the jitted short loop of `seconds`, and its argument's shapes; the devices need not exist."""

        def place(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(self.mesh, P(AXIS)))

        state = jax.tree.map(place, jax.eval_shape(self._begin(make)))
        return self._turns(turn, _FEW_TURNS), (state,)

    def call_seconds(self, call: Callable[[], Any]) -> float:
        """Returns the seconds of a call that makes arrays, from its start until the arrays are ready."""
        jax.block_until_ready(call())

        def once() -> float:
            begin = time.perf_counter()
            jax.block_until_ready(call())
            return time.perf_counter() - begin

        return _agreed(statistics.median(once() for _ in range(self.runs)))

    def _begin(self, make: Callable[[], Any]) -> Callable:
        return self._everywhere(lambda: _row(make()), in_specs=())

    def _turns(self, turn: Callable, count: int) -> Callable:
        def run(state):
            state = jax.tree.map(lambda x: x[0], state)
            return _row(lax.fori_loop(0, count, lambda _, s: turn(s), state))

        return self._everywhere(run, in_specs=(P(AXIS),))

    def _everywhere(self, f: Callable, *, in_specs) -> Callable:
        return jax.jit(jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=P(AXIS), check_vma=False))


def _row(tree):
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def seconds_of(step, *args) -> list[float]:
    """Returns the seconds after which each device of this process has its part of the result."""
    begin = time.perf_counter()
    shards = jax.tree.leaves(step(*args))[0].addressable_shards

    def wait(shard) -> float:
        shard.data.block_until_ready()
        return time.perf_counter() - begin

    with ThreadPoolExecutor(len(shards)) as threads:
        return list(threads.map(wait, shards))


def _agreed(seconds: float) -> float:
    """Returns the longest of all processes' seconds, so that all processes continue with the same value."""
    return max(map(float, distributed.exchange(repr(seconds))))
