"""Plans common settings, and compares them with published figures of other systems, in bench/results/records.md.

    python -m studies.records_people --write

8B and 32B, 128K, 256K and 1M tokens, on one and on eight H100; a mixture of experts of 30B, 32K to 1M tokens, on 8 and
16. Theirs were run. Ours are plans: nothing was run on a GPU. No jax needed; takes half a minute.
"""

from dataclasses import dataclass
from pathlib import Path

from bench.blocks import print_block
from sppo_jax.config import Config, config_from_dict
from sppo_jax.hardware import Device, parse_cluster
from sppo_jax.models.counts import flops_per_token
from sppo_jax.plan.plan import Plan
from sppo_jax.search.search import search
from studies.record_cells import PEOPLE, K, M
from studies.records_planned import leader, quiet

PAGE = Path(__file__).parents[1] / "bench" / "results" / "records.md"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run.

    Args:
        system: who ran.
        tokens_s: tokens a second a device.
        length: tokens of its sequences.
        remark: how the run differs from the setting that is planned.
    """

    system: str
    tokens_s: float
    length: int
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting to plan, with its sequences per step, and the nearest published run, if there is one."""

    model: str
    cluster: str
    length: int
    per_step: int = 1
    theirs: Run | None = None

    def config(self) -> Config:
        """Returns the settings to plan with; the planner chooses all others."""
        sequence = {"length": self.length, "per_step": self.per_step}
        return config_from_dict({"model": {"preset": self.model}, "sequence": sequence, "train": {"steps": 1}})


SETTINGS = tuple(
    Setting(**values | ({"theirs": Run(**values["theirs"])} if "theirs" in values else {})) for values in PEOPLE
)
_TEXT = """\
Each step has one sequence, on H100s, unless a row says otherwise. Ours are the planner's choice with its predicted
seconds: nothing was run. Theirs were run.

* MFU is causal: (6 P + 6 L N H S) FLOPs per token, divided by the peak of {peak:.0f} TFLOP/s. P excludes the embedding
  and counts only the experts that a token uses, N is the number of query heads, and recomputation does not count. The
  last column compares MFU, because some lengths differ.
* The planner uses {matmul:.0f} TFLOP/s for matrix products, {share:.0%} of the peak, and {forward:.0f} TFLOP/s
  forward and {backward:.0f} backward for cuDNN's attention over long prefixes. One H100 measured these rates
  (cuDNN 9.19, 2026-11-26).
* A host has 2 TB of memory. A single GPU has all of it, and each of eight GPUs has an eighth. "With the rest" says that
  queries and MLP products are stashed too, so that only norms and activation functions are recomputed.
* TRL: trl#6846 and, with experts, trl#6845 [V], with cuDNN's attention and recomputed layers. ALST: tables of steps in
  the paper [V], read in a secondary copy. UPipe (arXiv 2602.21196): figures of a secondary source [R]. prime-rl: its
  BENCHMARKS.md [V], full training in RL. Megatron-Bridge: its verification card of packed Tulu 3 [V], which is not a
  tuned run. A dash: we found no such run.

"""
_COLUMNS = (
    "model",
    "GPUs",
    "tokens",
    "plan: data x pipe x seq, chunks, groups of layers",
    "attention outputs",
    "optimizer",
    "step, predicted",
    "tokens/s per device, predicted",
    "MFU, predicted",
    "theirs, run",
    "tokens/s per device",
    "MFU",
    "who leads",
)


def report() -> str:
    """Returns the block."""
    head = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    return assumed() + "\n".join([*head, *map(row, SETTINGS)])


def assumed() -> str:
    """Returns the text above the table: the assumptions behind its figures."""
    device: Device = parse_cluster("h100:1x8").device
    forward = device.attention_flops_s(device.compute_bytes, device.kernel, 128)
    return _TEXT.format(
        peak=device.matmul_flops_s / 1e12,
        matmul=device.linear_flops_s(device.compute_bytes) / 1e12,
        share=device.matmul_efficiency,
        forward=forward / 1e12,
        # A backward has 2.5 times the FLOPs of a forward.
        backward=2.5 * forward / device.attention_backward / 1e12,
    )


def row(setting: Setting) -> str:
    """Plans a setting and writes its row."""
    config, cluster = setting.config(), parse_cluster(setting.cluster)
    found = quiet(lambda: search(config, cluster))
    plan, peak = found.plan, cluster.device.matmul_flops_s
    devices = plan.mesh.num_devices
    tokens_s = setting.per_step * setting.length / (devices * plan.predicted.step_s)
    flops = flops_per_token(config.model, setting.length)
    ours = [*_plan_cells(plan), f"{plan.predicted.step_s:,.1f} s", f"{tokens_s:.1f}", f"{tokens_s * flops / peak:.1%}"]
    theirs = ["-"] * 4
    if not found.fits:
        ours = ["no plan fits", *["-"] * 5]
    if (run := setting.theirs) is not None:
        their_mfu = run.tokens_s * flops_per_token(config.model, run.length) / peak
        leads = leader(tokens_s * flops / peak, their_mfu, run.system) if found.fits else run.system
        theirs = [_words(run, setting), f"{run.tokens_s:.1f}", f"{their_mfu:.1%}", leads]
    gpus = f"{cluster.num_devices}" + ("" if cluster.device.name == "h100" else f" {cluster.device.name.upper()}")
    several = f"{setting.per_step} x " if setting.per_step > 1 else ""
    cells = [setting.model, gpus, several + _size(setting.length), *ours, *theirs]
    return f"| {' | '.join(cells)} |"


def _plan_cells(plan: Plan) -> list[str]:
    mesh, stash = plan.mesh, plan.stash
    groups = f"{mesh.pipe * plan.schedule.interleave} groups"
    place = {"keep": "on the device", "host": "on the host", "recompute": "recomputed"}[stash.attention]
    late = f", chunks {stash.attention_from + 1} to {len(plan.chunk_lengths)}" if stash.attention_from else ""
    rest = "" if stash.rest == "recompute" else ", with the rest"
    chunks = f"{len(plan.chunk_lengths)} chunk{'s' if len(plan.chunk_lengths) > 1 else ''}"
    return [f"{mesh.data} x {mesh.pipe} x {mesh.seq}, {chunks}, {groups}", place + late + rest, plan.optimizer]


def _words(run: Run, setting: Setting) -> str:
    length = "" if run.length == setting.length else f" at {_size(run.length)}"
    return f"{run.system}{length}" + (f"; {run.remark}" if run.remark else "")


def _size(tokens: int) -> str:
    return f"{tokens // M}M" if tokens % M == 0 else f"{tokens // K}K" if tokens % K == 0 else f"{tokens:,}"


def main(arguments: list[str] | None = None) -> int:
    """Prints the block, and writes it if asked to."""
    return print_block(PAGE, "people", report, __doc__, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
