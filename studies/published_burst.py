"""Published figures of BurstEngine's spreadsheet: BurstEngine, LoongTrain and DeepSpeed-Ulysses on the same A800.

Source: arXiv 2509.19836; repository thunlp/BurstEngine at commit 426eb7a: plot_code/burst_attn/burst_exp.xlsx (one
sheet for each model and number of nodes), kernel_bench/bench_fb.md, and the model shapes of
BurstEngine/apps/llama/config and plot_code/burst_attn/convert_csv.py. The "14B" model is Llama 2 13B with a
vocabulary of 120000.

Rows without a suffix keep attention outputs; rows "w/o sele-ckpt" recompute attention; "half-ckpt" keeps the outputs of
the second half of the sequence, which has three quarters of the (query, key) pairs. All recompute the linear parts.
"""

from studies.cells import Cell, K, M
from studies.systems import Setup

_SHEET = "BurstEngine, raw spreadsheet"
_USP = "Ulysses within a node and a ring between nodes (USP) are predicted as a ring that hides"


def _burst(model: str, length: int, devices: int, attention: float = 0.0, **fields) -> Setup:
    shape = {"model": "llama2-7b"} if model == "7B" else {"model": "llama2-13b", "vocab_size": 120000}
    return Setup(
        length=length, context=devices, recompute_linear=True, recompute_attention=attention, **shape, **fields
    )


# model, tokens in M, GPUs: ring and USP with attention outputs kept, ring with half of them kept, ring and USP with
# attention recomputed
_RUNS = {
    ("7B", 2, 32): (100.1, 101.86, 92.41, 79.54, 81.02),
    ("7B", 4, 64): (50.28, 51.78, 46.5, 35.8, 38.95),
    ("14B", 1, 32): (118.36, 122, 108.82, 95.14, 98.02),
    ("14B", 2, 64): (60.49, 63.54, 55.67, 44.43, 50.89),
}
_KINDS = (  # name, share of attention recomputed, groups
    ("ring", 0.0, ("{}: ring or USP", "{} ring: attention kept, half kept, recomputed")),
    ("USP", 0.0, ("{}: ring or USP", "{} USP: attention kept, recomputed")),
    ("ring, half kept", 0.25, ("{} ring: attention kept, half kept, recomputed",)),
    (
        "ring, recomputed",
        1.0,
        ("{} ring: attention kept, half kept, recomputed", "{}, attention recomputed: ring or USP"),
    ),
    ("USP, recomputed", 1.0, ("{} USP: attention kept, recomputed", "{}, attention recomputed: ring or USP")),
)
_TWICE = "the same spreadsheet has 48.39 for the ablation's run, which should be this one"


def _runs() -> list[Cell]:
    cells = []
    for (model, millions, gpus), row in _RUNS.items():
        where = f"{model} {millions}M"
        for (kind, attention, groups), value in zip(_KINDS, row, strict=True):
            doubted = value == 44.43
            against = ("BurstEngine or LoongTrain, {} " + kind,) if kind in ("ring", "USP") else ()
            cells.append(
                Cell(
                    name=f"BurstEngine {kind} {where}, {gpus} GPUs",
                    system="BurstEngine",
                    source=_SHEET,
                    mark="[V] [?]" if doubted else "[V]",
                    unit="tokens/GPU/s",
                    value=value,
                    setup=_burst(model, millions * M, gpus, attention),
                    role="list" if doubted else "judge",
                    doubt=_TWICE if doubted else _USP if "USP" in kind else "",
                    groups=tuple(
                        ("" if "LoongTrain" in name else "BurstEngine ") + name.format(where)
                        for name in groups + against
                    ),
                )
            )
    return cells


_OTHER_RING = "the model hides every ring; LoongTrain's ring over four nodes does not hide"
_LOONGTRAIN = (
    # name, model, tokens in M, value, share of attention recomputed, doubt
    ("LoongTrain USP", "7B", 2, 87.98, 0.0, ""),
    ("LoongTrain USP", "14B", 1, 99.73, 0.0, ""),
    ("LoongTrain ring", "7B", 2, 77.37, 0.0, _OTHER_RING),
    ("LoongTrain ring", "14B", 1, 55.52, 0.0, _OTHER_RING),
)


