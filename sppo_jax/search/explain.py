"""What a finished search tells: why each choice was made, next to its rivals, and the plans that lost."""

import dataclasses
import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import usable_bytes, usable_host_bytes
from sppo_jax.search.because import Because, joined
from sppo_jax.search.bounds.frontier import TIE, Fastest, Filter, Frontier, TooLarge, candidate_of
from sppo_jax.search.evaluate import Outcome, by_seconds, evaluate, size
from sppo_jax.search.refine import MOST_TIMES
from sppo_jax.search.space.layouts import Layout
from sppo_jax.search.space.partitions import Candidate, Partition
from sppo_jax.search.space.request import Request

# Of the rejected plans, how many do not fit, so that slower ones that fit are shown too. How many choices are worked
# out to find either.
_MOST_TOO_LARGE, _TOO_LARGE_TRIED, _SLOWER_TRIED = 2, 6, 10
# What is no difference, and how many rivals of a choice are simulated.
_SAME, _RIVALS_TRIED = 5e-4, 12
# How many choices that send more to the host are tried to find one that loses because loops wait.
_WAITS_TRIED = 4


class Rival(NamedTuple):
    """A choice that differs from the best one in something.

    Attributes:
        candidate: the choice.
        step_s: seconds of its step, or a bound that they are not below.
        is_simulated: whether these are the seconds of its step.
    """

    candidate: Candidate
    step_s: float
    is_simulated: bool = False


class Rivals(NamedTuple):
    """Choices of the lowest bounds that differ from the best one in something.

    Attributes:
        slower: one that may fit; it is simulated if its bound alone does not show that it is slower.
        larger: one that would be faster than the best one and does not fit, nor does any other like it.
    """

    slower: Rival | None
    larger: Rival | None


class Choice(NamedTuple):
    """A choice, in which a rival differs.

    Attributes:
        of: what it differs in.
        label: the same in words.
        alike: what its layout must have in common with the best one's.
        of_layout: whether layout and places alone tell what it differs in.
        section: of the config, where a choice is asked for.
        settings: of the section, which ask for it.
    """

    of: Callable[[Candidate], Hashable]
    label: Callable[[Candidate], str]
    alike: Callable[[Layout], Hashable]
    of_layout: bool
    section: str
    settings: tuple[str, ...]


_BALANCES = {"equal": "of equal length", "flops": "of equal FLOPs", "cost": "of equal cost", "given": "as given"}
# Each choice that has rivals, by the name of its reason.
_CHOICES = {
    "mesh": Choice(
        of=lambda one: one.layout.mesh,
        label=lambda one: "data {} x pipe {} x seq {}".format(*dataclasses.astuple(one.layout.mesh)),
        alike=lambda layout: None,
        of_layout=True,
        section="mesh",
        settings=("data", "pipe", "seq"),
    ),
    "sequence_kind": Choice(
        of=lambda one: one.layout.split.ulysses,
        label=lambda one: f"ulysses {one.layout.split.ulysses} x ring {one.layout.split.ring}",
        alike=lambda layout: layout.mesh,
        of_layout=True,
        section="sequence",
        settings=("split", "ulysses"),
    ),
    "chunks": Choice(
        of=lambda one: (one.partition.num_chunks, one.partition.balance),
        label=lambda one: f"{one.partition.num_chunks} {_BALANCES[one.partition.balance]}",
        alike=lambda layout: (layout.mesh, layout.interleave),
        of_layout=False,
        section="sequence",
        settings=("chunks",),
    ),
    "schedule": Choice(
        of=lambda one: (one.partition.schedule, one.layout.interleave),
        label=lambda one: f"{one.partition.schedule} with interleave {one.layout.interleave}",
        alike=lambda layout: layout.mesh,
        of_layout=False,
        section="schedule",
        settings=("name", "interleave", "table"),
    ),
    "wave": Choice(
        of=lambda one: one.partition.wave,
        label=lambda one: f"a wave of {one.partition.wave}",
        alike=lambda layout: layout.mesh,
        of_layout=False,
        section="schedule",
        settings=("wave",),
    ),
    "stash": Choice(
        of=lambda one: one.places,
        label=lambda one: "/".join(one.places),
        alike=lambda layout: layout.mesh,
        of_layout=True,
        section="stash",
        settings=("inputs", "attention", "rest"),
    ),
}


