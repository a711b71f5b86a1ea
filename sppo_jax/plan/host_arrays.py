"""What a device's host memory is made of, array by array: all that the pool of pinned memory is asked for."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HostArrays:
    """Bytes on the host of one device; all empty in a plan that is older than this.

    Args:
        state: of each array of the state that waits there, in the order in which a run makes them.
        stash_bytes: of the stash, which `host_pieces` of the plan cut.
        save: of each array that a save copies there: all at once where saves are asynchronous; else those on the
            device, one after another.
    """

    state: tuple[int, ...] = ()
    stash_bytes: int = 0
    save: tuple[int, ...] = ()

    def of_step(self, host_bytes: int, host_pieces: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the bytes of the arrays of the stash that stay, and of the step's allocation beside them, in order.

        The pieces of a stash are arguments of the step, each an allocation of its own. All that a step makes on the
        host itself, a stash in one piece too, is one allocation.

        Args:
            host_bytes: all bytes of a device on the host during a step.
            host_pieces: the shares of the stash in each array, in 1024ths.
        """
        left = host_bytes - sum(self.state)
        if len(host_pieces) == 1 or not self.stash_bytes:
            return (), (left,) if left else ()
        pieces = tuple(piece_bytes(self.stash_bytes, share) for share in host_pieces)
        left -= self.stash_bytes
        return pieces, (left,) if left > 0 else ()


def piece_bytes(stash_bytes: int, share: int) -> int:
    """Returns the bytes of a piece of the stash, given its share in 1024ths."""
    return -(-stash_bytes * share // 1024)
