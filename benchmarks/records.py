"""Compares this project's plans with the records of other systems, on their own cells, in docs/records.md.

    python benchmarks/records.py                 print
    python benchmarks/records.py --write         print, and write the block `records` of docs/records.md

Theirs are published figures of runs. Ours are plans: nothing was run on a GPU or TPU.
No jax needed; takes two minutes.
"""

import argparse
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blocks import write_block

from sppo_jax.config import Config, config_from_dict
from sppo_jax.hardware import parse_cluster
from sppo_jax.planner.bounds import max_length
from sppo_jax.planner.search import search

PAGE = Path(__file__).parents[1] / "docs" / "records.md"
K, M = 1024, 1024**2
# The planner's mean error on published throughput is about a tenth, so a smaller lead decides nothing.
CLOSE = 0.10


@dataclass(frozen=True, kw_only=True)
class Record:
    """One published record and the setting on which ours is planned.

    Args:
        cell: the setting in words.
        theirs: the system.
        figure: tokens a second a device, or the longest sequence in tokens.
        source: where the figure comes from, with its mark.
        cluster: the cluster to plan for.
        model: settings of the model.
        length: tokens of a sequence; 0: the figure is the longest sequence, and ours is searched.
        per_step: sequences of a step.
        remark: a caveat of the comparison.
        more: other settings by group.
    """

    cell: str
    theirs: str
    figure: float
    source: str
    cluster: str
    model: dict[str, Any]
    length: int = 0
    per_step: int = 1
    remark: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Config:
        """Returns the settings to plan with; the planner chooses all else."""
        sequence = {"length": self.length or 512 * K, "per_step": self.per_step}
        return config_from_dict(
            {
                "model": self.model,
                "sequence": sequence,
                "schedule": {"interleave": "auto"},
                "train": {"steps": 1},
                **self.more,
            }
        )


def _preset(name: str, **fields: Any) -> dict[str, Any]:
    return {"preset": name, **fields}


_SEVEN, _FOURTEEN = _preset("llama2-7b"), _preset("llama2-13b", vocab_size=120000)
_GPT, _EIGHT = _preset("gpt-7b"), _preset("llama3-8b")
_MAXTEXT = _preset("llama3.1-8b", num_heads=16, num_kv_heads=4, head_dim=256)
_BURST = "BurstEngine's spreadsheet [V]"
_SPPO_NODES = {"hardware": {"network_bytes_s": 12.5e9}}