class SearchResult(NamedTuple):
    """A search that is over.

    Attributes:
        fastest: its plans that fit, and its frontier.
        chosen: the plan to explain; without `best` nothing fits, and it is the smallest.
        best: the fastest plan, which the chosen one ties with.
        other: where the fastest plan is breadth-first, the fastest of the other schedules.
        usual: where the plan is breadth-first in another than the usual way, the fastest plan of the usual way.
    """

    fastest: Fastest
    chosen: Outcome
    best: Outcome | None = None
    other: Outcome | None = None
    usual: Outcome | None = None

    @property
    def request(self) -> Request:
        """What was asked for."""
        return self.fastest.frontier.request


def reasons_of(results: SearchResult) -> dict[str, str]:
    """Returns the reason of each choice of a search."""
    request, chosen = results.request, results.chosen
    candidate, layout = chosen.candidate, chosen.candidate.layout
    # A sequence alone is a wave of its own.
    choices = [key for key in _CHOICES if key != "wave" or layout.sequences > 1]
    reasons = {key: _against_rivals(results, key) for key in choices}
    if request.config.stash.kv_grad_dtype != "auto":
        reasons["kv_grad_dtype"] = Because.ASKED()
    else:
        wide = candidate.kv_grad_dtype == "float32"
        reasons["kv_grad_dtype"] = float32_reason(candidate) if wide else Because.NARROW()
    reasons["sequence_kind"] = joined(split_reason(layout), reasons["sequence_kind"])
    lost_s = results.fastest.lost_by_fewer_shapes_s.get(candidate.partition)
    if lost_s is not None:
        few = Because.FEW_SHAPES(
            count=len(candidate.partition.shapes), most=MOST_TIMES, lost_s=lost_s, whom=request.whom
        )
        reasons["chunks"] = joined(few, reasons["chunks"])
    why = schedule_reason(candidate.partition)
    reasons["schedule"] = joined(why, _order_reason(results), reasons["schedule"])
    reasons["stash"] = joined(reasons["stash"], _waits_reason(results))
    reasons |= _way_reasons(results)
    if results.best is not None and chosen.step_s > results.best.step_s:
        reasons["tie"] = _tie_reason(results.best, chosen)
    return {key: reason for key, reason in reasons.items() if reason}


def _waits_reason(results: SearchResult) -> str:
    """Returns which places send more to the host and lose because loops wait for it; empty where none does."""
    frontier, chosen = results.fastest.frontier, results.chosen
    if results.best is None or not frontier.seconds.has_loops:
        return ""
    for tried in _that_send_more(frontier, chosen):
        waits_s = tried.simulation.waits_s
        gain = 1 - (tried.step_s - waits_s) / chosen.step_s
        if gain >= _SAME:
            rival, share = "/".join(tried.candidate.places), waits_s / tried.step_s
            return Because.WAITS(rival=rival, gain=gain, waits=share, whom=results.request.whom)
    return ""


def _that_send_more(frontier: Frontier, chosen: Outcome) -> Iterator[Outcome]:
    """Yields a few outcomes that fit on the chosen mesh and have more on the host, by bounds without any waits."""
    mesh, sent = chosen.candidate.layout.mesh, chosen.candidate.places.count("host")
    limit_s = chosen.step_s * (1 - _SAME)
    bounds = (
        (frontier.seconds.of_uncut(one.partition, one.places, waits=False), number, one)
        for number, one in enumerate(frontier.that_may_fit(lambda layout: layout.mesh == mesh))
        if one.places.count("host") > sent
    )
    for _, _, one in heapq.nsmallest(_WAITS_TRIED, (bound for bound in bounds if bound[0] < limit_s)):
        decided = one if one.kv else one._replace(kv=one.partition.kv(one.places)[0])
        sized = frontier.attempt(size, decided)
        if sized is not None and sized.memory.fits(frontier.request.cluster):
            yield evaluate(decided, sized)


def float32_reason(candidate: Candidate) -> str:
    """Returns why dK and dV are in float32."""
    chunks = candidate.partition.num_chunks
    return Because.SUMS(chunks=chunks) if chunks > 1 else Because.NO_SUMS()


