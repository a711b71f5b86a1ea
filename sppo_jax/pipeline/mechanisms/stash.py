"""The stash: filled by forwards, written to the host a tick later, and fetched a tick before its backward."""

from dataclasses import dataclass, replace
from typing import Any

import jax

from sppo_jax.pipeline.mechanism import Mechanism, TickOnDevice
from sppo_jax.pipeline.run import Run
from sppo_jax.pipeline.stash.buffers import Arrays, HostPlace, Pieces, StashLayout
from sppo_jax.program.stash import StashClass


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stash(Mechanism):
    """The stashes of a training step.

    Args:
        kept, host: the stash of each class, on the device and on the host; there in the pieces of the plan.
        part: a forward's stash on its way to the host.
        fetched: stash that came back from the host for the next backward.
    """

    kept: dict[StashClass, Arrays]
    host: dict[StashClass, Pieces]
    part: Pieces | None = None
    fetched: Pieces | None = None

    @classmethod
    def begin(cls, run: Run, host: dict[StashClass, Pieces] | None) -> "Stash":
        """Allocates the buffers; those on the host where the step is not given them."""
        program = run.program.stash
        layouts = {name: run.layout(name) for name in program.classes}
        if host is None:
            host = {
                name: layout.host_buffer(program.num_rows[name], program.num_short.get(name, 0))
                for name, layout in layouts.items()
                if name.uses_host
            }
        return cls({name: layout.kept_buffers() for name, layout in layouts.items()}, host)

    def before(self, run: Run, tick: TickOnDevice) -> "Stash":
        """Writes what the compute tick before has stashed to the host."""
        name = tick.spec.stash.write
        if name is None:
            return self
        assert self.part is not None, "a forward comes before"
        place = HostPlace(tick.row["stash.write_row"].number, tick.row["stash.write_short"].number)
        written = run.layout(name).write_host(self.host[name], place, self.part)
        return replace(self, host={**self.host, name: written}, part=None)

    def start(self, run: Run, tick: TickOnDevice, state: Any) -> Pieces | None:
        """Fetches the stash of the next backward."""
        name = tick.spec.stash.fetch
        if name is None:
            return None
        place = HostPlace(tick.row_to_fetch("stash.fetch_row"), tick.row_to_fetch("stash.fetch_short"))
        return run.layout(name).fetch_host(self.host[name], place)

    def arrive(self, run: Run, tick: TickOnDevice, coming: Pieces | None) -> "Stash":
        """Keeps what was fetched for the next backward."""
        return replace(self, fetched=coming)

    def sent(self, tick: TickOnDevice) -> dict[StashClass, Pieces] | None:
        """Returns the buffer that the tick has written."""
        name = tick.spec.stash.write
        return None if name is None else {name: self.host[name]}

    def with_sent(self, sent: dict[StashClass, Pieces]) -> "Stash":
        """Returns the stash with the buffer that was written."""
        return replace(self, host={**self.host, **sent})

    def to_fill(self, run: Run, tick: TickOnDevice) -> tuple[StashLayout, Arrays, Pieces | None] | None:
        """Returns what a forward fills: the layout, the buffers on the device and the part for the host."""
        name = tick.spec.stash.own
        if name is None:
            return None
        layout = run.layout(name)
        return layout, self.kept[name], layout.host_part() if name.uses_host else None

    def with_filled(self, tick: TickOnDevice, filled: tuple[Arrays, Pieces | None] | tuple[()]) -> "Stash":
        """Returns the stash with what a forward has filled."""
        name = tick.spec.stash.own
        if name is None:
            return self
        kept, part = filled  # type: ignore[misc]
        return replace(self, kept={**self.kept, name: kept}, part=part)

    def to_use(self, run: Run, tick: TickOnDevice) -> tuple[StashLayout, Arrays, Pieces | None]:
        """Returns what a backward uses: the layout, the buffers on the device and what was fetched."""
        name = tick.spec.stash.own
        assert name is not None, "a backward has a stash"
        return run.layout(name), self.kept[name], self.fetched
