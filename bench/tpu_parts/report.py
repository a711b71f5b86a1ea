"""The results of the stopwatch for TPUs as text. No jax."""

from __future__ import annotations

from bench.gpu_parts.report import SECTIONS, Row, Sections
from bench.gpu_parts.results import Results


def kernel_rows(results: Results) -> list[Row]:
    """Return what the kernel took beside what the planner charges."""
    return [
        {
            "kernel": f"{row['what']}, {row['way']}",
            "ms": f"{1e3 * row['seconds']:.4g}",
            "TFLOP/s": f"{row['flops_s'] / 1e12:.4g}",
            "charged / measured s": f"{row['charged_s'] / row['seconds']:.2f}" if row["charged_s"] else "",
        }
        for row in results.rows("kernel")
        if "way" in row
    ]


def hop_rows(results: Results) -> list[Row]:
    """Return what hops took, and how much of them the kernel hides."""
    return [
        {
            "case": row["case"],
            "what": row["what"],
            "ms": f"{1e3 * row['seconds']:.4g}" if "seconds" in row else "",
            "GB/s": f"{row['bytes_s'] / 1e9:.4g}" if row.get("bytes_s") else "",
            "share": f"{row['share']:.0%}" if "share" in row else "",
        }
        for row in results.rows("hop")
        if "what" in row
    ]


def copy_rows(results: Results) -> list[Row]:
    """Return the rates of products and of host copies."""
    return [
        {
            "what": row["what"],
            "GB/s": f"{row['bytes_s'] / 1e9:.4g}" if row.get("bytes_s") else "",
            "TFLOP/s": f"{row['flops_s'] / 1e12:.4g}" if row.get("flops_s") else "",
        }
        for row in results.rows("copies")
        if row.get("bytes_s") or row.get("flops_s")
    ]


_SHARED = ("What is here", "Compiled, not run", "Train steps", "Not measured")
_OWN: Sections = (("The attention kernel", kernel_rows), ("Hops of a ring", hop_rows), ("Host copies", copy_rows))
TPU_SECTIONS: Sections = (*_OWN, *(section for section in SECTIONS if section[0] in _SHARED))
