"""The page of the compiled attention kernel for TPUs: its figures, and those of tokamax's beside them. No jax."""

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
HEAD = """\
# The attention kernel for TPUs, compiled

No TPU was used. `python -m bench.tpu_kernel` wrote this; its head says what a bundle is. {versions}.

* Heads: key-value heads, query heads of each, elements of a head.
* Bundles: of a turn of the inner loop, which has 1024 x 1024 scores where the chunk has 8192 queries, in float32
  512 x 512; first of blocks that are visible as a whole, then of blocks at an edge of a mask. Matrix units: used slots
  of the first.
* In place: MiB of results that take no memory of their own.
* HBM: MiB that XLA allocates for arguments, results and temporaries.

| chip | kernel | heads | queries, keys | dtype, sums | bundles | edge | matrix units | VMEM, MiB | in place | HBM |
|---|---|---|---|---|---|---|---|---|---|---|"""
BESIDE = """

## Beside tokamax

Bundles of 1024 x 1024 scores of a head, bfloat16, in blocks that are visible as a whole; tokamax {tokamax}'s kernel
has blocks of 1024 whose keys are computed 512 at a time, and adds dQ in 3 steps; it was compiled in the same way, with
56 MiB of memory for blocks (`python -m bench.tpu_tokamax`). A device: bundles by the cores that work, which are cycles
if nothing waits. tokamax's backward is in a region of the first core; with two sequences on a device, both cores work.

| chip | heads of | kernel | ours | tokamax | ours, a device | tokamax, a device | with two sequences |
|---|---|---|---|---|---|---|---|"""


def table(rows: list[dict[str, Any]]) -> str:
    """Writes the figures as a table in Markdown."""
    versions = sorted({f"jax {row['jax']}, libtpu {row['libtpu']}" for row in rows})
    lines = [HEAD.format(versions="; ".join(versions))]
    for row in rows:
        shape = f"{' x '.join(map(str, row['heads']))} | {', '.join(map(str, row['tokens']))}"
        lines.append(
            f"| {row['chip']} | {row['kernel']} | {shape} | {row['dtype']}, {row['sums']} | {row['bundles']} "
            f"| {row['edge_bundles']} | {row['matrix_share']:.0%} | {row['vmem_mib']} | {row['alias_mib']} "
            f"| {row['allocated_mib']} |"
        )
    return "\n".join(lines) + "\n"


def beside(rows: list[Row], theirs: list[Row]) -> str:
    """Writes tokamax's figures beside ours as a table in Markdown; empty where there are none."""
    if not theirs:
        return ""
    ours = {(row["chip"], row["heads"][2], row["kernel"]): row for row in rows if _is_compared(row)}
    lines = [BESIDE.format(tokamax=theirs[0]["tokamax"])]
    for row in theirs:
        own = ours[row["chip"], row["head_dim"], row["kernel"]]["bundles"]
        of_device = (own / row["cores_of_chip"], row["bundles"] / row["cores"], row["bundles"] / row["cores_of_chip"])
        lines.append(
            f"| {row['chip']} | {row['head_dim']} | {row['kernel']} | {own} | {row['bundles']} | "
            + " | ".join(f"{count:.0f}" for count in of_device)
            + " |"
        )
    return "\n".join(lines) + "\n"


def _is_compared(row: Row) -> bool:
    return row["heads"][:2] == [1, 4] and row["tokens"] == [8192, 65536] and row["dtype"] == "bfloat16"


def page(folder: Path) -> str:
    """Returns the page of the results in a folder."""
    rows, theirs = (
        json.loads(path.read_text()) if path.exists() else []
        for path in (folder / "tpu_kernel.json", folder / "tpu_tokamax.json")
    )
    return table(rows) + beside(rows, theirs)


def write_page(folder: Path) -> None:
    """Writes the page of the results in a folder."""
    (folder / "tpu_kernel.md").write_text(page(folder))
