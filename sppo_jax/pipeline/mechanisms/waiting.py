"""Chunks that wait between two groups of layers, forward and backward: in slots on the device, or in rows on the host.

On the host, what came to a stage in one compute tick is written during the next one, and is fetched during the compute
tick before its use.

Letters: T tokens of a tick on one device, D hidden size.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays import buffers
from sppo_jax.compat import to_device, to_host
from sppo_jax.pipeline import vocabulary
from sppo_jax.pipeline.mechanism import Mechanism, TickOnDevice
from sppo_jax.pipeline.run import Run


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WaitingRoom(Mechanism):
    """The chunks that wait.

    Args:
        slots: [slots, T, D] on the device; none where chunks wait on the host.
        rows: [rows, T, D] on the host; none where chunks wait on the device.
        taken: what came back from the host for the next compute tick.
    """

    slots: jax.Array
    rows: jax.Array
    taken: jax.Array | None = None

    @classmethod
    def begin(cls, run: Run, register_TD: jax.Array) -> "WaitingRoom":
        """Allocates the buffers, for what the registers hold."""
        program = run.program.waiting
        # The last slot is trash.
        num_slots = program.num_slots + 1 if program.num_slots else 0
        slots, rows = (
            jnp.zeros((count, *register_TD.shape), register_TD.dtype) for count in (num_slots, program.num_rows)
        )
        return cls(slots, to_host(rows) if program.num_rows else rows)

    def start(self, run: Run, tick: TickOnDevice, state: Any) -> jax.Array | None:
        """Fetches what the next compute tick needs."""
        if not tick.spec.waiting.take:
            return None
        number = tick.row_to_fetch("waiting.take_row")
        return to_device(buffers.read_slot(self.rows, number))

    def comes_early(self, run: Run, tick: TickOnDevice) -> bool:
        """Returns whether a group has one layer: behind it nothing would be left for what is written next."""
        return tick.spec.waiting.put is not None and run.stage.num_layers == 1

    def arrive(self, run: Run, tick: TickOnDevice, coming: jax.Array | None) -> "WaitingRoom":
        """Keeps what was fetched for the next compute tick."""
        return replace(self, taken=coming)

    def after(self, run: Run, tick: TickOnDevice) -> "WaitingRoom":
        """Writes what came in the compute tick before, behind the fetch of this tick."""
        if tick.spec.waiting.put is None:
            return self
        number, rows = tick.row["waiting.put_row"].number, self.rows
        if self.taken is not None:
            # Without an order between the two XLA copies the whole room.
            _, rows = lax.optimization_barrier((self.taken, rows))
            if not run.keeps_order:
                number += buffers.after(self.taken)
        arrived_TD = tick.x_TD if tick.spec.waiting.put == "F" else tick.dx_TD
        return replace(self, rows=buffers.write_slot(rows, number, to_host(arrived_TD)))

    def sent(self, tick: TickOnDevice) -> jax.Array | None:
        """Returns the rows on the host, if the tick has written one."""
        return None if tick.spec.waiting.put is None else self.rows

    def with_sent(self, sent: jax.Array) -> "WaitingRoom":
        """Returns the room with these rows."""
        return replace(self, rows=sent)

    def input(self, run: Run, tick: TickOnDevice, register_TD: jax.Array) -> jax.Array:
        """Returns what came to this stage for its chunk: from the register, or from here."""
        me, size = vocabulary.stage_index(run.num_stages), tick.spec.tokens
        if tick.spec.waiting.waited:
            assert self.taken is not None, "the compute tick before has fetched it"
            waited_TD = self.taken[:size]
        elif run.program.waiting.num_slots:
            waited_TD = buffers.read(self.slots, (tick.mine("waiting.slot", me),), (size, register_TD.shape[1]))
        else:
            return register_TD[:size]
        return jnp.where(tick.mine("waiting.waits", me) == 1, waited_TD, register_TD[:size])

    def let_in(self, run: Run, tick: TickOnDevice, register_TD: jax.Array) -> "WaitingRoom":
        """Takes what has just come to this stage: to the trash slot where it need not wait on the device."""
        if not run.program.waiting.num_slots:
            return self
        me = vocabulary.stage_index(run.num_stages)
        return replace(self, slots=buffers.write_slot(self.slots, tick.mine("waiting.arrive_slot", me), register_TD))
