"""How large and how long the rows of `sppo check` are: on CPUs so small that all of them take less than a minute."""

from __future__ import annotations

from dataclasses import dataclass, replace

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and durations.

    Args:
        side: rows and columns of products.
        stream_bytes: of an array that is added to another.
        copy_rows: of a buffer on the host.
        copy_row_bytes: of each.
        copy_ways: ways of copies that are measured.
        row_elements: of a row on the host whose values are checked.
        exchanged: elements of 4 bytes that a device sends.
        loop_turns: of the loops that may wait.
        loop_side: rows and columns of their matrices.
        pinned_bytes: of a device.
        run_s: seconds of a timed run.
        runs: of which the median counts.
    """

    side: int
    stream_bytes: int
    copy_rows: int
    copy_row_bytes: int
    copy_ways: tuple[str, ...] = ("out", "back", "both")
    row_elements: int
    exchanged: int
    loop_turns: int = 8
    loop_side: int = 8192
    pinned_bytes: int = 4 * 2**30
    run_s: float
    runs: int


_ON_CPU = Sizes(
    side=64,
    stream_bytes=_MIB,
    copy_rows=4,
    copy_row_bytes=_MIB // 4,
    copy_ways=("both",),
    row_elements=64,
    exchanged=1024,
    run_s=0.002,
    runs=3,
)
_ON_DEVICE = Sizes(
    side=8192,
    stream_bytes=2**30,
    copy_rows=8,
    copy_row_bytes=64 * _MIB,
    row_elements=2**18,
    exchanged=64 * _MIB,
    run_s=0.5,
    runs=5,
)


def sizes_of(platform: str, *, quick: bool) -> Sizes:
    """Returns the sizes for a platform, "cpu", "gpu" or "tpu".

    Args:
        platform: of the devices.
        quick: whether runs are short.
    """
    if platform == "cpu":
        return _ON_CPU
    return replace(_ON_DEVICE, run_s=0.15, runs=3) if quick else _ON_DEVICE
