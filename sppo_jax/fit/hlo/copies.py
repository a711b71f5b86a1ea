"""Counts the bytes that a scheduled HLO text moves to and from the host, and those whose copies overlap compute.

A copy is overlapped if the schedule has a matrix product, or a loop with one, between the copy's start and its end.

On a GPU even an overlapped write to the host may cost time. A loop whose iterations are not known reads its predicate
from the device in every iteration, and a conditional reads its branch (openxla/xla,
xla/backends/gpu/runtime/while_thunk.cc). That read goes the same way as the write, and copies of one direction share
one DMA engine in the order in which they were asked for. So the device idles at the first such read until the write is
done. A loop inside a CUDA graph reads nothing.

On a GPU a copy of a slice is a memcpy by a DMA engine only where XLA finds that the counter of the innermost loop
tells the slice's offset, and says so beside the slice (`dynamic_slice_config`). Any other copy of a slice is a
kernel, whose blocks take compute units from the products beside the copy.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sppo_jax.fit.hlo.predicates import Predicates
from sppo_jax.fit.hlo.products import PRODUCT, Products
from sppo_jax.fit.hlo.runs import runs_of
from sppo_jax.fit.hlo.shapes import SHAPE, array_bytes
from sppo_jax.fit.hlo.text import computations_of, holds, name_of
from sppo_jax.predict.seconds.loop_waits import loop_wait_s

_DONE = re.compile(r"-done\(%([\w.\-]+)")
_SLICE = re.compile(r" dynamic-(?:update-)?slice\(")
_COPY = re.compile(r" (?:copy|dynamic-slice|dynamic-update-slice)\(")
_CALLED = re.compile(r" (?:async-start|fusion|fusion-start)\(.*calls=%([\w.\-]+)")
_OPTIMIZER = re.compile(r"/(gather_turn|scatter_turn|optimizer_update)/")
_TICK = re.compile(r'op_name="[^"]*?/(forward|backward|head)_tick')
_HOST, _COUNTED = "S(5)", "dynamic_slice_config"


class Event(NamedTuple):
    """A start or an end of a copy.

    Args:
        product_flops: of the matrix products since the event before, at least; see `Products`.
        copy: the number of the copy among those under way together.
        goes_out: its direction.
        size_bytes: of a start, what is copied; 0: an end.
    """

    product_flops: int
    copy: int
    goes_out: bool
    size_bytes: int


class Together(NamedTuple):
    """Copies of both directions that are under way together, and what they have time for.

    Args:
        op: of the tick they run in: "F", "B" or "H"; "" where the text does not say.
        times: how often they run.
        events: their starts and ends, in order.
    """

    op: str
    times: float
    events: tuple[Event, ...]

    def waiting_s(self, link_bytes_s: float, flops_s: float, more_s: float) -> float:
        """Returns the seconds for which compute waits for ends, with `more_s` besides products where most of these are.

        Each direction has an engine that makes one copy after another. Other arguments: see `HostCopies.waiting_s`.
        """
        longest = max(self.events, key=lambda event: event.product_flops)
        now, waiting, free, ends = 0.0, 0.0, {True: 0.0, False: 0.0}, {}
        for event in self.events:
            now += event.product_flops / flops_s + (more_s if event is longest and event.product_flops else 0.0)
            if event.size_bytes:
                free[event.goes_out] = max(now, free[event.goes_out]) + event.size_bytes / link_bytes_s
                ends[event.copy] = free[event.goes_out]
            else:
                waiting += max(0.0, ends[event.copy] - now)
                now = max(now, ends[event.copy])
        return waiting


class LoopWait(NamedTuple):
    """Writes to the host by DMA that are under way together, and for whose end a loop's predicate waits.

    Args:
        op, times: as of `Together`.
        copied_bytes: of one time.
        product_flops: of the matrix products between their start and their end, at least; see `Products`.
        flops_before: of the matrix products between their start and the first such loop, at least.
    """

    op: str
    times: float
    copied_bytes: int
    product_flops: int
    flops_before: int


@dataclass(frozen=True, kw_only=True)
class HostCopies:
    """Bytes of one run of a program, both directions together.

    Args:
        overlapped_bytes: of copies that a matrix product overlaps.
        exposed_bytes: of all others.
        kernel_bytes: of all these, what kernels on the compute units of a GPU copy, and not its DMA engines; None where
            the text tells of no offset whether a counter tells it, as for TPUs.
        loops_unknown: loops of whose iterations neither the text nor the caller says anything; each counts as one
            iteration.
        together: all copies.
        optimizer_bytes: of all these, what belongs to parameters, moments and gradients on the host; all of it is
            exposed.
        loop_waits: of the writes for which a loop's predicate waits.
    """

    overlapped_bytes: int
    exposed_bytes: int
    kernel_bytes: int | None
    loops_unknown: int
    together: tuple[Together, ...]
    optimizer_bytes: int = 0
    loop_waits: tuple[LoopWait, ...] = ()

    @property
    def loop_bytes(self) -> int:
        """Bytes of the writes for whose end a loop's predicate waits."""
        return round(sum(wait.times * wait.copied_bytes for wait in self.loop_waits))

    def loops_s(self, link_bytes_s: float, flops_s: float, besides_s: Mapping[str, Sequence[float]]) -> float:
        """Returns the seconds for which loops wait for writes, less what `waiting_s` counts of the same writes.

        Attention runs in such loops, so that no attention is before the first of them.

        Args:
            link_bytes_s, flops_s, besides_s: as of `waiting_s`.
        """
        seconds = 0.0
        for op, times, copied, product, before in self.loop_waits:
            for more_s in (of_op := besides_s.get(op) or (0.0,)):
                beside_s = product / flops_s + more_s if product else 0.0
                wait_s = loop_wait_s(copied / link_bytes_s, before / flops_s, beside_s)
                seconds += times * wait_s / len(of_op)
        return seconds

    def waiting_s(self, link_bytes_s: float, flops_s: float, besides_s: Mapping[str, Sequence[float]]) -> float:
        """Returns the seconds by which copies take longer than the compute beside them.

        The text does not say of which chunk a tick of a loop is: each run counts as the mean over all chunks.

        Args:
            link_bytes_s: of a device to its host, one way.
            flops_s: of matrix products.
            besides_s: by the op of a tick, for each chunk what the tick takes besides products. It counts where
                products do, because the same layers have both.
        """
        seconds = 0.0
        for one in self.together:
            of_op = besides_s.get(one.op) or (0.0,)
            waits_s = sum(one.waiting_s(link_bytes_s, flops_s, more_s) for more_s in of_op)
            seconds += one.times * waits_s / len(of_op)
        return seconds