def _way_reasons(results: SearchResult) -> dict[str, str]:
    """Returns why a breadth-first plan keeps weights, keys and values, or chunks in an unusual way."""
    request, chosen, usual = results.request, results.chosen, results.usual
    config, candidate = request.config, chosen.candidate

    def instead(way: str) -> str:
        if usual is None:
            return Because.USUAL_NOT(usual=way, whom=request.whom)
        times = f"{usual.step_s / chosen.step_s:.3f}"
        return Because.USUAL_SLOWER(usual=way, times=times, whom=request.whom)

    reasons = {}
    if candidate.way.waiting == "host":
        own = config.stash.waiting == "auto"
        reasons["waiting"] = Because.WAITING() if own else Because.ASKED()
    if candidate.way.optimizer == "host" and config.optimizer.place == "auto":
        reasons["optimizer"] = Because.OPTIMIZER(whom=request.whom)
    if not candidate.partition.is_breadth_first or results.best is None:
        return reasons
    if config.stash.kv == "auto" and candidate.partition.num_chunks > 1 and candidate.kv in ("keep", "host"):
        held = {"keep": "kept in device memory", "host": "offloaded to the host"}[candidate.kv]
        runs_again = candidate.places[0] == "period"
        usual_kv = Because.KV(held=held, instead=instead("recomputing them"))
        reasons["kv"] = Because.KV_OF_PERIOD(held=held) if runs_again else usual_kv
    if candidate.way.weights == "resident":
        reasons["weights"] = instead("gathering them for one group of layers at a time")
    return reasons


def _order_reason(results: SearchResult) -> str:
    """Returns how a plan compares with plans of the other order, or why breadth-first was not tried."""
    request, chosen, best = results.request, results.chosen, results.best
    if not request.allows_breadth_first or best is None:
        return ""
    other = results.other if best.candidate.partition.is_breadth_first else best
    if chosen.candidate.partition.is_breadth_first:
        if other is None:
            return Because.NO_OTHER_ORDER()
        times = f"{other.step_s / chosen.step_s:.3f}"
        return Because.OTHER_ORDER(name=other.candidate.partition.schedule, times=times, whom=request.whom)
    if request.compares_orders:
        return Because.NO_ONE_GROUP(tie=TIE, whom=request.whom)
    groups = request.config.sequence.groups
    where = "on CPUs and TPUs" if groups == "static" else f"with sequence.groups={groups}"
    return Because.ONE_GROUP_LAST(where=where)


def _tie_reason(fastest: Outcome, chosen: Outcome) -> str:
    """Returns why a plan was chosen that is not the fastest."""
    mechanisms = fastest.candidate.complexity[0] - chosen.candidate.complexity[0]
    fewer = f"{mechanisms} fewer {'mechanism' if mechanisms == 1 else 'mechanisms'}"
    gain = 1 - fastest.step_s / chosen.step_s
    return Because.TIE(
        gain=gain,
        tie=TIE,
        simpler=fewer if mechanisms else "fewer chunks",
        whom=chosen.candidate.layout.request.whom,
    )


def times_slower(step_s: float, best_s: float) -> str:
    """Returns how much slower a step is than the chosen one, or that the two are a tie."""
    times = f"{step_s / best_s:.3f}"
    if step_s < best_s:
        return f"a tie: {1 - step_s / best_s:.2%} faster, but less simple"
    return "a tie: as fast (within 0.1%)" if times == "1.000" else f"takes {times}x as long"


def _against_rivals(results: SearchResult, key: str) -> str:
    if results.best is None:
        # What takes how long is of no interest then. The mesh, the first of the choices, says so for all.
        return Because.SMALLEST() if key == "mesh" else ""
    choice = _CHOICES[key]
    slower, larger = rivals(results.fastest.frontier, results.chosen, choice)
    texts = []
    if slower is not None:
        texts.append(_longer(slower, choice.label(slower.candidate), results.chosen.step_s))
    if larger is not None:
        texts.append(Because.TOO_LARGE(rival=choice.label(larger.candidate), whom=results.request.whom))
    if texts:
        return joined(*texts)
    asked = getattr(results.request.config, choice.section)
    is_open = all(getattr(asked, name) == getattr(type(asked), name) for name in choice.settings)  # at its default
    return Because.ONLY_CHOICE() if is_open else Because.ASKED()


def _longer(slower: Rival, label: str, best_s: float) -> str:
    """Returns how much longer a rival takes, or that it ties with the best."""
    whom = slower.candidate.layout.request.whom
    times, known = f"{slower.step_s / best_s:.3f}", slower.is_simulated
    # A lower bound is refined only until the candidate loses.
    if times == "1.000":
        return Because.AS_FAST(rival=label, verb="is" if known else "may be", whom=whom)
    if known and slower.step_s < best_s:
        return Because.FASTER_TIE(rival=label, gain=1 - slower.step_s / best_s, whom=whom)
    return Because.SLOWER(rival=label, bound="" if known else "at least ", times=times, whom=whom)


