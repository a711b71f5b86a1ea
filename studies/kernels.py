"""Compares the cost model's attention with NVIDIA's benchmarks of cuDNN's kernel, in bench/results/figures/kernels.md.

    python -m studies.kernels                 print
    python -m studies.kernels --write         print, and write the block `kernels`

The figures were measured by NVIDIA, not by this project. No jax needed; takes a second.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.blocks import FIGURES, write_block
from sppo_jax.config import ModelConfig
from sppo_jax.hardware import DEVICES, make_cluster
from sppo_jax.plan.parts import MeshShape
from sppo_jax.predict.seconds.costs import cost_model
from sppo_jax.predict.seconds.stage_shape import Recompute, StageShape
from studies.calibration import mean_error

PAGE = FIGURES / "kernels.md"
SOURCE = "github.com/NVIDIA/cudnn-frontend, benchmark"
HEAD_DIM, QUERIES_PER_KEY_HEAD = 128, 8
# TFLOP/s by device and passes, of whole causal sequences: two of them, 64 query heads.
LENGTHS = (2048, 4096, 8192, 16384, 32768)
WHOLE = {
    ("h200", "F"): (534, 616, 655, 633, 619),
    ("h200", "B"): (402, 495, 526, 539, 528),
    ("a100-80g", "F"): (155, 174, 177, 173, 176),
    ("a100-80g", "B"): (109, 128, 136, 139, 143),
}
# TFLOP/s of the forward by device and query heads, of a chunk's queries (down) and all its keys (across).
QUERIES, KEYS = (256, 512, 1024, 2048), (8192, 32768, 131072)
CHUNKS = {
    ("h200", 64): ((572, 612, 628), (595, 627, 634), (627, 634, 633), (680, 647, 612)),
    ("h200", 8): ((77.4, 79.6, 80.1), (154, 159, 160), (305, 316, 319), (582, 617, 632)),
    ("a100-80g", 64): ((114, 116, 116), (154, 155, 155), (188, 187, 177), (204, 188, 175)),
    ("a100-80g", 32): ((112, 115, 115), (116, 116, 116), (158, 156, 155), (196, 188, 178)),
    ("b200", 64): ((668, 656, 704), (1217, 1295, 1403), (1289, 1353, 1441), (1449, 1420, 1419)),
    ("b200", 32): ((354, 355, 374), (670, 699, 738), (1227, 1297, 1393), (1324, 1363, 1451)),
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """A measured rate beside the predicted one.

    Args:
        device: name of the device.
        kind: "F" or "B".
        queries: of a head.
        keys: of a head, the queries' own included.
        heads: query heads of all sequences of the batch.
        measured: TFLOP/s that NVIDIA measured.
        predicted: TFLOP/s of the cost model.
        used: whether a constant of the device was read off this figure.
    """

    device: str
    kind: str
    queries: int
    keys: int
    heads: int
    measured: float
    predicted: float
    used: bool

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def predicted_tflops(device: str, kind: str, queries: int, keys: int, heads: int) -> float:
    """Returns the TFLOP/s of attention alone, counting two matmuls forward and five backward over the pairs."""
    model = ModelConfig(
        vocab_size=1,
        hidden_size=heads * HEAD_DIM,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=heads // QUERIES_PER_KEY_HEAD,
        mlp_size=1,
    )
    bare = replace(DEVICES[device], overhead_s=0.0, overhead_tokens=0, hbm_bytes_s=float("inf"))
    costs = cost_model(
        model,
        make_cluster(bare),
        StageShape(
            mesh=MeshShape(data=1, pipe=1, seq=1),
            ulysses=1,
            ring=1,
            layers=1,
            compute_bytes=2,
            kernel="cudnn",
            length=keys,
        ),
        Recompute(),
    )
    attention = replace(costs, layer=replace(costs.layer, linear_flops=0.0))
    pairs = queries * (keys - queries) + queries**2 / 2
    flops = (4 if kind == "F" else 10) * HEAD_DIM * heads * pairs
    return flops / attention.compute_s(kind, keys - queries, queries) / 1e12


def points() -> Iterator[Point]:
    """Yields every figure with its prediction."""
    for (device, kind), rates in WHOLE.items():
        for length, rate in zip(LENGTHS, rates, strict=True):
            yield _point(device, kind, length, length, 128, rate, used=length == LENGTHS[-1])
    for (device, heads), rows in CHUNKS.items():
        for queries, rates in zip(QUERIES, rows, strict=True):
            for keys, rate in zip(KEYS, rates, strict=True):
                yield _point(device, "F", queries, keys, heads, rate, used=False)


def _point(device: str, kind: str, queries: int, keys: int, heads: int, measured: float, *, used: bool) -> Point:
    predicted = predicted_tflops(device, kind, queries, keys, heads)
    return Point(
        device=device,
        kind=kind,
        queries=queries,
        keys=keys,
        heads=heads,
        measured=measured,
        predicted=predicted,
        used=used,
    )


_TEXT = """\
NVIDIA measured cuDNN's kernel alone, in bfloat16 with heads of 128 (September 2026, cuDNN 9.27). Whole sequences are
from {source}/attention_training/results/llama3.1, chunks from
{source}/attention_inference/results/prefill_sweep. The A100 is the PCIe card, which has less power than the SXM card
of the planner's presets. The predictions are the cost model's, for attention alone. This project ran none of these
kernels.

