"""Requests of processes between steps, on which all processes agree: continue, save, or save and stop.

One process may be told to stop, or may find that a save is due, and all processes must do so after the same step. Each
process writes its request to a small array, which is an argument of every step. The step returns the largest request
with the loss. Between the batches of a validation, and where no step runs, the processes gather the array by itself.
"""

from __future__ import annotations

from contextlib import ExitStack

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sppo_jax.evaluation.placement import gather
from sppo_jax.processes import distributed
from sppo_jax.processes.stopping import SAVES, Stopping, in_force

GO, SAVE, STOP = 0, 1, 2


def signal_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of the array of requests, which has one element for each device."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


class Signals:
    """The request of this process, and its array on the devices."""

    def __init__(self, mesh: Mesh):
        """Starts with the request `GO`.

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
        """Returns the requests, int32 [devices]; this process fills its own part.

        Args:
            save: whether this process finds that a save is due.
        """
        asked = STOP if self.stop_reason else SAVE if save else GO
        if asked not in self._arrays:
            whole = np.full(self._shape, asked, np.int32)
            self._arrays[asked] = jax.make_array_from_callback(self._shape, self._sharding, lambda index: whole[index])
        return self._arrays[asked]

    def agreed(self) -> int:
        """Returns the largest request of all processes at this moment; all processes must call it at the same place."""
        return self.alone if distributed.num_processes() == 1 else int(gather(self.array()).max())

    @property
    def alone(self) -> int:
        """The request of the only process, which need not wait for a step to agree; GO where there are several."""
        return STOP if self.stop_reason and distributed.num_processes() == 1 else GO

    def __enter__(self) -> Signals:
        """Uses the command's signal handlers; without a command, installs handlers that make requests at once."""
        self._stopping = in_force()
        if self._stopping is None:
            self._stopping = self._own.enter_context(Stopping())
            self._stopping.mode = SAVES
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the handlers that `__enter__` installed."""
        self._own.close()

    def begin(self) -> None:
        """Treats a signal as the request to stop from now on, because there is a state to save.

        Processes wait for each other. If one of them was told to stop before this call, all end here.
        """
        distributed.exchange("")
        if self._stopping:
            self._stopping.mode = SAVES