def host_copies(
    hlo_text: str, turn_shares: Mapping[str, float] | None = None, graphed: frozenset[str] | None = None
) -> HostCopies:
    """Counts the host copies of a compiled program.

    Args:
        hlo_text: `compiled.as_text()`, whose instructions are in the order in which they run.
        turn_shares: by the scope of loops of at most one iteration, the share of their runs with an iteration
            (`fit/turns.py`).
        graphed: loops and conditionals in CUDA graphs (`fit/thunks.py`); None: no loop reads its predicate, as on TPUs.
    """
    computations, entry = computations_of(hlo_text)
    totals: dict[bool, float] = defaultdict(float)
    products, together, waits = Products(computations), [], []
    predicates = Predicates(computations, products, graphed or frozenset())
    by_kernels, by_optimizer = 0.0, 0.0
    runs = runs_of(computations, entry, _HOST, turn_shares or {})
    for name, times in runs.times:
        lines = computations[name]
        copies = _copies(lines)
        for copy in copies:
            size = times * _moved_bytes(copy.line)
            totals[any(holds(x, PRODUCT, computations) for x in lines[copy.begin + 1 : copy.end])] += size
            by_kernels += size if _is_kernel(copy.line, computations) else 0
            by_optimizer += size if _OPTIMIZER.search(copy.line) else 0
        together += [
            Together(_op(lines[some[0].begin]), times, _events(some, lines, products)) for some in _under_way(copies)
        ]
        if graphed is not None:
            writes = [copy for copy in copies if copy.goes_out and not _is_kernel(copy.line, computations)]
            waits += _loop_waits(writes, lines, times, products, predicates)
    return HostCopies(
        overlapped_bytes=round(totals[True]),
        exposed_bytes=round(totals[False]),
        kernel_bytes=round(by_kernels) if _COUNTED in hlo_text else None,
        loops_unknown=runs.unknown,
        together=tuple(together),
        optimizer_bytes=round(by_optimizer),
        loop_waits=tuple(waits),
    )