def _loongtrain() -> list[Cell]:
    cells = [
        Cell(
            name=f"{name} {model} {millions}M, 32 GPUs",
            system="LoongTrain",
            source=_SHEET,
            mark="[V]",
            unit="tokens/GPU/s",
            value=value,
            setup=_burst(model, millions * M, 32, attention),
            role="list" if doubt else "judge",
            doubt=doubt or _USP,
            groups=(f"BurstEngine or LoongTrain, {model} {millions}M {name.split()[1]}",),
        )
        for name, model, millions, value, attention, doubt in _LOONGTRAIN
    ]
    ulysses = Cell(
        name="DeepSpeed-Ulysses 7B 2M, 32 GPUs",
        system="DeepSpeed-Ulysses",
        source=_SHEET,
        mark="[V]",
        unit="tokens/GPU/s",
        value=70.83,
        setup=_burst("7B", 2 * M, 32, 1.0, ulysses=True),
        doubt="the activations that the baseline recomputes are not in the sources; all of them assumed",
    )
    return [*cells, ulysses]


_ABLATION = (
    # what is added, value, share of attention recomputed, doubt
    ("base", 83.79, 1.0, "the model hides every ring; the runs differ in how much of the ring hides"),
    ("+ backward's sends", 87.48, 1.0, "the model hides every ring; the runs differ in how much of the ring hides"),
    ("+ double ring", 95.06, 1.0, "a second run of 'ring, recomputed 14B 1M'"),
    ("+ fused loss", 94.81, 1.0, ""),
    ("+ outputs kept", 117.83, 0.0, "a second run of 'ring 14B 1M'"),
)


def _ablation() -> list[Cell]:
    return [
        Cell(
            name=f"BurstEngine ablation 14B 1M, 32 GPUs: {name}",
            system="BurstEngine",
            source=_SHEET,
            mark="[V]",
            unit="tokens/GPU/s",
            value=value,
            setup=_burst("14B", M, 32, attention),
            role="list" if doubt else "judge",
            doubt=doubt,
            groups=("BurstEngine ablation 14B 1M: base, backward's sends, double ring",) if number < 3 else (),
        )
        for number, (name, value, attention, doubt) in enumerate(_ABLATION)
    ]


# GPUs: tokens a second a GPU, 32K tokens a GPU; 32 and 64 GPUs are the ring's runs above.
_SCALING = {1: 1201.14, 2: 928.24, 4: 639.43, 8: 393.44, 16: 223.25}


def _scaling() -> list[Cell]:
    runs = [
        Cell(
            name=f"BurstEngine scaling 14B {32 * gpus}K, {gpus} GPU{'s' * (gpus > 1)}",
            system="BurstEngine",
            source=_SHEET,
            mark="[V]",
            unit="tokens/GPU/s",
            value=value,
            setup=_burst("14B", 32 * K * gpus, gpus),
            role="judge",
            doubt="with offload, which is assumed to hide" if gpus <= 8 else "",
        )
        for gpus, value in _SCALING.items()
    ]
    doubt = "on one node with offload, sequences spread over {} GPUs; what is recomputed is not in the sources"
    one_node = [
        Cell(
            name=f"BurstEngine 7B {length}K, 8 GPUs",
            system="BurstEngine",
            source=_SHEET,
            mark="[V]",
            unit="tokens/GPU/s",
            value=value,
            setup=_burst("7B", length * K, gpus),
            doubt=doubt.format(gpus),
        )
        for length, gpus, value in ((128, 2, 960.09), (256, 4, 553.18), (512, 8, 298.95))
    ]
    return [*runs, *one_node]


# 512K tokens, 40 heads of 128, 32 A800: forward and backward together, TFLOP/s a GPU, causal.
KERNEL = Cell(
    name="BurstAttention kernel, 512K, forward and backward",
    system="BurstEngine",
    source="BurstEngine, kernel_bench/bench_fb.md",
    mark="[C]",
    unit="TFLOP/s",
    value=179.13,
    setup=_burst("14B", 512 * K, 32),
    role="calibrate",
)


def burst_cells() -> list[Cell]:
    """Returns the cells of the spreadsheet; the kernel's is apart."""
    return [*_runs(), *_loongtrain(), *_ablation(), *_scaling()]
