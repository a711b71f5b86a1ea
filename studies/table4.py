"""Compares the searched Plan with the paper's heuristic in simulation, on the settings of SPPO's Table 4.

    python -m studies.table4                 print
    python -m studies.table4 --write         print, and write the block `table4` of docs/validation.md

Three plans a setting, all simulated with the same costs: with the paper's mesh and number of chunks as published, with
`planner: paper` free to choose both, and searched. No jax needed; takes some ten seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.blocks import print_block
from sppo_jax.config import config_from_dict
from sppo_jax.hardware import parse_cluster
from sppo_jax.plan.plan import Plan
from sppo_jax.planner.search import Found, search
from sppo_jax.units import format_bytes

PAGE = Path(__file__).parents[1] / "docs" / "validation.md"
K = 1024
NETWORK = 12.5e9  # of a GPU: SPPO's nodes have four 200 Gb/s adapters for eight
# model, hosts of eight A100, sequence-parallel GPUs, stages: length -> N
TABLE_4 = {
    ("gpt-7b", 4, 8, 4): {512 * K: 32, 640 * K: 64, 768 * K: 80, 896 * K: 128, 1024 * K: 160},
    ("gpt-13b", 8, 8, 8): {512 * K: 32, 640 * K: 48, 768 * K: 64, 1024 * K: 80, 1280 * K: 160},
    ("gpt-65b", 16, 16, 8): {512 * K: 32, 600 * K: 64, 640 * K: 80, 768 * K: 96, 1024 * K: 128},
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of the table with its three plans."""

    model: str
    length: int
    published: Found
    paper: Found
    searched: Found

    def gain(self, other: Found) -> float:
        """Returns the gain in simulation: the other plan's simulated step over the searched plan's."""
        return other.fastest_s / self.searched.fastest_s


def settings() -> Iterator[Setting]:
    """Plans every setting three times."""
    for of_model, rows in TABLE_4.items():
        for length in rows:
            yield setting(of_model, length)


def setting(of_model: tuple[str, int, int, int], length: int) -> Setting:
    """Plans one setting three times.

    Args:
        of_model: a key of `TABLE_4`.
        length: tokens of a sequence.
    """
    model, hosts, seq, pipe = of_model
    cluster = parse_cluster(f"a100-80g:{hosts}x8")
    shared = {"model": {"preset": model}, "train": {"steps": 1}, "hardware": {"network_bytes_s": NETWORK}}
    cut = {"length": length, "chunks": TABLE_4[of_model][length], "balance": "flops"}
    mesh = {"data": 1, "pipe": pipe, "seq": seq}
    free = {**shared, "sequence": {"length": length}}
    as_published = {**shared, "sequence": cut, "mesh": mesh, "planner": "paper"}
    published, paper, searched = (
        search(config_from_dict(values), cluster) for values in (as_published, {**free, "planner": "paper"}, free)
    )
    return Setting(model=model, length=length, published=published, paper=paper, searched=searched)


_SUMMARY = """\
On {count} settings the simulated step of the searched Plan is shorter than that of `planner: paper` by a factor of
{low:.2f} to {high:.2f} where both fit ({fit}), and shorter than that of the paper's own mesh and N by a factor of
{own_low:.2f} to {own_high:.2f} where those fit ({own_fit}). It is longer on {slower}. These factors are gains in
simulation with one cost model, on `a100-80g` with 12.5 GB/s between nodes for each GPU, as in the paper. No step was
run.

| setting | paper's mesh and N | `planner: paper` | searched | simulated gain over `paper` | over its own mesh and N |
|---|---|---|---|---|---|
"""


def report(found: list[Setting]) -> str:
    """Writes the block."""
    gains, own = ([gain for gain in kind if gain is not None] for kind in zip(*map(_gains, found), strict=True))
    summary = _SUMMARY.format(
        count=len(found),
        low=min(gains),
        high=max(gains),
        fit=len(gains),
        own_low=min(own),
        own_high=max(own),
        own_fit=len(own),
        slower=sum(gain < 1 for gain in [*gains, *own]),
    )
    return summary + "\n".join(map(row, found))


def _gains(setting: Setting) -> tuple[float | None, float | None]:
    """Returns the gains over `planner: paper` and over the paper's mesh and N; None where not both plans fit."""
    paper, published = (
        setting.gain(other) if other.fits and setting.searched.fits else None
        for other in (setting.paper, setting.published)
    )
    return paper, published


def row(setting: Setting) -> str:
    """Returns a row of the table."""
    cells = [_described(plan) for plan in (setting.published, setting.paper, setting.searched)]
    gained = ["-" if gain is None else f"{gain:.2f}x" for gain in _gains(setting)]
    return f"| {setting.model[4:].upper()} {setting.length // K}K | {' | '.join([*cells, *gained])} |"


def _described(found: Found) -> str:
    plan: Plan = found.plan
    mesh = f"pipe {plan.mesh.pipe} x seq {plan.mesh.seq}" + (f" x data {plan.mesh.data}" if plan.mesh.data > 1 else "")
    groups = f", v = {plan.schedule.interleave}" if plan.schedule.interleave > 1 else ""
    text = f"{plan.predicted.step_s:.1f} s: {mesh}, N = {len(plan.chunk_lengths)}{groups}, rest {plan.stash.rest}"
    return text if found.fits else f"{text} (does not fit: {format_bytes(max(plan.predicted.hbm_bytes))})"


def main(arguments: list[str] | None = None) -> int:
    """Prints the block, and writes it if asked to."""
    return print_block(PAGE, "table4", lambda: report(list(settings())), __doc__, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
