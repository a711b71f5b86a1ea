"""The search: the fastest step, in simulation, that fits in device and host memory."""

import heapq
import time
from dataclasses import dataclass

from sppo_jax.config import Config
from sppo_jax.hardware import Cluster
from sppo_jax.planner.evaluate import Choice, Outcome, evaluate, plan_of
from sppo_jax.planner.floors import Floors, room_bytes
from sppo_jax.planner.frames import Frame, frames, lengths_of, schedule_reason
from sppo_jax.planner.memory import Memory
from sppo_jax.planner.paper import paper_outcome
from sppo_jax.planner.plan import Plan
from sppo_jax.planner.request import Request, read_request
from sppo_jax.planner.stash import Places, place_options
from sppo_jax.units import format_bytes

NUM_REJECTED = 5
# Of the rejected ones, how many may be faster ones that do not fit, so that slower ones are shown too.
_MOST_TOO_LARGE = 2
# Where nothing fits, how many of the least bounds of memory are worked out.
_LEAST_TRIED = 8


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A plan that was not chosen, and why: it is slower, or over a limit."""

    plan: Plan
    memory: Memory
    step_s: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found.

    Args:
        plan: the fastest plan that fits; where none does, the one that is least too large.
        memory: its bytes a device, by what holds them.
        fits: whether it fits.
        rejected: up to five others that differ in mesh, chunks, interleaving or places, fastest first.
        num_considered: choices whose bounds were computed.
        seconds: seconds the search took.
        problem: empty if it fits; else the limit that it breaks, by how much, and the nearest change.
    """

    plan: Plan
    memory: Memory
    fits: bool
    rejected: tuple[Rejected, ...]
    num_considered: int
    seconds: float
    problem: str


def search(config: Config, cluster: Cluster | None = None) -> Found:
    """Searches what the config leaves "auto" for the shortest simulated step that fits.

    Choices are taken in the order of a lower bound of their step, which is refined in two steps before the table is
    built: from a few chunks, from every chunk, from the simulated table. The first simulated choice that fits and
    that no other's bound undercuts is the best. Choices whose least memory is too much are dropped on the way.

    Args:
        config: the settings.
        cluster: the devices; None: `hardware.cluster`, `train.devices` if simulated, else those of this machine.

    Raises:
        ValueError: settings contradict each other.
    """
    start_s = time.perf_counter()
    request = read_request(config, cluster)
    if config.planner == "paper":
        return _found_by_paper(request, start_s)
    dtypes = ("float32", "bfloat16") if config.stash.kv_grad_dtype == "auto" else (config.stash.kv_grad_dtype,)
    considered = 0
    for dtype in dtypes:
        hunt = _Hunt(request, dtype)
        best = hunt.best()
        considered += len(hunt.nodes)
        if best is not None:
            break
    fits = best is not None
    best = best or hunt.least()
    others = hunt.others(best, fits)
    plan = plan_of(request, best, _reasons(request, best, considered, dtypes))
    return Found(
        plan=plan,
        memory=best.memory,
        fits=fits,
        rejected=tuple(
            Rejected(
                plan=plan_of(request, other, _reasons(request, other, considered, dtypes)),
                memory=other.memory,
                step_s=other.step_s,
                why=_why(request, other, best),
            )
            for other in others
        ),
        num_considered=considered,
        seconds=time.perf_counter() - start_s,
        problem="" if fits else _problem(request, best),
    )


def _found_by_paper(request: Request, start_s: float) -> Found:
    outcome, reasons, ranked = paper_outcome(request)
    fits = outcome.memory.fits(request.cluster)
    return Found(
        plan=plan_of(request, outcome, reasons),
        memory=outcome.memory,
        fits=fits,
        rejected=(),
        num_considered=ranked,
        seconds=time.perf_counter() - start_s,
        problem="" if fits else _problem(request, outcome),
    )


