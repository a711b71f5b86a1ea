"""Published figures of pipelines: Seq1F1B with its baselines, and SPPO with its baselines.

Sources:
  SPPO      arXiv 2503.10377v1: Fig. 1 (hours for 1B tokens), Table 4, Fig. 5, Fig. 11, Fig. 12, text of the evaluation
  Seq1F1B   arXiv 2406.03488; repository thunlp/Seq1F1B: the raw table "32x7b zhihu_throughput.tex", exp.sh, run.sh
"""

from collections.abc import Iterator
from dataclasses import replace

from studies.cells import Cell, K, M
from studies.systems import Setup


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


def seq1f1b_cells() -> list[Cell]:
    """Returns the throughput of the raw table."""
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
                    system="Seq1F1B",
                    source="Seq1F1B, raw table",
                    mark=mark,
                    unit="tokens/s",
                    value=value,
                    setup=_seq1f1b(length, sequences, segments, interleave),
                    role=role,
                    doubt=doubt,
                    groups=() if role == "list" else (f"Seq1F1B 7B {length // K}K, {sequences} sequences",),
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


def _sppo_hours() -> list[Cell]:
    megatron = Setup(length=M, network_bytes_s=12.5e9, **_MEGATRON_7B)
    longer = ((80.5, 1408 * K, 64), (105.0, 2186 * K, 128))
    return [
        Cell(
            system="SPPO",
            name="SPPO 7B 1M, 32 GPUs (55.2 h)",
            source="SPPO Fig. 1, Table 4",
            mark="[V]",
            unit="tokens/GPU/s",
            value=_hours(55.2, 32),
            setup=_SPPO_7B_1M,
            role="judge",
        ),
        Cell(
            system="SPPO",
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
            system="SPPO",
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
            system="Megatron",
            name="Megatron 7B 1M, 32 GPUs (70 h)",
            source="SPPO Fig. 1",
            mark="[V] [?]",
            unit="tokens/GPU/s",
            value=_hours(70, 32),
            setup=megatron,
            doubt="elsewhere the paper says that Megatron is out of memory beyond 896K; TP 32 over four nodes assumed",
        ),
        *(
            Cell(
                system="Megatron",
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


def _sppo_ablations() -> list[Cell]:
    cells = []
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
                system="SPPO",
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
                system="SPPO",
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


_ONE = "how many sequences Megatron's step has is not published; one, as in SPPO's, assumed"


def _sppo_against_megatron() -> list[Cell]:
    cells = []
    rows = (
        # model, length, N and mesh of SPPO, mesh of Megatron, ratio, source, mark, doubt
        ("gpt-13b", 512 * K, 32, (8, 8), (8, 8), 1.23, "SPPO Fig. 11", "[V]", _ONE),
        ("gpt-65b", 600 * K, 64, (16, 8), (64, 2), 3.38, "SPPO, text of the evaluation", "[V]", _ONE),
        (
            "gpt-65b",
            640 * K,
            80,
            (16, 8),
            (64, 2),
            3.12,
            "SPPO, text of the evaluation",
            "[V] [?]",
            f"Fig. 11 has 3.38x; {_ONE}",
        ),
    )
    for model, length, segments, ours, theirs, value, source, mark, doubt in rows:
        megatron = Setup(
            model=model,
            length=length,
            tensor=theirs[0],
            pipe=theirs[1],
            network_bytes_s=12.5e9,
            recompute_linear=True,
            recompute_attention=1.0,
        )
        cells.append(
            Cell(
                name=f"SPPO {model[4:].upper()} {length // K}K over Megatron",
                system="SPPO",
                source=source,
                mark=mark,
                unit="ratio",
                value=value,
                setup=_sppo(model, length, segments, *ours),
                base=megatron,
                doubt=doubt,
            )
        )
    return cells


def sppo_cells() -> list[Cell]:
    """Returns SPPO's throughput, its ablations, and its ratios to Megatron."""
    return [*_sppo_hours(), *_sppo_ablations(), *_sppo_against_megatron()]


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


def memory_cells() -> list[Cell]:
    """Returns the figures read off the plots of memory."""
    return [
        Cell(
            name=f"{name} {where}, memory",
            system="Seq1F1B",
            source="Seq1F1B, memory figure",
            mark="[F]",
            unit="GB",
            value=value,
            setup=setup,
            doubt=doubt,
        )
        for name, where, setup, value, doubt in _memory_setups()
        if value is not None
    ]


def length_cells() -> list[Cell]:
    """Returns the longest sequences of SPPO's figure."""
    cells = []
    for gpus, sppo, megatron in ((32, 1.3 * M, 1.0 * M), (64, 2.0 * M, 1.375 * M), (128, 4.0 * M, 2.13 * M)):
        common = dict(source="SPPO Fig. 12", mark="[F]", unit="tokens")
        cells += [
            Cell(
                system="SPPO",
                name=f"SPPO longest 7B, {gpus} GPUs",
                value=sppo,
                setup=_sppo("gpt-7b", int(sppo), 160 * gpus // 32, 8, gpus // 8),
                doubt="only 1.3M is said to be a limit, and not of what; predicted is what HBM and 2 TB a host hold",
                **common,
            ),
            Cell(
                system="Megatron",
                name=f"Megatron longest 7B, {gpus} GPUs",
                value=megatron,
                setup=Setup(length=int(megatron), **{**_MEGATRON_7B, "tensor": gpus}),
                doubt="how Megatron was tuned is not said; one stage, full recomputation assumed",
                **common,
            ),
        ]
    return cells