Each cell of the tables is measured / predicted in TFLOP/s, where only existing (query, key) pairs count. The figures
in italics set the device's efficiency; the B200's is of a whole sequence on a GB200. The waves and tokens that
`sppo_jax/predict/seconds/costs.py` adds for tails were fitted on the whole sequences. Mean absolute error on the
{whole_count} other figures of whole sequences: **{whole:.1%}**. Mean absolute error on the {chunk_count} figures
of chunks, on which nothing was fitted: **{chunks:.1%}**, worst {worst:+.1%} ({worst_name}).
With one efficiency for all sizes the chunks' mean error would be {flat:.1%}."""


def report(found: list[Point]) -> str:
    """Writes the block."""
    held_out = [point for point in found if not point.used]
    whole = [point for point in held_out if point.queries == point.keys]
    chunks = [point for point in held_out if point.queries != point.keys]
    worst = max(chunks, key=lambda point: abs(point.error))
    text = _TEXT.format(
        source=SOURCE,
        whole_count=len(whole),
        whole=mean_error(whole),
        chunk_count=len(chunks),
        chunks=mean_error(chunks),
        worst=worst.error,
        worst_name=f"{worst.device}, {worst.heads} heads, {worst.queries} queries, {worst.keys} keys",
        flat=mean_error([replace(point, predicted=_flat(point)) for point in chunks]),
    )
    return "\n".join([text, "", *_whole_table(found), "", *_chunk_table(found)])


def _flat(point: Point) -> float:
    device = DEVICES[point.device]
    return device.matmul_flops_s * device.attention_efficiency / 1e12


def _whole_table(found: list[Point]) -> list[str]:
    names = {"F": "forward", "B": "backward"}
    lines = [f"| whole sequences | {' | '.join(f'{length:,}' for length in LENGTHS)} |", "|---" * 6 + "|"]
    for device, kind in WHOLE:
        own = [p for p in found if (p.device, p.kind) == (device, kind) and p.queries == p.keys]
        lines.append(f"| {device}, {names[kind]} | {' | '.join(map(_cell, own))} |")
    return lines


def _chunk_table(found: list[Point]) -> list[str]:
    lines = [f"| chunks, forward | queries | {' | '.join(f'{keys:,} keys' for keys in KEYS)} |", "|---" * 5 + "|"]
    for device, heads in CHUNKS:
        for queries in QUERIES:
            key = device, heads, queries
            own = [p for p in found if (p.device, p.heads, p.queries) == key and p.queries != p.keys]
            lines.append(f"| {device}, {heads} heads | {queries:,} | {' | '.join(map(_cell, own))} |")
    return lines


def _cell(point: Point) -> str:
    text = f"{point.measured:.4g} / {point.predicted:.0f}"
    return f"*{text}*" if point.used else text


def main() -> int:
    """Prints the block, and writes it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the block of bench/results/figures/kernels.md")
    text = report(list(points()))
    print(text)
    if parser.parse_args().write:
        write_block(PAGE, "kernels", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
