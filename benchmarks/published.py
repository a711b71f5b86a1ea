"""Published figures of long-sequence training as data: value, source, how far to trust it, and the setup it belongs to.

Marks: [V] in the text or raw tables of the source; [C] in the authors' released code or logs; [F] read off a figure (a
few percent off); [D] derived from such figures; [R] recalled; [?] the sources contradict themselves.

Sources:
  SPPO          arXiv 2503.10377v1: Fig. 1 (hours for 1B tokens), Table 4, Fig. 5, Fig. 11, Fig. 12
  Seq1F1B       arXiv 2406.03488; repository thunlp/Seq1F1B: the raw table "32x7b zhihu_throughput.tex", exp.sh, run.sh
  BurstEngine   arXiv 2509.19836; repository thunlp/BurstEngine: burst_exp.xlsx, kernel_bench/bench_fb.md
  MEMO          arXiv 2407.12117v3
  ALST          arXiv 2506.13996: minutes a step of Llama-3-8B on H100
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from systems import Setup

K, M = 1024, 1024**2


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One published figure.

    Args:
        name: what it is called in tables.
        source: paper, and table or figure.
        mark: how far to trust it.
        unit: "tokens/s", "tokens/GPU/s", "TFLOP/s", "ratio", "GB" or "tokens".
        value: the figure.
        setup: what it was measured on.
        role: "calibrate"; "judge": held out, counts for the claim; "list": held out, printed with why it is doubtful.
        base: the setup that a ratio divides by.
        doubt: why it is not judged, or what had to be assumed.
        group: cells of one group are compared with each other: which one wins.
    """

    name: str
    source: str
    mark: str
    unit: str
    value: float
    setup: Setup
    role: str = "list"
    base: Setup | None = None
    doubt: str = ""
    group: str = ""


def _seq1f1b(length: int, sequences: int, segments: int, interleave: int, **fields) -> Setup:
    return Setup(
        model="gpt-7b",
        length=length,
        tensor=8,
        pipe=4,
        sequences=sequences,
        segments=segments,
        interleave=interleave,
        vocab_size=51200,
        **fields,
    )


# length, sequences: total tokens a second of 1F1B, 1F1B-I, Seq1F1B, Seq1F1B-I; None: out of memory
_SEQ1F1B_7B = {
    (32 * K, 8): (48189, 52964, 53485, 47232),
    (32 * K, 16): (55333, 56304, 55765, 46195),
    (64 * K, 8): (37343, 41677, 43297, 40908),
    (64 * K, 16): (43063, 44712, 33367, 40990),
    (128 * K, 8): (None, None, 30392, 30023),
    (128 * K, 16): (None, None, 31584, 30362),
}
_SCHEDULES = (("1F1B", 1, 1), ("1F1B-I", 1, 2), ("Seq1F1B", 4, 1), ("Seq1F1B-I", 4, 2))
_CALIBRATE = ((32 * K, 16, "1F1B"), (32 * K, 16, "Seq1F1B-I"))


def _seq1f1b_cells() -> list[Cell]:
    cells = []
    for (length, sequences), row in _SEQ1F1B_7B.items():
        for (name, segments, interleave), value in zip(_SCHEDULES, row, strict=True):
            if value is None:
                continue
            role, mark, doubt = "judge", "[V]", ""
            if (length, sequences, name) in _CALIBRATE:
                role = "calibrate"
            elif value == 33367:
                role, mark = "list", "[V] [?]"
                doubt = "the same row says 123.05 TFLOP/s a GPU, which is 42750 tokens/s: one of the two is a misprint"
            cells.append(
                Cell(
                    name=f"{name} 7B {length // K}K, {sequences} sequences",
                    source="Seq1F1B, raw table",
                    mark=mark,
                    unit="tokens/s",
                    value=value,
                    setup=_seq1f1b(length, sequences, segments, interleave),
                    role=role,
                    doubt=doubt,
                    group=f"Seq1F1B 7B {length // K}K, {sequences} sequences" if role != "list" else "",
                )
            )
    return cells


def _sppo(model: str, length: int, segments: int, tensor: int, pipe: int, **fields) -> Setup:
    # Four 200 Gb/s adapters a node of eight GPUs; copies to the host reach 12.9 to 14.4 GB/s (Fig. 5).
    return Setup(
        model=model,
        length=length,
        tensor=tensor,
        pipe=pipe,
        segments=segments,
        network_bytes_s=12.5e9,
        host_link_bytes_s=13e9,
        offload=fields.pop("offload", "hidden"),
        **fields,
    )


def _hours(hours: float, gpus: int) -> float:
    """Returns tokens a second a GPU of a billion tokens in so many hours."""
    return 1e9 / (hours * 3600 * gpus)