def split_reason(layout: Layout) -> str:
    """Returns why a layout splits a sequence as it does."""
    model, sequence, seq = layout.request.config.model, layout.request.config.sequence, layout.mesh.seq
    if sequence.split != "auto" or (sequence.given_ulysses is not None and seq > 1):
        return Because.ASKED()
    num_heads, num_kv_heads = model.shared_heads
    if seq == 1:
        return Because.HEADS_DIVIDE(num_heads=num_heads, seq=seq)
    return Because.HEADS(num_heads=num_heads, num_kv_heads=num_kv_heads)


def schedule_reason(partition: Partition) -> str:
    """Returns why a partition has its schedule, in its waves."""
    layout, wave = partition.layout, partition.wave
    request, config = layout.request, layout.request.config
    if request.table is not None:
        return Because.TABLE(name=request.table[0].name, path=config.schedule.table)
    if config.schedule.name != "auto":
        return Because.ASKED()
    if partition.is_breadth_first:
        needed = [f"stash.kv={config.stash.kv}"] if config.stash.kv in ("rebuild", "host") else []
        needed += ["stash.waiting=host"] if config.stash.waiting == "host" else []
        return joined(Because.NEEDED_BY(settings=", ".join(needed)) if needed else "", Because.ONE_GROUP())
    order = {"1f1b": Because.UNCUT, "seq1f1b": Because.SEVERAL, "sppo": Because.ONE_BY_ONE}
    return joined(
        order[partition.schedule.removeprefix("interleaved-")](),
        Because.WAVE(wave=wave) if wave > 1 else "",
        Because.VIRTUAL_STAGES(count=layout.interleave) if layout.interleave > 1 else "",
    )


def rivals(frontier: Frontier, best: Outcome, choice: Choice) -> Rivals:
    """Returns the rivals of the best plan in something, the search being over."""
    common, mine = choice.alike(best.candidate.layout), choice.of(best.candidate)

    def is_alike(layout: Layout) -> bool:
        return choice.alike(layout) == common

    slower = _slower_rival(frontier, Filter(is_alike, lambda one: choice.of(one) != mine), best.step_s)
    return Rivals(slower, _larger_rival(frontier, best, choice, is_alike))


def _slower_rival(frontier: Frontier, of: Filter, best_s: float) -> Rival | None:
    """Returns the candidate of the lowest bound that may fit.

    One whose bound is below the best step is simulated: a bound alone would make it seem faster. After a few of these
    nothing is returned.
    """
    known = [one for one in frontier.tried if of.layout(one.candidate.layout) and of.candidate(one.candidate)]
    fastest = next(by_seconds(known), None)
    for _ in range(_RIVALS_TRIED):
        bound, what = frontier.take(of)
        if what is None:
            break
        if isinstance(what, Candidate) and bound < best_s * (1 - _SAME):
            frontier.simulate(bound, what)  # comes back with its seconds if it fits
            continue
        frontier.push(bound, what)
        if fastest is None or bound < fastest.step_s:
            return Rival(candidate_of(what), bound, isinstance(what, Outcome))
        break
    else:
        return None
    return Rival(fastest.candidate, fastest.step_s, True) if fastest is not None else None


def _larger_rival(
    frontier: Frontier, best: Outcome, choice: Choice, is_alike: Callable[[Layout], bool]
) -> Rival | None:
    """Returns the candidate of the lowest bound that is faster and does not fit, nor does any other like it.

    Of those that are alike only the least too large one is considered.
    """
    nearest: dict[Hashable, tuple[float, Candidate]] = {}
    for family in frontier.too_large + _sized(frontier):
        if is_alike(family.example.layout):
            for candidate in [family.example] if choice.of_layout else family.candidates():
                value = choice.of(candidate)
                if value not in nearest or family.excess < nearest[value][0]:
                    nearest[value] = family.excess, candidate
    for tried in [best, *frontier.tried]:
        if is_alike(tried.candidate.layout):
            nearest.pop(choice.of(tried.candidate), None)
    least_s = ((frontier.seconds.of_uncut(one.partition, one.places), value) for value, (_, one) in nearest.items())
    for bound, value in sorted(least_s, key=lambda one: one[0]):
        if bound >= best.step_s:
            break
        if all(choice.of(one) != value for one in frontier.that_may_fit(is_alike)):
            return Rival(nearest[value][1], bound)
    return None


def over(outcome: Outcome) -> str:
    """Returns which limit an outcome breaks most and by how much; empty if it fits."""
    cluster, memory = outcome.candidate.layout.request.cluster, outcome.memory
    limits = (
        ("HBM", memory.hbm_bytes, usable_bytes(cluster)),
        ("host memory", memory.host, usable_host_bytes(cluster)),
    )
    name, held, usable = max(limits, key=lambda limit: limit[1] / limit[2])
    return f"over {name} by {format_bytes(held - usable)} per device" if held > usable else ""


