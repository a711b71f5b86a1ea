"""What a device's host memory is made of, array by array: all that the pool of pinned memory is asked for."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HostArrays:
    """Bytes on the host of one device; all empty in a plan that is older than this.

    Args:
        state: of each array of the state that waits there, in the order in which a run makes them.
        stash_bytes: of the stash, which `host_pieces` of the plan cut.
        save: of each array of the state's copy that an asynchronous save writes.
    """

    state: tuple[int, ...] = ()
    stash_bytes: int = 0
    save: tuple[int, ...] = ()

    def temporaries(self, host_bytes: int, host_pieces: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the bytes of the allocations that the step's program has on the host, in order.

        XLA puts all host temporaries into one allocation. Where the stash is cut, no allocation is larger than the
        largest piece, and XLA fills them one after another.

        Args:
            host_bytes: all bytes of a device on the host during a step.
            host_pieces: the shares of the stash in each array, in 1024ths.
        """
        left = host_bytes - sum(self.state)
        if len(host_pieces) == 1 or not self.stash_bytes:
            return (left,) if left else ()
        largest = piece_bytes(self.stash_bytes, max(host_pieces))
        whole, rest = divmod(left, largest)
        return (largest,) * whole + ((rest,) if rest else ())


def piece_bytes(stash_bytes: int, share: int) -> int:
    """Returns the bytes of a piece of the stash, given its share in 1024ths."""
    return -(-stash_bytes * share // 1024)