_SPPO_7B_1M = _sppo("gpt-7b", M, 160, 8, 4)
_MEGATRON_7B = dict(model="gpt-7b", tensor=32, pipe=1, recompute_linear=True, recompute_attention=1.0)
_NO_MESH = "hours are [V]; mesh and N are not published at this length: SP 8, chunks of 6.4K as in the 1M run assumed"


def _sppo_cells() -> list[Cell]:
    megatron = Setup(length=M, network_bytes_s=12.5e9, **_MEGATRON_7B)
    longer = ((80.5, 1408 * K, 64), (105.0, 2186 * K, 128))
    cells = [
        Cell(
            name="SPPO 7B 1M, 32 GPUs (55.2 h)",
            source="SPPO Fig. 1, Table 4",
            mark="[V]",
            unit="tokens/GPU/s",
            value=_hours(55.2, 32),
            setup=_SPPO_7B_1M,
            role="judge",
            group="SPPO against Megatron, 7B 1M",
        ),
        Cell(
            name="SPPO 7B 2M, 64 GPUs (55.4 h)",
            source="SPPO Fig. 1",
            mark="[V]",
            unit="tokens/GPU/s",
            value=_hours(55.4, 64),
            setup=_sppo("gpt-7b", 2 * M, 320, 8, 8),
            role="judge",
            doubt=_NO_MESH,
        ),
        Cell(
            name="SPPO 7B 4M, 128 GPUs (56.2 h)",
            source="SPPO Fig. 1",
            mark="[V]",
            unit="tokens/GPU/s",
            value=_hours(56.2, 128),
            setup=_sppo("gpt-7b", 4 * M, 640, 8, 16),
            role="judge",
            doubt=_NO_MESH,
        ),
        Cell(
            name="Megatron 7B 1M, 32 GPUs (70 h)",
            source="SPPO Fig. 1",
            mark="[V] [?]",
            unit="tokens/GPU/s",
            value=_hours(70, 32),
            setup=megatron,
            doubt="elsewhere the paper says that Megatron is out of memory beyond 896K; TP 32 over four nodes assumed",
            group="SPPO against Megatron, 7B 1M",
        ),
        *(
            Cell(
                name=f"Megatron 7B {length // K}K, {gpus} GPUs ({hours:g} h)",
                source="SPPO Fig. 1",
                mark="[V] [?]",
                unit="tokens/GPU/s",
                value=_hours(hours, gpus),
                setup=replace(megatron, length=length, tensor=gpus),
                doubt="whether the hours shown belong to this length is not said; one stage over all nodes assumed",
            )
            for hours, length, gpus in longer
        ),
    ]
    ablations = (
        # model, length, N, tensor, pipe, full offload, adaptive, with multiplexed partition
        ("gpt-13b", 512 * K, 32, 8, 8, 0.91, 1.23, 1.44),
        ("gpt-65b", 640 * K, 80, 16, 8, 2.1, 3.38, 3.48),
    )
    for model, length, segments, tensor, pipe, full, adaptive, multiplexed in ablations:
        name = f"SPPO {model[4:].upper()} {length // K}K, N={segments}, PP={pipe}"
        base = _sppo(model, length, segments, tensor, pipe)
        cells += [
            Cell(
                name=f"{name}: full offload / adaptive",
                source="SPPO Fig. 11",
                mark="[V] [D]",
                unit="ratio",
                value=full / adaptive,
                setup=_sppo(model, length, segments, tensor, pipe, offload="full"),
                base=base,
                doubt="ratio of two published ratios; what full offload keeps and how it waits is not described",
            ),
            Cell(
                name=f"{name}: multiplexed / adaptive",
                source="SPPO Fig. 11",
                mark="[V] [D]",
                unit="ratio",
                value=multiplexed / adaptive,
                setup=_sppo(model, length, segments, tensor, pipe, no_bubble=True),
                base=base,
                doubt="ratio of two published ratios; predicted is the most that filling the bubble could give",
            ),
        ]
    return cells


def _burst(model: str, length: int, devices: int, attention: float = 0.0, **fields) -> Setup:
    return Setup(
        model=model,
        length=length,
        context=devices,
        recompute_linear=fields.pop("recompute_linear", True),
        recompute_attention=attention,
        **fields,
    )


