"""The best published figures of other systems, each with the setting on which ours is planned; see records.py."""

from dataclasses import dataclass, field
from typing import Any

from sppo_jax.config import Config, config_from_dict

K, M = 1024, 1024**2


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
