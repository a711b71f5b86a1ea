"""When groups of layers have their weights gathered and their gradient sums scattered, and in which slots these lie.

All stages gather and scatter in the same ticks, each its own layers, because a collective at the top of a tick runs on
every device. The groups of one number, one on each stage, therefore share a turn: from the first tick in which a stage
needs its group to the last tick in which a stage does.
"""

from typing import NamedTuple

from sppo_jax.schedule.slots import color_intervals
from sppo_jax.schedule.table import Table, Unit

# An op ("F" or "B"), a wave and a group of layers.
Pass = tuple[str, int, int]
Span = tuple[int, int]


class Turns(NamedTuple):
    """The turns of a table.

    Args:
        num_weights: slots of gathered weights.
        num_sums: slots of gradient sums.
        weights: slot of the weights of each pass.
        sums: slot of the sums of each backward pass.
        gathers: of each tick at whose top weights are gathered, the group and the slot.
        scatters: of each tick at whose end sums are scattered, the group and the slot.
    """

    num_weights: int
    num_sums: int
    weights: dict[Pass, int]
    sums: dict[Pass, int]
    gathers: dict[int, tuple[int, int]]
    scatters: dict[int, tuple[int, int]]

    def weight_slot(self, unit: Unit, table: Table) -> int:
        """Returns where the weights of a unit lie; 0 for a backward of an evaluation, which has none."""
        return self.weights.get(_pass_of(unit, table), 0)

    def sum_slot(self, unit: Unit, table: Table) -> int:
        """Returns where a backward adds its gradients; 0 for a forward."""
        return self.sums.get(_pass_of(unit, table), 0)


def turns_of(table: Table, kv: str, *, train: bool = True) -> Turns:
    """Returns the turns of a table whose stages pass one group of layers after another.

    Args:
        table: a whole table, or an outline.
        kv: see `StashPlan`. To rebuild keys and values, a backward needs the weights of the group before too.
        train: whether there are backwards.
    """
    passes = _passes(table, train=train)
    needed = dict(passes)
    for op, wave, group in passes:
        if op == "B" and kv == "rebuild" and group + 1 < table.num_groups:
            needed[op, wave, group] = passes[op, wave, group + 1][0], passes[op, wave, group][1]
    joined = _join(needed, _next_compute_ticks(table))
    num_weights, slots = color_intervals({names: span for names, span in joined})
    sums = {name: span for name, span in passes.items() if name[0] == "B"}
    num_sums, sum_slots = color_intervals({name: span for name, span in sums.items()})
    gathers = {span[0]: (names[0][2], slots[names]) for names, span in joined}
    scatters = {span[1]: (name[2], sum_slots[name]) for name, span in sums.items()}
    assert (len(gathers), len(scatters)) == (len(joined), len(sums)), "one gather and one scatter a tick"
    return Turns(
        num_weights=num_weights,
        num_sums=num_sums,
        weights={name: slots[names] for names, _ in joined for name in names},
        sums=sum_slots,
        gathers=gathers,
        scatters=scatters,
    )


def slot_counts(num_stages: int, num_groups: int, kv: str) -> tuple[int, int]:
    """Returns the slots of gathered weights and of gradient sums that `turns_of` finds.

    With several stages, the last stage begins a group backward while the first stage is in the group behind.
    """
    behind = int(num_stages > 1)
    return min(num_groups, 1 + behind + int(kv == "rebuild")), min(num_groups, 1 + behind)


def collective_counts(num_groups: int, num_waves: int) -> tuple[int, int]:
    """Returns how often a stage gathers and scatters a group in a training step, as in `turns_of`."""
    # The last group goes backward at once, and the first group of the next wave forward.
    return num_waves * (2 * num_groups - 1) - (num_waves - 1), num_waves * num_groups


def _pass_of(unit: Unit, table: Table) -> Pass:
    return unit.op, unit.sequence // table.wave, unit.virtual_stage // table.num_stages


def _passes(table: Table, *, train: bool) -> dict[Pass, Span]:
    """Returns the first and the last tick of each pass, over all stages."""
    spans: dict[Pass, Span] = {}
    for unit, tick in table.unit_ticks.items():
        if unit.op == "H" or (unit.op == "B" and not train):
            continue
        name = _pass_of(unit, table)
        first, last = spans.get(name, (tick, tick))
        spans[name] = min(first, tick), max(last, tick)
    return spans


def _next_compute_ticks(table: Table) -> list[int]:
    """Returns for each tick the compute tick that follows."""
    following, found = len(table.ticks), [0] * len(table.ticks)
    for index in range(len(table.ticks) - 1, -1, -1):
        found[index] = following
        if table.ticks[index].is_compute:
            following = index
    return found


def _join(spans: dict[Pass, Span], following: list[int]) -> list[tuple[tuple[Pass, ...], Span]]:
    """Joins the spans of a group between which no other compute tick lies: the weights stay where they are."""
    joined: list[tuple[tuple[Pass, ...], Span]] = []
    for name, (first, last) in sorted(spans.items(), key=lambda item: (item[0][2], item[1])):
        if joined:
            names, (begin, end) = joined[-1]
            if names[0][2] == name[2] and first <= following[end]:
                joined[-1] = (*names, name), (begin, max(end, last))
                continue
        joined.append(((name,), (first, last)))
    return joined
