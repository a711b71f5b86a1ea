"""Which rows of buffers on the host a compiled program's DMA engines copy, as the compiler wrote them down.

XLA:GPU writes beside a slice whose offset follows from the counter of the innermost loop where the slice lies in each
iteration: where it begins and by how many bytes it moves on, or a table (`dynamic_slice_config`). Copies at wrong
offsets give wrong gradients without an error (openxla/xla#46231), so they are compared with the rows of the plan.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from sppo_jax.fit.hlo.text import computations_of, inner_of, name_of

_CONFIG = '"dynamic_slice_config":'
_SLICE = re.compile(r" (dynamic-slice|dynamic-update-slice)\(%([\w.\-]+)")
_HOST_ARRAY = re.compile(r"= ([a-z]\w*\[[\d,]*\])\{[^}]*S\(5\)[^}]*\}")
_CALLS = re.compile(r"(?:calls|to_apply)=%([\w.\-]+)")
_MOST_SHOWN = 4


class Slice(NamedTuple):
    """Slices of a buffer on the host, one in each iteration of a loop.

    Args:
        buffer: dtype and dims of the buffer on a device's host, such as "u16[7,516,8192]".
        goes_out: whether they are written to the host.
        offsets_bytes: where each begins.
    """

    buffer: str
    goes_out: bool
    offsets_bytes: tuple[int, ...]

    def describe(self) -> str:
        """Returns the slices in words."""
        offsets = self.offsets_bytes
        shown = ", ".join(map(str, offsets[:_MOST_SHOWN])) + (", ..." if len(offsets) > _MOST_SHOWN else "")
        return f"{'writes to' if self.goes_out else 'reads from'} {self.buffer} at bytes {shown}"


def slices_of(hlo_text: str) -> list[Slice]:
    """Returns the slices of buffers on the host at offsets that the compiler knows.

    Args:
        hlo_text: `compiled.as_text()`.
    """
    computations, _ = computations_of(hlo_text)
    trips = _trips(computations)
    return [found for name, lines in computations.items() for found in _of_computation(lines, trips.get(name, 1))]


def wrong_slices(compiled: Iterable[Slice], planned: Sequence[Slice]) -> tuple[Slice, ...]:
    """Returns the compiled slices of the plan's buffers that are no rows of the plan.

    Each loop of the plan is compiled once: as it is, or in parts.

    Args:
        compiled: from `slices_of`.
        planned: of the plan, see `fit/host_rows.py`; slices of other buffers are not judged.
    """
    buffers, left = {one.buffer for one in planned}, list(planned)
    others = []
    for one in compiled:
        if one in left:
            left.remove(one)
        elif one.buffer in buffers:
            others.append(one)
    return tuple(one for one in others if not _take(one, left))


def _take(part: Slice, left: list[Slice]) -> bool:
    """Takes a part of a loop out of those that are left; returns whether there is such a loop."""
    offsets = part.offsets_bytes
    for number, whole in enumerate(left):
        for at in range(len(whole.offsets_bytes) - len(offsets) + 1):
            end = at + len(offsets)
            if whole[:2] == part[:2] and whole.offsets_bytes[at:end] == offsets:
                rest = (whole.offsets_bytes[:at], whole.offsets_bytes[end:])
                left[number : number + 1] = [whole._replace(offsets_bytes=some) for some in rest if some]
                return True
    return False


def _of_computation(lines: Sequence[str], iterations: int) -> Iterator[Slice]:
    for line in lines:
        found = _SLICE.search(line)
        if not found or _CONFIG not in line:
            continue
        source = line if found[1] == "dynamic-update-slice" else _line_of(found[2], lines)
        buffer = _HOST_ARRAY.search(source.partition(", metadata=")[0])
        if buffer:
            yield Slice(buffer[1], found[1] == "dynamic-update-slice", _offsets(line, iterations))


def _line_of(name: str, lines: Sequence[str]) -> str:
    return next((line for line in lines if name_of(line) == name), "")


def _offsets(line: str, iterations: int) -> tuple[int, ...]:
    config, _ = json.JSONDecoder().raw_decode(line, line.index(_CONFIG) + len(_CONFIG))
    if "table" in config:
        return tuple(map(int, config["table"]["offsets"]))
    linear = config.get("linear", config)
    first, stride = (int(linear.get(name, 0)) for name in ("byte_offset", "byte_stride"))
    return tuple(first + number * stride for number in range(iterations if "loop_index" in config else 1))


def _trips(computations: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Returns for each computation the iterations of the innermost loop that runs it; 1 outside of loops."""
    bodies: dict[str, int] = {}
    callers: dict[str, str] = {}
    for name, lines in computations.items():
        for line in lines:
            for inner, count in inner_of(line):
                if " while(" in line:
                    bodies[inner] = count or 1
                else:
                    callers[inner] = name
            for called in _CALLS.findall(line.partition(", metadata=")[0]):
                callers[called] = name

    def trips(name: str) -> int:
        while name not in bodies and name in callers:
            name = callers[name]
        return bodies.get(name, 1)

    return {name: trips(name) for name in computations}