THROUGHPUT = (
    Record(
        cell="7B, 128K, 16 sequences, 32 A100",
        theirs="Seq1F1B",
        figure=31584 / 32,
        source="raw table [V]",
        cluster="a100-80g:4x8",
        model=_preset("gpt-7b", vocab_size=51200),
        length=128 * K,
        per_step=16,
    ),
    Record(
        cell="7B, 1M, 32 A100",
        theirs="SPPO",
        figure=157.3,
        source="SPPO Fig. 1 [V]",
        cluster="a100-80g:4x8",
        model=_GPT,
        length=M,
        more=_SPPO_NODES,
    ),
    Record(
        cell="7B, 4M, 128 A100",
        theirs="SPPO",
        figure=38.6,
        source="SPPO Fig. 1 [V]",
        cluster="a100-80g:16x8",
        model=_GPT,
        length=4 * M,
        more=_SPPO_NODES,
    ),
    Record(
        cell="7B, 1M, 8 A800",
        theirs="MEMO",
        figure=188.6,
        source="52.30% MFU [V]; tokens derived as if its FLOPs are causal [D]",
        cluster="a100-80g:1x8",
        model=_GPT,
        length=M,
        remark="96.6 if its FLOPs are not causal",
    ),
    Record(
        cell="7B, 2M, 32 A800",
        theirs="BurstEngine",
        figure=101.86,
        source=_BURST,
        cluster="a100-80g:4x8",
        model=_SEVEN,
        length=2 * M,
    ),
    Record(
        cell="7B, 4M, 64 A800",
        theirs="BurstEngine",
        figure=51.78,
        source=_BURST,
        cluster="a100-80g:8x8",
        model=_SEVEN,
        length=4 * M,
    ),
    Record(
        cell="14B, 1M, 32 A800",
        theirs="BurstEngine",
        figure=122.0,
        source=_BURST,
        cluster="a100-80g:4x8",
        model=_FOURTEEN,
        length=M,
    ),
    Record(
        cell="14B, 2M, 64 A800",
        theirs="BurstEngine",
        figure=63.54,
        source=_BURST,
        cluster="a100-80g:8x8",
        model=_FOURTEEN,
        length=2 * M,
    ),
    Record(
        cell="8B, 500000, 1 H100",
        theirs="ALST",
        figure=495.0,
        source="tables of steps [V]",
        cluster="h100:1x1",
        model=_EIGHT,
        length=500_000,
    ),
    Record(
        cell="Qwen3-8B, 1M, 8 H100",
        theirs="TRL",
        figure=M / (8 * 380),
        source="trl#6846 [V]",
        cluster="h100:1x8",
        model=_preset("qwen3-8b"),
        length=M,
    ),
    Record(
        cell="Qwen3-8B, 4M, 32 H100",
        theirs="TRL",
        figure=4 * M / (32 * 1346),
        source="trl#6846 [V]",
        cluster="h100:4x8",
        model=_preset("qwen3-8b"),
        length=4 * M,
    ),
    Record(
        cell="Qwen3-32B, 1M, 8 H100",
        theirs="TRL",
        figure=M / (8 * 1295),
        source="trl#6846 [V]",
        cluster="h100:1x8",
        model=_preset("qwen3-32b"),
        length=M,
    ),
    Record(
        cell="Qwen3-0.6B, 4M, 8 H100",
        theirs="TRL",
        figure=4 * M / (8 * 2135),
        source="trl#6846 [V]",
        cluster="h100:1x8",
        model=_preset("qwen3-0.6b"),
        length=4 * M,
    ),
    Record(
        cell="Llama-3.1-8B with heads of 256, 1M, 2 sequences, 64 v5p",
        theirs="MaxText",
        figure=2 * M / (64 * 90.30),
        source="tpu-recipes [V]",
        cluster="v5p:4x4x4",
        model=_MAXTEXT,
        length=M,
        per_step=2,
    ),
    Record(
        cell="Llama-3.1-8B with heads of 256, 4M, 2 sequences, 64 v5p",
        theirs="MaxText",
        figure=2 * 4 * M / (64 * 1358.40),
        source="tpu-recipes [V]",
        cluster="v5p:4x4x4",
        model=_MAXTEXT,
        length=4 * M,
        per_step=2,
    ),
)

LENGTHS = (
    Record(
        cell="8B, 1 H100",
        theirs="ALST",
        figure=500_000,
        source="tables of steps [V]",
        cluster="h100:1x1",
        model=_EIGHT,
    ),
    Record(
        cell="8B, 1 H200",
        theirs="ALST",
        figure=1_200_000,
        source="recipe of ArcticTraining [C]",
        cluster="h200:1x1",
        model=_EIGHT,
    ),
    Record(
        cell="8B, 4 A100",
        theirs="FPDT",
        figure=2 * M,
        source="blog of Ulysses-Offload [V]",
        cluster="a100-80g:1x4",
        model=_EIGHT,
        remark="the blog's text says A100 of 40 GB",
    ),
    Record(
        cell="8B, 8 A100",
        theirs="FPDT",
        figure=4 * M,
        source="table of the blog [V]",
        cluster="a100-80g:1x8",
        model=_EIGHT,
    ),
    Record(
        cell="8B, 8 H100",
        theirs="UPipe",
        figure=5 * M,
        source="abstract [V]",
        cluster="h100:1x8",
        model=_EIGHT,
    ),
    Record(
        cell="8B, 32 H100",
        theirs="ALST",
        figure=15_000_000,
        source="tables of steps [V]",
        cluster="h100:4x8",
        model=_EIGHT,
    ),
    Record(
        cell="Qwen3-32B, 8 H100",
        theirs="ALST",
        figure=1_550_000,
        source="recipe of ArcticTraining [C]",
        cluster="h100:1x8",
        model=_preset("qwen3-32b"),
    ),
    Record(
        cell="70B, 32 H100",
        theirs="ALST",
        figure=4_000_000,
        source="recipe of ArcticTraining [C]",
        cluster="h100:4x8",
        model=_preset("llama3-70b"),
    ),
    Record(
        cell="7B, 8 A800",
        theirs="MEMO",
        figure=M,
        source="abstract [V]",
        cluster="a100-80g:1x8",
        model=_GPT,
    ),
    Record(
        cell="Llama-3.1-8B with heads of 256, 64 v5p",
        theirs="MaxText",
        figure=14 * M,
        source="tpu-recipes [V]",
        cluster="v5p:4x4x4",
        model=_MAXTEXT,
    ),
    Record(
        cell="7B, 128 A100",
        theirs="SPPO",
        figure=4 * M,
        source="SPPO Fig. 1 [V]",
        cluster="a100-80g:16x8",
        model=_GPT,
        remark="the paper does not say that 4M is the limit",
    ),
)


