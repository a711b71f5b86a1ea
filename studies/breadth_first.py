"""Simulates the fastest breadth-first plan beside the fastest plan of any other schedule, for docs/validation.md.

    python -m studies.breadth_first            print
    python -m studies.breadth_first --write    print, and write the block `breadth_first`

Both plans are searched by the planner, with one cost model. No jax needed; takes about 20 seconds.
"""

from dataclasses import dataclass
from pathlib import Path

from bench.blocks import print_block
from sppo_jax.config import config_from_dict
from sppo_jax.plan.plan import Plan
from sppo_jax.planner.search import Found, search
from sppo_jax.units import format_bytes

PAGE = Path(__file__).parents[1] / "docs" / "validation.md"
K = 1024


@dataclass(frozen=True)
class Setting:
    """A model and a step on a cluster."""

    model: str
    cluster: str
    length: int
    sequences: int = 1

    def search(self, **groups: dict) -> Found:
        """Search with some settings pinned."""
        sequence = {"length": self.length, "per_step": self.sequences}
        own = {"model": {"preset": self.model}, "sequence": sequence, "hardware": {"cluster": self.cluster}}
        return search(config_from_dict({**own, "train": {"steps": 1}, **groups}))


SETTINGS = (
    Setting("llama3-8b", "h100:1x8", 32 * K, 8),
    Setting("llama3-8b", "h100:1x8", 128 * K),
    Setting("llama3-8b", "h100:1x8", 512 * K),
    Setting("llama3-8b", "h100:1x8", 1024 * K),
    Setting("gpt-7b", "a100-80g:1x8", 32 * K, 8),
    Setting("gpt-7b", "a100-80g:1x8", 128 * K),
    Setting("gpt-7b", "a100-80g:1x8", 512 * K),
    Setting("gpt-7b", "a100-80g:1x8", 1024 * K),
    Setting("gpt-7b", "a100-80g:8x8", 4096 * K),
    Setting("gpt-7b", "a100-80g:16x8", 4096 * K),
)
_TEXT = """\
Simulated with the planner's cost model; nothing was run. Both plans are the fastest that the search finds: one among
all schedules but `breadth-first`, one among `breadth-first` alone. "keep", "host" and "recompute" say where layer
inputs, attention outputs and the rest wait. N is the number of chunks, v the number of groups of layers a stage. With
more members than the 32 heads of gpt-7b there is a ring. With this cost model, and so with cuDNN's kernel,
BurstEngine's ring would take 1703 s for 4096K on 64 A100 (`studies/systems.py`: compute alone, every hop hidden).

| model, tokens | cluster | other schedules | breadth-first | time of breadth-first over the other |
|---|---|---|---|---|
"""


def report() -> str:
    """Return the block."""
    return _TEXT + "\n".join(map(_row, SETTINGS))


def _row(setting: Setting) -> str:
    # Only breadth-first makes keys and values again.
    other, by_groups = setting.search(stash={"kv": "keep"}), setting.search(schedule={"name": "breadth-first"})
    ratio = f"{by_groups.fastest_s / other.fastest_s:.3f}" if other.fits and by_groups.fits else "-"
    tokens = f"{setting.sequences} x {setting.length // K}K" if setting.sequences > 1 else f"{setting.length // K}K"
    cells = [f"{setting.model}, {tokens}", setting.cluster, _described(other), _described(by_groups), ratio]
    return f"| {' | '.join(cells)} |"


def _described(found: Found) -> str:
    plan: Plan = found.plan
    mesh, stash, groups = plan.mesh, plan.stash, plan.schedule.interleave
    seconds = f"{found.fastest_s:.4g} s" if found.fits else f"does not fit: {format_bytes(found.memory.hbm_bytes)}"
    return (
        f"{seconds}: data {mesh.data} x pipe {mesh.pipe} x seq {mesh.seq}, {plan.schedule.name}, N = "
        f"{len(plan.chunk_lengths)}, v = {groups}, {stash.inputs}/{stash.attention}/{stash.rest}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Prints the block, and writes it if asked to."""
    return print_block(PAGE, "breadth_first", report, __doc__, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
