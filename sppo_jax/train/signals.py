"""What a process wants done between steps, agreed on by all: go on, save, or save and stop.

A process alone may be told to stop, or find that it is time to save; all must do it after the same step. Each puts its
wish into a small array that every step takes, and the largest comes back with the step's loss. Nothing else is sent.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

GO, SAVE, STOP = 0, 1, 2


def signal_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of the array of wishes: an element a device."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


class Signals:
    """This process's wish, and its array on the devices."""

    def __init__(self, mesh: Mesh):
        """Wish to go on.

        Args:
            mesh: of all devices of the run.
        """
        self._shape, self._sharding = (mesh.size,), signal_sharding(mesh)
        self._arrays: dict[int, jax.Array] = {}
        self._before: dict[int, Any] = {}
        self.stop_reason: str | None = None

    def array(self, *, save: bool = False) -> jax.Array:
        """Return int32 [devices], this process's part holding its wish.

        Args:
            save: whether this process finds it time to save.
        """
        wish = STOP if self.stop_reason else SAVE if save else GO
        if wish not in self._arrays:
            whole = np.full(self._shape, wish, np.int32)
            self._arrays[wish] = jax.make_array_from_callback(self._shape, self._sharding, lambda index: whole[index])
        return self._arrays[wish]

    def __enter__(self) -> Signals:
        """Take SIGTERM and Ctrl-C as the wish to stop; the second Ctrl-C stops at once, without saving."""
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._wish_to_stop) for each in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _wish_to_stop(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.stop_reason:
            raise KeyboardInterrupt
        self.stop_reason = signal.Signals(number).name
