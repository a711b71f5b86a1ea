"""Published figures of context parallelism outside BurstEngine's spreadsheet: ALST, TRL, MaxText, UPipe, MEMO.

Sources:
  ALST      arXiv 2506.13996: time of a step of Llama-3-8B on H100, by features that are switched on
  TRL       huggingface/trl pull request 6846 (merged) and 6845: seconds a step on nodes of eight H100
  MaxText   AI-Hypercomputer/tpu-recipes, training/v5p/Llama3.1-8B-LongContext-Maxtext, runs of 2026-10-05
  UPipe     arXiv 2602.21196, figures from a secondary source
  MEMO      arXiv 2407.12117v3
"""

from studies.cells import Cell, K, M
from studies.systems import Setup

_ALL = dict(recompute_linear=True, recompute_attention=1.0)


def _alst() -> list[Cell]:
    alone = "eight GPUs, a sequence each; gathered weights and the optimizer on the CPU are not in the model"
    whole = "read in a secondary copy of the paper; layers recomputed whole"
    runs = (
        # tokens, GPUs of the run, GPUs of a sequence, seconds a step, role, doubt
        (32_000, 8, 1, 17, "judge", alone),
        (160_000, 8, 1, 2 * 60 + 3, "judge", alone),
        (500_000, 1, 1, 16 * 60 + 50, "judge", whole),
        (1_100_000, 8, 8, 9 * 60 + 24, "judge", whole),
        (2_400_000, 8, 8, 43 * 60 + 30, "judge", whole),
        (3_700_000, 8, 8, 107 * 60 + 35, "calibrate", whole),
        (15_000_000, 32, 32, 7 * 3600 + 25 * 60 + 9, "judge", whole),
    )
    return [
        Cell(
            name=f"ALST 8B {tokens / 1e6:.3g}M, {gpus} H100" if tokens >= 5e5 else f"ALST 8B {tokens // 1000}K, 8 H100",
            system="ALST",
            source="ALST, tables of steps",
            mark="[V]",
            unit="tokens/GPU/s",
            value=tokens / (context * seconds),
            setup=Setup(model="llama3-8b", gpu="h100", length=tokens, context=context, **_ALL),
            role=role,
            doubt=doubt,
        )
        for tokens, gpus, context, seconds, role, doubt in runs
    ]


def _trl() -> list[Cell]:
    runs = (
        # model, preset, tokens in M, GPUs, seconds a step
        ("8B", "qwen3-8b", 1, 8, 380),
        ("8B", "qwen3-8b", 2, 16, 696),
        ("8B", "qwen3-8b", 4, 32, 1346),
        ("32B", "qwen3-32b", 1, 8, 1295),
        ("0.6B", "qwen3-0.6b", 1, 8, 137),
        ("0.6B", "qwen3-0.6b", 4, 8, 2135),
    )
    return [
        Cell(
            name=f"TRL Qwen3-{model} {millions}M, {gpus} H100",
            system="TRL",
            source="trl#6846",
            mark="[V]",
            unit="tokens/GPU/s",
            value=millions * M / (gpus * seconds),
            setup=Setup(model=preset, gpu="h100", length=millions * M, context=gpus, **_ALL),
            role="judge",
            doubt="cuDNN's attention; layers recomputed whole",
            constants="h100, assumed",
        )
        for model, preset, millions, gpus, seconds in runs
    ]


_UNKNOWN = "the activations that are recomputed are not in the table; linear parts assumed"


def _maxtext() -> list[Cell]:
    runs = (
        # tokens, sequences of a step, chips of a sequence, seconds of each run, share of attention recomputed, doubt
        (64 * K, 32, 4, (10.25,), 0.0, _UNKNOWN),
        (256 * K, 8, 16, (26.31,), 0.0, ""),
        (M, 2, 64, (95.73, 90.30), 0.0, ""),
        (2 * M, 2, 64, (357.68, 346.18), 0.0, ""),
        (4 * M, 2, 64, (1373.73, 1358.40), 0.0, ""),
        (10 * M, 1, 64, (8056,), 1.0, ""),
        (14 * M, 1, 64, (15623,), 1.0, ""),
    )
    return [
        Cell(
            name=f"MaxText 8B {length // M}M, 64 v5p" if length >= M else f"MaxText 8B {length // K}K, 64 v5p",
            system="MaxText",
            source="tpu-recipes, v5p",
            mark="[V]",
            unit="tokens/GPU/s",
            value=sequences * length / (64 * sum(seconds) / len(seconds)),
            setup=Setup(
                model="llama3.1-8b",
                heads=(16, 4, 256),
                gpu="v5p",
                length=length,
                context=context,
                recompute_linear=True,
                recompute_attention=attention,
            ),
            role="list" if doubt else "judge",
            doubt=doubt or ("mean of two runs" if len(seconds) > 1 else ""),
            constants="v5p, assumed",
        )
        for length, sequences, context, seconds, attention, doubt in runs
    ]


def _upipe() -> list[Cell]:
    doubt = "figures from a secondary source; runs FlashAttention 3, while the H100's constant is that of ALST's kernel"
    return [
        Cell(
            name=f"UPipe {model} 128K, {gpus} H100",
            system="UPipe",
            source="Untied Ulysses, secondary",
            mark="[R]",
            unit="tokens/GPU/s",
            value=value,
            setup=Setup(model=preset, gpu="h100", length=128 * K, context=gpus, ulysses=True, **_ALL),
            doubt=doubt,
        )
        for model, preset, gpus, value in (("8B", "llama3-8b", 8, 2280), ("32B", "qwen3-32b", 16, 483))
    ]


def _memo() -> Cell:
    return Cell(
        name="MEMO 7B 1M, 8 GPUs",
        system="MEMO",
        source="MEMO, abstract",
        mark="[D] [?]",
        unit="tokens/GPU/s",
        value=188.6,
        setup=Setup(model="gpt-7b", length=M, tensor=8, pipe=1, recompute_linear=True, offload="hidden"),
        doubt="52.30% MFU is [V], but not whether its FLOPs are causal; if they are not, it is 96.6 tokens/GPU/s",
    )


def context_cells() -> list[Cell]:
    """Returns the cells of all these systems."""
    return [*_alst(), *_trl(), *_maxtext(), *_upipe(), _memo()]