def others(frontier: Frontier, best: Outcome, count: int, other: Outcome | None = None) -> list[Outcome]:
    """Returns up to `count` outcomes of other choices than the best one, fastest first.

    Some are faster ones that do not fit, those first that are least too large; where the best one does not fit, they
    are the next smallest, and few.

    Args:
        frontier: the search, over.
        best: what it found.
        count: the most outcomes.
        other: one that is to be among them.
    """
    seen = _Seen(best)
    found = seen.new(other)
    found += _too_large(frontier, best, count - len(found), seen)
    return sorted(found + _slower(frontier, count - len(found), seen), key=lambda outcome: outcome.step_s)


class _Seen:
    """The choices of plans that were shown."""

    def __init__(self, best: Outcome) -> None:
        self.keys = _keys_of(best)

    def new(self, outcome: Outcome | None) -> list[Outcome]:
        """Returns an outcome of other choices than those before; none if it is of none."""
        if outcome is None or _keys_of(outcome) & self.keys:
            return []
        self.keys |= _keys_of(outcome)
        return [outcome]

    def is_new(self, candidate: Candidate) -> bool:
        """Returns whether a candidate is of other choices than those before."""
        return _key_of(candidate, candidate.places) not in self.keys


def _keys_of(outcome: Outcome) -> set[tuple]:
    """Returns what makes a plan another one; "host" counts as "keep" too if nothing is sent there."""
    candidate, places = outcome.candidate, outcome.candidate.places
    kept = tuple("keep" if place == "host" else place for place in places)
    return {_key_of(candidate, places), _key_of(candidate, places if outcome.memory.host else kept)}


def _key_of(candidate: Candidate, places: tuple[str, ...]) -> tuple:
    return candidate.layout.mesh, candidate.layout.interleave, candidate.partition.num_chunks, places


def _too_large(frontier: Frontier, best: Outcome, count: int, seen: _Seen) -> list[Outcome]:
    """Returns a few outcomes that do not fit, least too large first; if the best one fits, those that are faster."""
    fits = best.memory.fits(frontier.request.cluster)
    found: list[Outcome] = []
    num_tried = 0
    for candidate in _unfit(frontier, best.step_s if fits else None):
        if len(found) == min(count, _MOST_TOO_LARGE) or num_tried == _TOO_LARGE_TRIED:
            break
        if seen.is_new(candidate):
            num_tried += 1
            tried = frontier.attempt(evaluate, candidate)
            if tried is not None and (not fits or tried.step_s < best.step_s):
                found += seen.new(tried)
    return found


def _unfit(frontier: Frontier, limit_s: float | None) -> Iterator[Candidate]:
    """Yields candidates that do not fit, least too large first; with a limit, those that may take less."""
    known = _sized(frontier) if limit_s is None else _sized(frontier) + frontier.too_large
    for family in sorted(known, key=lambda one: one.excess):
        for candidate in family.candidates():
            if limit_s is None or frontier.seconds.of_uncut(candidate.partition, candidate.places) < limit_s:
                yield candidate if candidate.kv else candidate._replace(kv=candidate.partition.kv(candidate.places)[-1])


def _sized(frontier: Frontier) -> list[TooLarge]:
    """Returns the candidates that turned out too large when their memory was worked out."""
    cluster = frontier.request.cluster
    return [TooLarge(one.memory.excess(cluster), one.candidate, (one.candidate.partition,)) for one in frontier.sized]


def _slower(frontier: Frontier, count: int, seen: _Seen) -> list[Outcome]:
    """Returns the next fastest outcomes of other choices than those seen, as far as few trials tell."""
    found: list[Outcome] = []
    # What is slower and too large too tells less: it fills up at most.
    spare: list[Outcome] = []
    before = len(frontier.tried)
    of_others = Filter(candidate=seen.is_new)
    for _ in range(_SLOWER_TRIED):
        what = frontier.take(of_others)[1] if len(found) < count else None
        if what is None:
            break
        tried = what if isinstance(what, Outcome) else frontier.attempt(evaluate, what)
        if tried is not None:
            (found if tried.memory.fits(frontier.request.cluster) else spare).extend(seen.new(tried))
    # Trials may end before a plan is proven the next fastest. The fastest plans tried then fill the rest.
    for tried in by_seconds(frontier.tried[:before] if len(found) < count else []):
        found += seen.new(tried)
        if len(found) == count:
            break
    return found + spare[: count - len(found)]