def _burst_cells() -> list[Cell]:
    group = "BurstEngine 7B 4M: attention outputs kept, half kept, recomputed"
    judged = (
        ("BurstEngine ring 7B 2M, 32 GPUs", 100.1, _burst("llama2-7b", 2 * M, 32), ""),
        ("BurstEngine USP 7B 2M, 32 GPUs", 101.86, _burst("llama2-7b", 2 * M, 32), ""),
        ("BurstEngine ring 7B 4M, 64 GPUs", 50.28, _burst("llama2-7b", 4 * M, 64), group),
        ("BurstEngine USP 7B 4M, 64 GPUs", 51.78, _burst("llama2-7b", 4 * M, 64), ""),
        ("BurstEngine 7B 4M, half kept", 46.5, _burst("llama2-7b", 4 * M, 64, 0.25), group),
        ("BurstEngine 7B 4M, recomputed", 35.8, _burst("llama2-7b", 4 * M, 64, 1.0), group),
    )
    shape = "the shape of the 14B model is not in the sources; Llama 2 13B's assumed"
    policy = "which activations the baseline recomputes is not in the sources; "
    offload = "with offload, on one node; what is recomputed is not in the sources"
    listed = (
        ("BurstEngine ring 14B 1M, 32 GPUs", 118.36, _burst("llama2-13b", M, 32), "[V]", shape),
        ("BurstEngine 14B 1M, half kept", 108.8, _burst("llama2-13b", M, 32, 0.25), "[V]", shape),
        ("BurstEngine USP 14B 2M, 64 GPUs", 63.5, _burst("llama2-13b", 2 * M, 64), "[V]", shape),
        ("BurstEngine 14B 2M, 64 GPUs, in the scaling run", 60.5, _burst("llama2-13b", 2 * M, 64), "[V]", shape),
        ("BurstEngine 14B 32K, 1 GPU, in the scaling run", 1201, _burst("llama2-13b", 32 * K, 1), "[V]", shape),
        ("LoongTrain-USP 14B 1M, 32 GPUs", 99.7, _burst("llama2-13b", M, 32), "[V]", policy + shape),
        (
            "LoongTrain-USP 7B 2M, 32 GPUs",
            87.98,
            _burst("llama2-7b", 2 * M, 32),
            "[V]",
            policy + "linear parts assumed",
        ),
        (
            "DeepSpeed-Ulysses 7B 2M, 32 GPUs",
            70.8,
            _burst("llama2-7b", 2 * M, 32, 1.0, ulysses=True),
            "[V]",
            policy + "all of it assumed",
        ),
        ("BurstEngine 7B 128K, 8 GPUs", 960, _burst("llama2-7b", 128 * K, 8), "[D]", offload),
        ("BurstEngine 7B 256K, 8 GPUs", 553, _burst("llama2-7b", 256 * K, 8), "[D]", offload),
        ("BurstEngine 7B 512K, 8 GPUs", 299, _burst("llama2-7b", 512 * K, 8), "[D]", offload),
    )
    source = "BurstEngine, raw spreadsheet"
    return [
        Cell(
            name=name,
            source=source,
            mark="[V] [C]",
            unit="tokens/GPU/s",
            value=value,
            setup=setup,
            role="judge",
            group=group,
        )
        for name, value, setup, group in judged
    ] + [
        Cell(name=name, source=source, mark=mark, unit="tokens/GPU/s", value=value, setup=setup, doubt=doubt)
        for name, value, setup, mark, doubt in listed
    ]


def _memo_cells() -> list[Cell]:
    setup = Setup(model="gpt-7b", length=M, tensor=8, pipe=1, recompute_linear=True, offload="hidden")
    doubt = "52.30% MFU is [V], but not whether its FLOPs are causal; if they are not, it is 96.6 tokens/GPU/s"
    return [
        Cell(
            name="MEMO 7B 1M, 8 GPUs",
            source="MEMO, abstract",
            mark="[D] [?]",
            unit="tokens/GPU/s",
            value=188.6,
            setup=setup,
            doubt=doubt,
        )
    ]


def _alst_cells() -> list[Cell]:
    # tokens, GPUs, seconds a step
    runs = (
        (500_000, 1, 16 * 60 + 50, "judge"),
        (1_100_000, 8, 9 * 60 + 24, "judge"),
        (2_400_000, 8, 43 * 60 + 30, "judge"),
        (3_700_000, 8, 107 * 60 + 35, "calibrate"),
        (15_000_000, 32, 7 * 3600 + 25 * 60 + 9, "judge"),
    )
    return [
        Cell(
            name=f"ALST 8B {tokens / 1e6:.3g}M, {gpus} H100",
            source="ALST, tables of steps",
            mark="[V]",
            unit="tokens/GPU/s",
            value=tokens / (gpus * seconds),
            setup=Setup(
                model="llama3-8b",
                gpu="h100",
                length=tokens,
                context=gpus,
                recompute_linear=True,
                recompute_attention=1.0,
            ),
            role=role,
            doubt="read in a secondary copy of the paper; layers recomputed whole",
        )
        for tokens, gpus, seconds, role in runs
    ]


