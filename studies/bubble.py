"""Plots how long stages wait against the number of chunks, and what less waiting gains.

    python -m studies.bubble                 print
    python -m studies.bubble --write         print, and write bubble.md and bubble.svg

Waiting is the time of a simulated step beyond that of its work on one stage, as a share of the latter. With chunks that
cost c_i (forward and backward, the costliest of each), p stages and v groups of layers it should be
(p - 1) max(c) / (v sum(c)). No jax needed; takes a few seconds.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.blocks import FIGURES, write_block
from bench.figures import write
from sppo_jax.config import Config, config_from_dict
from sppo_jax.hardware import DEVICES, make_cluster, parse_cluster
from sppo_jax.models.counts import balance_weights
from sppo_jax.plan.parts import MeshShape
from sppo_jax.plan.plan import Plan
from sppo_jax.predict.seconds.costs import CostModel, cost_model
from sppo_jax.predict.seconds.simulate import simulate
from sppo_jax.predict.seconds.stage_shape import Recompute, StageShape
from sppo_jax.report.draw.axis import Axis
from sppo_jax.report.draw.chart import Panel, Series
from sppo_jax.schedule.generators import make_table
from sppo_jax.schedule.table import TickShape, Unit
from sppo_jax.search.search import search
from sppo_jax.search.space.chunks import equal_lengths, flops_balanced_lengths

LENGTH, MODEL = 2**20, "gpt-30b"  # 64 layers, so that 16 stages have four groups
STAGES, COUNTS, GROUPS = (4, 8, 16), (16, 32, 64, 128, 256), (1, 2, 4)
# What SPPO reports for 13B, 512K, N = 32, PP = 8 without and with multiplexed partitioning (its Fig. 11).
SPPO_WITHOUT, SPPO_WITH, SPPO_STAGES, SPPO_CHUNKS = 1.23, 1.44, 8, 32
SPPO_DEPTH = 5  # 40 layers on 8 stages: the deepest interleaving has one layer a group

Costs = Callable[[Unit, TickShape], float]


@dataclass(frozen=True, kw_only=True)
class Point:
    """How long stages wait for one number of chunks, as shares of their work: simulated, and by the formula."""

    kind: str
    stages: int
    groups: int
    chunks: int
    simulated: float
    formula: float

    @property
    def error(self) -> float:
        return self.simulated / self.formula - 1


def waiting(stages: int, groups: int, lengths: tuple[int, ...], costs: Costs) -> tuple[float, float]:
    """Simulates one sequence through a pipeline.

    Args:
        stages: pipeline stages.
        groups: virtual stages of a stage.
        lengths: tokens of each chunk.
        costs: seconds of a unit of one virtual stage, as `simulate` asks for them.

    Returns:
        The time beyond the work of one stage as a share of that work, and what the formula says.
    """
    table = make_table("sppo", stages, 1, lengths, groups)
    step_s = simulate(table, costs).step_s
    forward, backward, head = (
        [costs(Unit(kind, 0, chunk, 0), TickShape(tokens, 0)) for chunk, tokens in enumerate(lengths)] for kind in "FBH"
    )
    work_s = groups * (sum(forward) + sum(backward))
    extra = (step_s - sum(head) - work_s) / work_s
    return extra, (stages - 1) * groups * (max(forward) + max(backward)) / (groups * work_s)


def points(counts: tuple[int, ...] = COUNTS) -> Iterator[Point]:
    """Yields all points: interleaved with chunks of equal cost and of equal length, alone with a plan's few lengths."""
    for stages in STAGES:
        for chunks in counts:
            lengths = _lengths(chunks)
            for groups in GROUPS:
                layer_costs = _layer_costs(stages * groups)
                for kind, own in lengths.items() if groups == 1 else [("equal lengths", lengths["equal lengths"])]:
                    yield _point(kind, stages, groups, own, layer_costs.of_chunks(own))
                yield _point("equal costs", stages, groups, (1,) * chunks, _equal_costs)


def _point(kind: str, stages: int, groups: int, lengths: tuple[int, ...], costs: Costs) -> Point:
    simulated, formula = waiting(stages, groups, lengths, costs)
    return Point(kind=kind, stages=stages, groups=groups, chunks=len(lengths), simulated=simulated, formula=formula)


def _equal_costs(unit: Unit, tick: TickShape) -> float:
    return {"F": 1.0, "B": 2.25, "H": 0.0}[unit.op]


def _config(model: str, length: int, *, sequence: dict | None = None, **groups) -> Config:
    shared = {"model": {"preset": model}, "train": {"steps": 1}}
    return config_from_dict({**shared, "sequence": {"length": length, **(sequence or {})}, **groups})


def _lengths(chunks: int) -> dict[str, tuple[int, ...]]:
    pair, token = balance_weights(_config(MODEL, LENGTH).model, LENGTH)
    return {
        "equal lengths": equal_lengths(LENGTH, chunks, 128),
        "equal FLOPs, 4 lengths": flops_balanced_lengths(LENGTH, chunks, 128, pair_flops=pair, token_flops=token),
    }