def _loop_waits(
    writes: list["_Copy"], lines: list[str], times: float, products: Products, predicates: Predicates
) -> Iterator[LoopWait]:
    """Yields the writes of a computation that have a loop which reads its predicate between start and end."""
    for begin, end, size in _together(writes):
        before = predicates.flops_before(lines[begin + 1 : end])
        if before is not None:
            yield LoopWait(_op(lines[begin]), times, size, products.flops(lines[begin:end]), before)


class _Copy(NamedTuple):
    """A host copy in a computation: the lines of its start and its end, and the instruction."""

    begin: int
    end: int
    line: str

    @property
    def goes_out(self) -> bool:
        return "dynamic-update-slice" in self.line or ("dynamic-slice" not in self.line and _writes_host(self.line))


def _copies(lines: list[str]) -> list[_Copy]:
    """Returns the host copies in a computation; one without start and done ends where it begins."""
    starts, found = {}, []
    for index, line in enumerate(lines):
        name = name_of(line)
        done = _DONE.search(line)
        if done and done.group(1) in starts:
            begin = starts[done.group(1)]
            found.append(_Copy(begin, index, lines[begin]))
        elif name and _HOST in line and "-start(" in line:
            starts[name] = index
        elif name and _HOST in line and _COPY.search(line):
            found.append(_Copy(index, index, line))
    return found


def _op(line: str) -> str:
    """Returns the op of the tick in which an instruction was traced; see `executor.TICK_NAMES`."""
    tick = _TICK.search(line)
    return tick.group(1)[0].upper() if tick else ""


def _writes_host(line: str) -> bool:
    """Returns whether the last array that an instruction returns is on the host."""
    layouts = [layout for _, _, layout in SHAPE.findall(line.partition(", metadata=")[0]) if layout]
    return bool(layouts) and _HOST in layouts[-1]


def _under_way(copies: list[_Copy]) -> Iterator[list[_Copy]]:
    """Yields the copies of a computation that are under way together, in the order of their starts."""
    some: list[_Copy] = []
    for copy in sorted(copies):
        if some and copy.begin >= max(one.end for one in some):
            yield some
            some = []
        some.append(copy)
    if some:
        yield some


def _events(copies: list[_Copy], lines: list[str], products: Products) -> tuple[Event, ...]:
    """Returns the starts and ends of copies that are under way together."""
    found = []
    for number, copy in enumerate(copies):
        found += [(copy.begin, number, _moved_bytes(copy.line)), (copy.end, number, 0)]
    events, last = [], copies[0].begin
    # A copy without start and done ends where it begins.
    for line, number, size in sorted(found, key=lambda one: (one[0], one[1], -one[2])):
        events.append(Event(products.flops(lines[last:line]), number, copies[number].goes_out, size))
        last = line
    return tuple(events)


def _together(copies: list[_Copy]) -> Iterator[tuple[int, int, int]]:
    """Yields the first and the last line, and the bytes, of copies of one direction that are under way together."""
    for goes_out in (True, False):
        begin = end = size = -1
        for copy in sorted(copy for copy in copies if copy.goes_out == goes_out):
            if size >= 0 and copy.begin < end:
                end, size = max(end, copy.end), size + _moved_bytes(copy.line)
                continue
            if size >= 0:
                yield begin, end, size
            begin, end, size = copy.begin, copy.end, _moved_bytes(copy.line)
        if size >= 0:
            yield begin, end, size


def _is_kernel(line: str, computations: dict[str, list[str]]) -> bool:
    """Returns whether an instruction copies a slice by a kernel of a GPU."""
    called = _CALLED.search(line)
    if called:
        return any(_is_kernel(x, computations) for x in computations.get(called.group(1), ()))
    return bool(_SLICE.search(line)) and _COUNTED not in line


def _moved_bytes(line: str) -> int:
    """Returns the bytes that move: the largest array in device memory among an instruction's own shapes."""
    shapes = SHAPE.findall(line.partition(", metadata=")[0])
    sizes = [array_bytes(element, dims) for element, dims, layout in shapes if _HOST not in layout]
    if not any(sizes):  # a whole buffer that stays on the host side of the text
        sizes = [array_bytes(element, dims) for element, dims, _ in shapes]
    return max(sizes, default=0)
