"""The time a schedule table takes, from the times of its units."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul, sub

from sppo_jax.predict.seconds.loop_waits import Write
from sppo_jax.schedule.outline import all_rounds
from sppo_jax.schedule.table import Table, TickShape, Unit


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a run of the table would take.

    Args:
        step_s: seconds of all ticks together.
        bubble_fraction: share of the stages' time in which they compute no unit, 0..1.
        busy_s: seconds each stage computes units.
        peak_in_flight: most chunk stashes that each stage holds at once.
        tick_s: seconds of each tick that is written, which `outline.all_rounds` makes those of all that run.
        waits_s: of the step, the seconds for which loops wait for writes to the host.
    """

    step_s: float
    bubble_fraction: float
    busy_s: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    tick_s: tuple[float, ...]
    waits_s: float = 0.0


def simulate(
    table: Table,
    costs: Callable[[Unit, TickShape], float],
    least_s: Sequence[float] | None = None,
    writes: Sequence[Write] = (),
) -> Simulation:
    """Runs the table in lock-step: a tick lasts as long as its slowest unit, and padding is computed like tokens.

    With P stages of v groups, N chunks and M sequences, units of equal cost f (forward), b (backward) and h
    (head), where f and b are those of all v groups of a stage together:

        seq1f1b, gpipe, 1f1b     step = (N M + (P - 1) / v) (f + b) + N M h
        sppo                     step = M ((N + (P - 1) / v) (f + b) + N h)
        bubble                   1 - N M (f + b + h) / step
        stage s in flight, v=1   min(N + 2 (P - 1 - s), N M) for seq1f1b, N M for gpipe, N for sppo

    An asynchronous Seq1F1B holds P - 1 - s + N; lock-step costs the other P - 1 - s because a forward and a
    backward tick take turns, so that a chunk is away for two ticks a stage. Its step is the same. With unequal
    chunks of cost c_i the forward of `sppo` takes sum(c_i) + (P - 1) max(c_i) if the c_i rise, then fall.

    Args:
        table: a checked table, or an outline.
        costs: seconds of a unit, given the unit and the shape of its tick.
        least_s: seconds that each tick takes at least, for what goes on behind it; None: nothing does.
        writes: what each tick writes to the host while it has a loop that waits; (): none does.
    """
    tick_s: list[float] = []
    unit_s: list[list[float]] = []
    for tick, shape, least in zip(table.ticks, table.tick_shapes, least_s or [0.0] * len(table.ticks), strict=True):
        unit_s.append([0.0 if unit is None else costs(unit, shape) for unit in tick.units])
        tick_s.append(max(least, max(unit_s[-1])))
    free_s, waits_s = tick_s, 0.0
    if writes:
        waiting_s = [one.tick_s(max(of_units)) for one, of_units in zip(writes, unit_s, strict=True)]
        tick_s = list(map(max, free_s, waiting_s))
        waits_s = sum(map(mul, map(sub, tick_s, free_s), table.tick_rounds))
    # One by one, so that an outline takes to the last bit what its table does.
    step_s = sum(all_rounds(tick_s, table.repeats))
    rounds = table.tick_rounds
    busy_s = [sum(map(mul, of_stage, rounds)) for of_stage in zip(*unit_s, strict=True)]
    return Simulation(
        step_s=step_s,
        # One stage is never idle, but sums of its seconds round differently.
        bubble_fraction=max(0.0, 1 - sum(busy_s) / (table.num_stages * step_s)) if step_s else 0.0,
        busy_s=tuple(busy_s),
        peak_in_flight=table.in_flight,
        tick_s=tuple(tick_s),
        waits_s=waits_s,
    )