def throughput_row(record: Record) -> str:
    """Plans a record's setting and writes its row."""
    found = _quiet(lambda: search(record.config(), parse_cluster(record.cluster)))
    plan = found.plan
    devices = plan.mesh.data * plan.mesh.pipe * plan.mesh.seq
    ours = record.per_step * record.length / (devices * plan.predicted.step_s)
    mesh = f"data {plan.mesh.data} x pipe {plan.mesh.pipe} x seq {plan.mesh.seq}, {len(plan.chunk_lengths)} chunks"
    if not found.fits:
        return _row(record, f"{record.figure:.1f}", "no plan fits", f"{record.theirs}")
    lead = ours / record.figure - 1
    leader = f"ours by {lead:.0%}, if the plan holds" if lead > 0 else f"{record.theirs} by {1 / (lead + 1) - 1:.0%}"
    close = -CLOSE < lead < CLOSE
    leader = f"too close to say (ours {lead:+.0%})" if close else leader
    return _row(record, f"{record.figure:.1f}", f"{ours:.1f} ({mesh})", leader)


def length_row(record: Record) -> str:
    """Searches the longest sequence of a record's setting and writes its row."""
    bound = _quiet(lambda: max_length(record.config(), parse_cluster(record.cluster), budget_s=600))
    theirs = f"{record.figure / 1e6:.2f}M"
    if bound.best is None:
        return _row(record, theirs, "none fits", record.theirs)
    ours = bound.best.size
    leader = f"ours, {ours / record.figure:.1f} times as long, if the plan holds"
    if ours < record.figure:
        leader = f"{record.theirs}, {record.figure / ours:.1f} times as long"
    return _row(record, theirs, f"{ours / 1e6:.2f}M", leader)


def _quiet(make: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a plan that does not fit is an answer here
        return make()


def _row(record: Record, theirs: str, ours: str, leader: str) -> str:
    leader += f"; {record.remark}" if record.remark else ""
    return f"| {record.cell} | {record.theirs} | {theirs} | {record.source} | {ours} | {leader} |"


_HEAD = "| setting | their system | {theirs} | source | ours, planned, not run | leads |\n|---|---|---|---|---|---|\n"


def report() -> str:
    """Writes the block."""
    return "\n".join(
        [
            "**Tokens a second a device**\n",
            _HEAD.format(theirs="theirs, run") + "\n".join(map(throughput_row, THROUGHPUT)),
            "\n**Longest sequence, in millions of tokens**\n",
            _HEAD.format(theirs="theirs, run") + "\n".join(map(length_row, LENGTHS)),
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the block `records` of docs/records.md")
    args = parser.parse_args(arguments)
    text = report()
    print(text)
    if args.write:
        write_block(PAGE, "records", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