def _layer_costs(stages: int) -> CostModel:
    """Returns the costs of one of so many virtual stages on eight GPUs of a host."""
    model = _config(MODEL, LENGTH).model
    return cost_model(
        model,
        make_cluster(DEVICES["a100-80g"], 8),
        StageShape(
            mesh=MeshShape(data=1, pipe=1, seq=8),
            ulysses=8,
            ring=1,
            layers=model.num_layers // stages,
            compute_bytes=2,
            kernel="cudnn",
            length=LENGTH,
        ),
        Recompute(),
    )


@dataclass(frozen=True, kw_only=True)
class Gain:
    """SPPO's 13B setting: steps of its number of chunks, by its formula and simulated in lock-step, and of our Plans.

    Args:
        formula_s: seconds by SPPO's formula.
        lockstep: the plan with SPPO's number of chunks.
        plain: the searched plan without interleaving.
        plain_s: seconds of the fastest step of that search.
        ours: the searched plan.
        fastest_s: seconds of the fastest step of the search, of which `ours` is the simplest tie.
    """

    formula_s: float
    lockstep: Plan
    plain: Plan
    plain_s: float
    ours: Plan
    fastest_s: float

    @property
    def published(self) -> float:
        return SPPO_WITH / SPPO_WITHOUT

    @property
    def limit(self) -> float:
        """The gain of multiplexing if it filled all of the bubble of SPPO's formula."""
        return (SPPO_STAGES - 1 + SPPO_CHUNKS) / SPPO_CHUNKS

    def by_formula(self, groups: int) -> float:
        """Returns the gain of so many virtual stages a stage if they divided the bubble of SPPO's formula."""
        return self.limit / (1 + (SPPO_STAGES - 1) / (groups * SPPO_CHUNKS))

    @property
    def over_lockstep(self) -> float:
        return self.lockstep.predicted.step_s / self.fastest_s

    @property
    def over_formula(self) -> float:
        return self.formula_s / self.fastest_s

    @property
    def plain_over_lockstep(self) -> float:
        return self.lockstep.predicted.step_s / self.plain_s

    @property
    def plain_over_formula(self) -> float:
        return self.formula_s / self.plain_s


def gain() -> Gain:
    """Plans SPPO's 13B setting on its mesh: with its count of chunks, searched without interleaving, and searched."""
    cluster, length = parse_cluster("a100-80g:8x8"), 2**19
    mesh = {"data": 1, "pipe": SPPO_STAGES, "seq": 8}
    nodes = {"network_bytes_s": 12.5e9}  # four 200 Gb/s adapters for eight GPUs, as in the paper
    cut = {"chunks": SPPO_CHUNKS, "balance": "flops"}
    theirs = _config("gpt-13b", length, mesh=mesh, sequence=cut, planner="paper", hardware=nodes)
    lockstep = search(theirs, cluster).plan
    plain, found = (
        search(_config("gpt-13b", length, mesh=mesh, schedule={"interleave": depth}, hardware=nodes), cluster)
        for depth in (1, "auto")
    )
    # The formula has the work of one stage, whatever the order, and fills and drains once.
    work_s = lockstep.predicted.step_s * (1 - lockstep.predicted.bubble_fraction)
    return Gain(
        formula_s=work_s * (1 + (SPPO_STAGES - 1) / SPPO_CHUNKS),
        lockstep=lockstep,
        plain=plain.plan,
        plain_s=plain.fastest_s,
        ours=found.plan,
        fastest_s=found.fastest_s,
    )


def picture(found: list[Point], gained: Gain) -> list[Panel]:
    """Returns the plots: one a number of stages, and the gains."""
    # Interleaved chunks of equal length are off the formula, and in the table alone.
    kinds = [("equal lengths", 1), ("equal FLOPs, 4 lengths", 1), *(("equal costs", groups) for groups in GROUPS)]
    return [*(_waiting_panel(stages, kinds, found) for stages in STAGES), _gain_panel(gained)]


def _gain_panel(gained: Gain) -> Panel:
    marks = (
        ("SPPO,\npublished", gained.published, 1),
        ("SPPO,\nlimit", gained.limit, 6),
        ("v = 1, over\nSPPO's formula", gained.plain_over_formula, 2),
        ("v = 1, over\nlock-step", gained.plain_over_lockstep, 2),
        ("Plan, over\nSPPO's formula", gained.over_formula, 0),
        ("Plan, over\nlock-step", gained.over_lockstep, 0),
    )
    series = [
        Series(name=f"{name}\n{value:.2f}x", x=(at,), y=(value,), color=color, line=False, mark="square")
        for at, (name, value, color) in enumerate(marks, 1)
    ]
    return Panel(
        title="13B, 512K, 8 stages of 8 GPUs: gain over N = 32",
        x=Axis(label="", low=0.4, high=6.6),
        y=Axis(label="times as fast; Plans: in simulation", low=1.0, high=1.3),
        series=series,
    )