_MEMORY_GB = (
    # model, tensor, stages, why doubtful, length -> GB of the four schedules
    (
        "gpt-7b",
        8,
        4,
        "read off a figure; which stage and which counter is not said",
        {32 * K: (28, 34, 19, 16), 64 * K: (51, 63, 34, 28), 128 * K: (None, None, 70, 57)},
    ),
    (
        "gpt-30b",
        8,
        8,
        "read off a figure; which stage and which counter is not said",
        {32 * K: (71, None, 37, 38), 48 * K: (None, None, 54, 55), 64 * K: (None, None, 67, 67)},
    ),
    (
        "gpt-13b",
        8,
        4,
        "read off a figure; mesh not in the sources, that of 7B assumed; 1F1B grows less from 48K to 64K than it can",
        {32 * K: (44, 53, 30, 26), 48 * K: (64, 76, 42, 36), 64 * K: (67, None, 52, 43)},
    ),
    (
        "gpt-2.7b",
        1,
        8,
        "read off a figure; mesh not in the sources, eight stages of one GPU assumed",
        {16 * K: (51, 70, 30, 30), 24 * K: (74, None, 41, 42), 32 * K: (None, None, 53, 54)},
    ),
)


def _upipe_cells() -> list[Cell]:
    doubt = "figures from a secondary source; runs FlashAttention 3, while the H100's constant is that of ALST's kernel"
    return [
        Cell(
            name=f"UPipe {model} 128K, {gpus} H100",
            source="Untied Ulysses, secondary",
            mark="[R]",
            unit="tokens/GPU/s",
            value=value,
            setup=Setup(
                model=preset,
                gpu="h100",
                length=128 * K,
                context=gpus,
                ulysses=True,
                recompute_linear=True,
                recompute_attention=1.0,
            ),
            doubt=doubt,
        )
        for model, preset, gpus, value in (("8B", "llama3-8b", 8, 2280), ("32B", "qwen3-32b", 16, 483))
    ]


def _memory_setups() -> Iterator[tuple[str, str, Setup, float | None, str]]:
    """Yields the schedule, the model with its length, the setup, GB (None: out of memory) and the doubt."""
    for model, tensor, pipe, doubt, figures in _MEMORY_GB:
        shared = dict(model=model, tensor=tensor, pipe=pipe, sequences=2 * pipe, vocab_size=51200)
        for length, row in figures.items():
            for (name, segments, interleave), value in zip(_SCHEDULES, row, strict=True):
                setup = Setup(length=length, segments=segments, interleave=interleave, **shared)
                yield name, f"{model[4:].upper()} {length // K}K", setup, value, doubt


def out_of_memory() -> list[Setup]:
    """Returns the setups that Seq1F1B's memory figure shows to run out of memory."""
    return [setup for _, _, setup, value, _ in _memory_setups() if value is None]


def _memory_cells() -> list[Cell]:
    return [
        Cell(
            name=f"{name} {where}, memory",
            source="Seq1F1B, memory figure",
            mark="[F]",
            unit="GB",
            value=value,
            setup=setup,
            doubt=doubt,
            group=f"Seq1F1B {where} memory",
        )
        for name, where, setup, value, doubt in _memory_setups()
        if value is not None
    ]


def _length_cells() -> list[Cell]:
    cells = []
    for gpus, sppo, megatron in ((32, 1.3 * M, 1.0 * M), (64, 2.0 * M, 1.375 * M), (128, 4.0 * M, 2.13 * M)):
        common = dict(source="SPPO Fig. 12", mark="[F]", unit="tokens", group=f"longest 7B on {gpus} GPUs")
        cells += [
            Cell(
                name=f"SPPO longest 7B, {gpus} GPUs",
                value=sppo,
                setup=_sppo("gpt-7b", int(sppo), 160 * gpus // 32, 8, gpus // 8),
                doubt="only 1.3M is said to be a limit, and not of what; predicted is what HBM and 2 TB a host hold",
                **common,
            ),
            Cell(
                name=f"Megatron longest 7B, {gpus} GPUs",
                value=megatron,
                setup=Setup(length=int(megatron), **{**_MEGATRON_7B, "tensor": gpus}),
                doubt="how Megatron was tuned is not said; one stage, full recomputation assumed",
                **common,
            ),
        ]
    return cells


# 512K tokens, 40 heads of 128, 32 A800: forward and backward together, TFLOP/s a GPU, causal.
KERNEL = Cell(
    name="BurstAttention kernel, 512K, forward and backward",
    source="BurstEngine, kernel_bench/bench_fb.md",
    mark="[C]",
    unit="TFLOP/s",
    value=179.13,
    setup=_burst("llama2-13b", 512 * K, 32),
    role="calibrate",
)


def published_cells() -> list[Cell]:
    """Returns all cells but the kernel's, throughput first."""
    return [
        *_seq1f1b_cells(),
        *_sppo_cells(),
        *_burst_cells(),
        *_alst_cells(),
        *_upipe_cells(),
        *_memo_cells(),
        *_memory_cells(),
        *_length_cells(),
    ]
