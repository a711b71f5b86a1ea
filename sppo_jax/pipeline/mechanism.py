"""A mechanism: a part of the state, and what happens to it beside the units of a tick.

In each tick the executor calls the hooks of all mechanisms: `before` and `start`, then the tick's units, then `arrive`,
`after` and `sent`. Copies start at the top of a tick. What they bring is held back until most of the tick's compute is
done, so that the compute overlaps them.

Letters: T tokens of a tick on one device, D hidden size.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import jax

from sppo_jax.arrays import buffers
from sppo_jax.pipeline.rows import TickRow
from sppo_jax.pipeline.run import Run
from sppo_jax.program.program import TickSpec


class TickOnDevice(NamedTuple):
    """A tick as it begins.

    Args:
        spec: its static shape.
        row: its numbers by field; see `pipeline.rows`.
        x_TD: register with what came from the stage before.
        dx_TD: register with the cotangent that came from the stage behind; None in an evaluation.
    """

    spec: TickSpec
    row: TickRow
    x_TD: jax.Array
    dx_TD: jax.Array | None

    def begun(self) -> jax.Array:
        """Returns 0, but only once the tick before is done."""
        assert self.dx_TD is not None, "training alone orders ticks"
        return buffers.after(self.x_TD) + buffers.after(self.dx_TD)

    def later(self, zero: jax.Array, fields: Iterable[str]) -> "TickOnDevice":
        """Returns the tick with some numbers that the compiler knows no earlier than a 0."""
        return self._replace(row=self.row.later(zero, fields))

    def mine(self, field: str, me) -> jax.Array:
        """Returns a number of one stage."""
        return buffers.pick(self.row[field], me)

    def row_to_fetch(self, field: str) -> jax.Array:
        """Returns the number of a row on the host; of one that XLA may know only once the tick before is done.

        XLA then starts the copy in this tick and not earlier, where it would hold memory. XLA 0.12 also ends in a
        segmentation fault where it knows that two ticks write and read one row: it takes what was written, and its
        pass that legalizes host copies does not find the copy that it looks for. A loop's iterations are one tick after
        another anyway.
        """
        row = self.row[field]
        return row.number if row.is_counted else row.number + self.begun()


class Mechanism:
    """A part of the state. A hook that a mechanism does not need stays as it is here."""

    def before(self, run: Run, tick: TickOnDevice) -> Self:
        """Does what comes first in a tick."""
        return self

    def start(self, run: Run, tick: TickOnDevice, state: Any) -> Any:
        """Starts the tick's copies; returns a tree of the arrays that they move, None for nothing.

        Args:
            run: what all ticks need.
            tick: the tick.
            state: the whole state, to read what other mechanisms hold.
        """
        return None

    def comes_early(self, run: Run, tick: TickOnDevice) -> bool:
        """Returns whether the arrays of `start` are held back until attention only, and not until the last layer."""
        return False

    def arrive(self, run: Run, tick: TickOnDevice, coming: Any) -> Self:
        """Takes what came in a tick. A compute tick calls this with None too: what it used is gone then."""
        return self

    def after(self, run: Run, tick: TickOnDevice) -> Self:
        """Does what comes last in a compute tick."""
        return self

    def sent(self, tick: TickOnDevice) -> Any:
        """Returns the buffers on the host that the tick has written, None for none."""
        return None

    def with_sent(self, sent: Any) -> Self:
        """Returns the same with these buffers, which are behind the end of the tick's compute."""
        return self
