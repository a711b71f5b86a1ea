"""A search without Python's cyclic garbage collector.

A search makes millions of small tuples that stay until its end, and few cycles. The collector goes through all of them
again and again, for a third of a long search.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Turns the collector off for a while; leaves it as it was found."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
