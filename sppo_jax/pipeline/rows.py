"""The rows of a tick: numbers that follow from those of all ticks and the counters of the loops around the tick.

Rows on the host are special: XLA copies them with the DMA engines of a GPU only where the counter of the innermost loop
alone tells the row. Before jaxlib 0.12 the row has to be affine in this counter. A row that depends on the counters of
two loops, or on the stage, is copied by a kernel.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sppo_jax.arrays import buffers
from sppo_jax.program.counters import numbers_of_iterations, step_of
from sppo_jax.program.tick_rows import FLAGS, HOST_ROWS


class HostRow(NamedTuple):
    """A row on the host, and whether the counter of the innermost loop alone tells the row."""

    number: jax.Array
    is_counted: bool


@dataclass(frozen=True)
class TickRows:
    """The numbers of some ticks that follow one another.

    Args:
        values: [iterations of each loop around, ticks, stages].
        counters: of these loops, outermost first.
        me: this device's stage.
        field: what the numbers are, one of `tick_rows.FIELDS`.
    """

    values: np.ndarray
    counters: tuple
    me: jax.Array
    field: str

    def cut(self, start: int, length: int) -> "TickRows":
        """Returns those of `length` ticks from `start`."""
        return self._with(self.values[..., start : start + length, :], self.counters)

    def in_iteration(self, counter, count: int) -> "TickRows":
        """Returns those of one iteration of a loop of `count` iterations over all ticks."""
        *iterations, ticks, stages = self.values.shape
        return self._with(self.values.reshape(*iterations, count, ticks // count, stages), (*self.counters, counter))

    def of_tick(self) -> jax.Array | HostRow | int:
        """Returns the number of the first tick for each stage; of this stage a row on the host.

        A flag is the same for all stages, and an int where it is the same in all iterations: the compiler would take it
        for a constant, drop the branch, and with it what orders collectives on CPUs.
        """
        values = self.values[..., 0, :]
        if self.field in HOST_ROWS:
            return self._host_row(values)
        if self.field not in FLAGS:
            return _look_up(values, self.counters)
        first = int(values.flat[0])
        return first if (values == first).all() else _look_up(values, self.counters)[0]

    def _host_row(self, values: np.ndarray) -> HostRow:
        numbers = numbers_of_iterations(values)
        if numbers is None:
            return HostRow(buffers.pick(_look_up(values, self.counters), self.me), is_counted=False)
        counter, step = jnp.asarray(self.counters[-1], jnp.int32), step_of(numbers)
        if step is None:
            return HostRow(_look_up(numbers, (counter,)), is_counted=True)
        return HostRow(jnp.int32(numbers[0]) + jnp.int32(step) * counter, is_counted=True)

    def _with(self, values: np.ndarray, counters: tuple) -> "TickRows":
        return TickRows(values, counters, self.me, self.field)


class TickRow:
    """The numbers of a tick by field. A tick reads few of them, so a number is looked up where it is read."""

    def __init__(self, look_up: Mapping[str, Callable[[], Any]]):
        """Keeps a function for each field that returns what `TickRows.of_tick` does."""
        self._look_up = look_up

    @classmethod
    def of(cls, rows: Mapping[str, TickRows]) -> "TickRow":
        """Returns the numbers of the first of some ticks."""
        return cls({name: of_field.of_tick for name, of_field in rows.items()})

    def __getitem__(self, field: str) -> Any:
        return self._look_up[field]()

    def later(self, zero: jax.Array, fields: Iterable[str]) -> "TickRow":
        """Returns the same, with some numbers that the compiler knows no earlier than a 0."""
        return TickRow({**self._look_up, **{name: lambda name=name: self[name] + zero for name in fields}})

    def reading(self, fields: Mapping[str, str], **given: jax.Array) -> "TickRow":
        """Returns a row in which some fields have the numbers of others, which `fields` names, or given numbers."""
        others = {name: self._look_up[other] for name, other in fields.items()}
        return TickRow({**self._look_up, **others, **{name: lambda x=x: x for name, x in given.items()}})


def rows_of(field: str, values: np.ndarray, me: jax.Array) -> TickRows:
    """Returns the numbers of all ticks, [ticks, stages]; other arguments as `TickRows`."""
    return TickRows(values, (), me, field)


def _look_up(values: np.ndarray, counters: tuple) -> jax.Array:
    found = jnp.asarray(values)
    for counter in counters:
        found = buffers.read_slot(found, counter)
    return found
