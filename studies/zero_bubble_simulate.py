"""Three ways to run the orders of stages (freely, in ticks of any kind, in ticks of one kind), and what they hold."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate

from sppo_jax.plan.table import Tick, Unit
from studies.zero_bubble_orders import Costs, Orders


def free_running(orders: Orders, costs: Costs) -> float:
    """Returns when the last unit ends if each stage starts a unit once the stage and what the unit needs are done."""
    ends: dict[Unit, float] = {}
    free, place = [0.0] * len(orders.stages), [0] * len(orders.stages)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders.stages):
            while place[stage] < len(order):
                unit = order[place[stage]]
                needed = orders.needed(unit)
                if needed is not None and needed not in ends:
                    break
                free[stage] = ends[unit] = max(free[stage], ends[needed] if needed else 0.0) + costs(unit)
                place[stage] += 1
                moved = True
    _check_through(orders, place)
    return max(free)


def ticks_of_any_kind(orders: Orders, costs: Costs) -> float:
    """Returns the length of a step in which all stages end a unit together, whatever its kind; the slowest decides."""
    return _in_ticks(orders, costs, lambda ready: ready)


def ticks_of_one_kind(orders: Orders, costs: Costs) -> float:
    """Returns the length of a step in ticks of F, B or W alone.

    A tick is of the kind that most stages can run; a backward goes before a forward, and both before a W.
    """

    def most_common(ready: list[Unit]) -> list[Unit]:
        counts = Counter(unit.kind for unit in ready)
        kind = max("BFW", key=lambda kind: counts[kind])
        return [unit for unit in ready if unit.kind == kind]

    return _in_ticks(orders, costs, most_common)


def given_ticks(ticks: Iterable[Tick], costs: Costs) -> float:
    """Returns the length of a step in the ticks given; the slowest unit of a tick decides."""
    return sum(max(costs(unit) for unit in tick.units if unit is not None) for tick in ticks)


def _in_ticks(orders: Orders, costs: Costs, choose: Callable[[list[Unit]], list[Unit]]) -> float:
    done: set[Unit] = set()
    place = [0] * len(orders.stages)
    step = 0.0
    while True:
        following = {
            order[place[stage]]: stage for stage, order in enumerate(orders.stages) if place[stage] < len(order)
        }
        ready = [unit for unit in following if (needed := orders.needed(unit)) is None or needed in done]
        if not ready:
            _check_through(orders, place)
            return step
        units = choose(ready)
        step += max(costs(unit) for unit in units)
        done.update(units)
        for unit in units:
            place[following[unit]] += 1


def _check_through(orders: Orders, place: list[int]) -> None:
    for stage, order in enumerate(orders.stages):
        if place[stage] < len(order):
            raise ValueError(
                f"every unit must be able to start, but {order[place[stage]]} needs a unit that never runs"
            )


def peak(orders: Orders, deferred: float) -> float:
    """Returns the most activations that a stage holds at once, in those of one sequence.

    A unit holds its activations from F to the end of B, and what its W needs from then to the end of W.

    Args:
        orders: the order of each stage.
        deferred: what W needs, as a share of the activations from F to B.
    """
    share = 1 / (orders.num_groups * orders.num_chunks)
    most = 0.0
    for order in orders.stages:
        growth = {"F": share, "B": share * (deferred - 1) if orders.splits else -share, "W": -share * deferred}
        held = 0.0
        for unit in order:
            held += growth[unit.kind]
            most = max(most, held)
    return most


def work(orders: Orders, costs: Costs) -> float:
    """Returns the costs of a stage's units, the most of any stage."""
    return max(sum(map(costs, order)) for order in orders.stages)


def waiting_weights(orders: Orders) -> int:
    """Returns the most units of a stage that wait for their W at once, the one that runs included."""
    changes = {"F": 0, "B": 1, "W": -1}
    return max(max(accumulate(changes[unit.kind] for unit in order)) for order in orders.stages)