@dataclass(frozen=True, kw_only=True)
class _Node:
    """A choice on its way: a frame of layout, schedule and chunk count, with places and a rule for alpha."""

    frame: Frame
    places: Places
    alpha: str | float | tuple[float, ...]

    @property
    def key(self) -> tuple:
        """What makes a plan another one to a reader."""
        layout = self.frame.layout
        return layout.mesh, layout.interleave, self.frame.num_chunks, self.places


class _Hunt:
    """One best-first search, dK and dV in one dtype."""

    def __init__(self, request: Request, kv_grad_dtype: str) -> None:
        self.request, self.dtype = request, kv_grad_dtype
        self.floors = Floors(request, kv_grad_dtype)
        self.nodes: list[_Node] = []
        self.too_large: list[tuple[float, float, int]] = []  # excess of the least memory, bound, node
        self.outcomes: dict[int, Outcome] = {}
        self.errors: list[ValueError] = []
        # bound, node, and how far it is refined: 0 a few chunks, 1 every chunk, 2 simulated
        self.heap: list[tuple[float, int, int]] = []
        for frame in frames(request):
            self._expand(frame)
        heapq.heapify(self.heap)

    def _expand(self, frame: Frame) -> None:
        asked = self.request.config.stash
        try:
            options = place_options(asked, frame.layout.layers)
        except ValueError as error:
            self.errors.append(error)
            return
        for places in options:
            bound, excess = self.floors.rough_step_s(frame, places), self.floors.rough_excess(frame, places)
            number = self._add(frame, places, "hidden" if asked.alpha == "auto" else asked.alpha)
            if excess > 0:
                self.too_large.append((excess, bound, number))
            else:
                self.heap.append((bound, number, 0))

    def _add(self, frame: Frame, places: Places, alpha: str | float | tuple[float, ...]) -> int:
        self.nodes.append(_Node(frame=frame, places=places, alpha=alpha))
        return len(self.nodes) - 1

    def best(self) -> Outcome | None:
        """Returns the fastest outcome that fits; None if none does."""
        while self.heap:
            number = self._refine()
            if number is None:
                continue
            if self.outcomes[number].memory.fits(self.request.cluster):
                return self.outcomes[number]
            self._send_more(number)
        return None

    def _send_more(self, number: int) -> None:
        """Considers to send to the host what does not hide too, where a choice that sends what hides is too large."""
        node, outcome = self.nodes[number], self.outcomes[number]
        if node.alpha == "hidden" and "host" in node.places[:2] and len(set(outcome.stash.alpha) - {0.0, 1.0}):
            heapq.heappush(self.heap, (outcome.step_s, self._add(node.frame, node.places, "all"), 1))

    def _refine(self) -> int | None:
        """Refines the choice of the lowest bound; returns it if it stays the lowest and is simulated."""
        bound, number, level = heapq.heappop(self.heap)
        if level == 2:
            return number
        node = self.nodes[number]
        try:
            if level == 0:
                lengths = lengths_of(self.request, node.frame)
                excess = self.floors.excess(node.frame, lengths, node.places)
                bound = max(bound, self.floors.step_s(node.frame, lengths, node.places, node.alpha))
                if excess > 0:
                    self.too_large.append((excess, bound, number))
                    return None
            else:
                bound = self._evaluate(number).step_s
        except ValueError as error:
            self.errors.append(error)
            return None
        heapq.heappush(self.heap, (bound, number, level + 1))
        return None

    def _evaluate(self, number: int) -> Outcome:
        if number not in self.outcomes:
            node = self.nodes[number]
            choice = Choice(
                layout=node.frame.layout,
                chunk_lengths=lengths_of(self.request, node.frame),
                schedule=node.frame.schedule,
                places=node.places,
                alpha=node.alpha,
                kv_grad_dtype=self.dtype,
            )
            self.outcomes[number] = evaluate(self.request, choice)
        return self.outcomes[number]

    def least(self) -> Outcome:
        """Returns the outcome that is least too large.

        Raises:
            ValueError: no choice keeps the rules; the first error.
        """
        smallest: dict[tuple, tuple[float, int, int]] = {}
        for excess, _, number in self.too_large:
            node = self.nodes[number]
            key, value = (node.frame.layout, node.places), (excess, -node.frame.num_chunks, number)
            smallest[key] = min(value, smallest.get(key, value))
        for _, _, number in sorted(smallest.values())[:_LEAST_TRIED]:
            try:
                self._evaluate(number)
            except ValueError as error:
                self.errors.append(error)
        if not self.outcomes:
            raise self.errors[0]
        return min(self.outcomes.values(), key=lambda outcome: self.floors.excess_of(outcome.memory))

    def others(self, best: Outcome, fits: bool) -> list[Outcome]:
        """Returns up to NUM_REJECTED outcomes of other kinds than `best`, fastest first."""
        seen = {self._key_of(best)}
        found: list[Outcome] = []
        # Faster ones that do not fit, those that are least too large first.
        larger = [(self.floors.excess_of(known.memory), number) for number, known in self.outcomes.items()]
        larger += [(excess, number) for excess, bound, number in self.too_large if bound < best.step_s or not fits]
        for excess, number in sorted(larger):
            if len(found) < (_MOST_TOO_LARGE if fits else NUM_REJECTED) and excess > 0:
                found += self._other(number, seen)
        while self.heap and len(found) < NUM_REJECTED:
            if self.nodes[self.heap[0][1]].key in seen:
                heapq.heappop(self.heap)
                continue
            refined = self._refine()
            if refined is not None:
                found += self._other(refined, seen)
        return sorted(found, key=lambda outcome: outcome.step_s)

    def _other(self, number: int, seen: set[tuple]) -> list[Outcome]:
        key = self.nodes[number].key
        if key in seen:
            return []
        seen.add(key)
        try:
            return [self._evaluate(number)]
        except ValueError:
            return []

    def _key_of(self, outcome: Outcome) -> tuple:
        number = next(number for number, known in self.outcomes.items() if known is outcome)
        return self.nodes[number].key