def _waiting_panel(stages: int, kinds: list[tuple[str, int]], found: list[Point]) -> Panel:
    series = []
    for color, (kind, groups) in enumerate(kinds):
        own = [p for p in found if (p.kind, p.groups, p.stages) == (kind, groups, stages)]
        name = kind if groups == 1 and kind != "equal costs" else f"{kind}, v = {groups}"
        counts = [p.chunks for p in own]
        series.append(Series(name=name, x=counts, y=[p.formula for p in own], color=color))
        series.append(Series(name="", x=counts, y=[p.simulated for p in own], color=color, line=False, mark="circle"))
    return Panel(
        title=f"p = {stages}; lines: (p - 1) max(c) / (v sum(c))",
        x=Axis(label="N, chunks of a sequence; points: simulated", log=True, whole=True),
        y=Axis(label="waiting, share of a stage's work", log=True, percent=True),
        series=series,
    )


_WAITING = f"""\
![Waiting against the number of chunks](bubble.svg)

One sequence of 1M tokens, {MODEL}, forward and backward, simulated in lock-step; nothing was run. With equal lengths
(v = 1) and with equal costs the points lie on the formula. With unequal costs the formula is too low in two cases:

* Interleaved chunks of equal length. A lock-step pipeline waits p - 1 times for every rise of the cost from one chunk
  to the next, whatever v is; only the rest is divided by v. At long sequences the last chunk costs twice the mean, so
  v = 2 saves a quarter of the wait and v = 4 saves three eighths, instead of a half and three quarters.
* "Equal FLOPs, 4 lengths". The cost of a chunk rises along each run of equal lengths and falls at the next run. These
  rises add up to as much as the one long rise of equal lengths, and ticks that hold two lengths are padded. So a few
  lengths help only where their runs are shorter than the pipeline (p = 16, N up to 64).

The search simulates all of these and takes the shortest step.
"""
_GAIN = """\
SPPO reports 1.23x to 1.44x for its multiplexed partition at 13B, 512K, N = 32, PP = 8: a gain of {published:.2f}x, run
on their GPUs. Filling the whole bubble of their formula, 7/32, would give {limit:.2f}x. Interleaving that divides this
bubble by v would give {twice:.2f}x with v = 2 and {deepest:.2f}x with v = {depth}, one layer a group.

Our Plans for the same mesh move no weights; all their figures are simulated. The search's Plan has {chunks} chunks,
v = {groups}, and a bubble of {bubble:.1%}. Its step takes {ours_s:.1f} s: a gain of **{over_lockstep:.2f}x** over
N = 32 in our lock-step simulation ({lockstep_s:.1f} s, bubble {lockstep_bubble:.1%}), and of **{over_formula:.2f}x**
over N = 32 by SPPO's formula ({formula_s:.1f} s). With `schedule.interleave=1` the Plan has {plain_chunks} chunks and a
bubble of {plain_bubble:.1%}. Its step takes {plain_s:.1f} s: gains of **{plain_over_lockstep:.2f}x** and
**{plain_over_formula:.2f}x**. More chunks shrink the bubble, but each chunk costs a tick, the attention's last blocks,
and another addition to the gradients. Both gains over the formula are below the gain that SPPO reports for
multiplexing, so nothing here shows that interleaving is as good as multiplexing.
"""


def report(found: list[Point], gained: Gain) -> str:
    """Writes the block."""
    lines = ["| chunks | v | points | largest difference from the formula |", "|---|---|---|---|"]
    for kind, groups in dict.fromkeys((p.kind, p.groups) for p in found):
        own = [p for p in found if (p.kind, p.groups) == (kind, groups)]
        # The last bits of a sum depend on the version of Python; zero is added to lose the sign of -0.
        errors = {p: round(p.error, 9) + 0.0 for p in own}
        worst = max(own, key=lambda p: abs(errors[p]))
        lines.append(
            f"| {kind} | {groups} | {len(own)} | {errors[worst]:+.2%} (p = {worst.stages}, N = {worst.chunks}) |"
        )
    ours, lockstep = gained.ours, gained.lockstep
    text = _GAIN.format(
        published=gained.published,
        limit=gained.limit,
        chunks=len(ours.chunk_lengths),
        groups=ours.schedule.interleave,
        bubble=ours.predicted.bubble_fraction,
        ours_s=ours.predicted.step_s,
        over_lockstep=gained.over_lockstep,
        lockstep_s=lockstep.predicted.step_s,
        lockstep_bubble=lockstep.predicted.bubble_fraction,
        over_formula=gained.over_formula,
        formula_s=gained.formula_s,
        twice=gained.by_formula(2),
        deepest=gained.by_formula(SPPO_DEPTH),
        depth=SPPO_DEPTH,
        plain_chunks=len(gained.plain.chunk_lengths),
        plain_bubble=gained.plain.predicted.bubble_fraction,
        plain_s=gained.plain.predicted.step_s,
        plain_over_lockstep=gained.plain_over_lockstep,
        plain_over_formula=gained.plain_over_formula,
    )
    return "\n".join([_WAITING, *lines, "", text])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write bubble.md and bubble.svg")
    args = parser.parse_args(arguments)
    found, gained = list(points()), gain()
    text = report(found, gained)
    print(text)
    if args.write:
        write(FIGURES / "bubble.svg", picture(found, gained))
        write_block(FIGURES / "bubble.md", "bubble", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
