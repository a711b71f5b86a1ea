"""What happens in some iterations of a loop over ticks, and not in others."""

from collections.abc import Callable

from jax import lax


def when(flag, change: Callable, carried):
    """Returns `change(carried)` where the flag is 1, else `carried`; a flag that is an int is known.

    A loop of at most one iteration, not a branch: XLA updates in place what a loop carries, and the collectives of
    loops have an order on CPUs.
    """
    if isinstance(flag, int):
        return change(carried) if flag else carried
    return lax.fori_loop(0, flag, lambda _, carried: change(carried), carried)