def _why(request: Request, other: Outcome, best: Outcome) -> str:
    over = _over(request, other)
    return over or f"{other.step_s / best.step_s:.3f}x slower"


def _over(request: Request, outcome: Outcome) -> str:
    cluster, memory = request.cluster, outcome.memory
    over_hbm = memory.hbm_bytes - room_bytes(cluster)
    over_host = memory.host - cluster.device_host_bytes
    if over_hbm > 0:
        return f"over HBM by {format_bytes(over_hbm)} a device"
    return f"over host memory by {format_bytes(over_host)} a device" if over_host > 0 else ""


def _problem(request: Request, outcome: Outcome) -> str:
    cluster, memory = request.cluster, outcome.memory
    part, size = max(memory.hbm.items(), key=lambda item: item[1])
    return (
        f"no plan fits: the least one is {_over(request, outcome)}, with {format_bytes(memory.hbm_bytes)} of HBM "
        f"({part} {format_bytes(size)}) and {format_bytes(memory.host)} of host memory, where a device has "
        f"{format_bytes(cluster.device.hbm_bytes)} and {format_bytes(cluster.device_host_bytes)}"
    )


def _reasons(request: Request, outcome: Outcome, considered: int, dtypes: tuple[str, ...]) -> dict[str, str]:
    config, choice = request.config, outcome.choice
    searched = f"of {considered} choices considered, that with the shortest simulated step that fits"
    pinned = config.mesh.pinned
    mesh = "as requested" if len(pinned) == 3 else searched
    kv_grad = "sums over many chunks"
    if len(dtypes) == 1:
        kv_grad = "as requested"
    elif choice.kv_grad_dtype == "bfloat16":
        kv_grad = "nothing fits with float32 sums"
    stash = (config.stash.inputs, config.stash.attention, config.stash.rest)
    return {
        "mesh": f"{mesh}, on {request.cluster.name}",
        "sequence_kind": choice.layout.split.reason,
        "chunks": "as requested" if config.sequence.chunks != "auto" else searched,
        "schedule": schedule_reason(request, choice.layout, choice.schedule),
        "stash": searched if "auto" in stash else "as requested",
        "kv_grad_dtype": kv_grad,
    }
