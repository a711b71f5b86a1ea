"""What a process wants done between steps, agreed on by all: go on, save, or save and stop.

A process alone may be told to stop, or find that it is time to save; all must do so after the same step. Each puts what
it asks for into a small array that every step takes. The largest comes back with the step's loss. Nothing else is sent.
"""

from __future__ import annotations

from contextlib import ExitStack

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sppo_jax import distributed
from sppo_jax.stopping import SAVES, Stopping, in_force

GO, SAVE, STOP = 0, 1, 2


def signal_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of the array of requests: an element a device."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


class Signals:
    """What this process asks for, and its array on the devices."""

    def __init__(self, mesh: Mesh):
        """Ask to go on.

        Args:
            mesh: of all devices of the run.
        """
        self._shape, self._sharding = (mesh.size,), signal_sharding(mesh)
        self._arrays: dict[int, jax.Array] = {}
        self._own = ExitStack()
        self._stopping: Stopping | None = None

    @property
    def stop_reason(self) -> str | None:
        """The signal that told this process to stop."""
        return self._stopping.reason if self._stopping else None

    def array(self, *, save: bool = False) -> jax.Array:
        """Return int32 [devices], this process's part holding what it asks for.

        Args:
            save: whether this process finds it time to save.
        """
        asked = STOP if self.stop_reason else SAVE if save else GO
        if asked not in self._arrays:
            whole = np.full(self._shape, asked, np.int32)
            self._arrays[asked] = jax.make_array_from_callback(self._shape, self._sharding, lambda index: whole[index])
        return self._arrays[asked]

    def __enter__(self) -> Signals:
        """Heed the signals that the command takes; where no command does, take them: they are requests at once."""
        self._stopping = in_force()
        if self._stopping is None:
            self._stopping = self._own.enter_context(Stopping())
            self._stopping.mode = SAVES
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back, unless they are the command's."""
        self._own.close()

    def begin(self) -> None:
        """Take a signal as the request to stop from now on: there will be a state to save.

        Processes wait for each other: where one was told to stop before, all end here.
        """
        distributed.exchange("")
        if self._stopping:
            self._stopping.mode = SAVES
