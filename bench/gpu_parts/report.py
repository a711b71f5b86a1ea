"""The results of a benchmark as text: a table for each part, and what was not measured, and why. No jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.gpu_parts.aims import aim_rows, ceiling_flops_s, measured_prediction_s
from bench.gpu_parts.case import DONE, NOT_RUN, SKIPPED
from bench.gpu_parts.picture import draw
from bench.gpu_parts.results import Results
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.files.whole import write_whole
from sppo_jax.hardware import DEVICES

Row = dict[str, Any]
Sections = Sequence[tuple[str, Callable[[Results], list[Row]]]]
# The parts that compare results with right ones.
COMPARING = ("exact", "train", "flex")


def write_reports(results: Results, sections: Sections | None = None) -> str:
    """Write the tables and, where there is something to draw, the picture beside the JSON; return the tables."""
    text = tables(results, sections)
    write_whole(results.path.with_suffix(".md"), text)
    picture = draw(results)
    if picture:
        write_whole(results.path.with_suffix(".svg"), picture)
    profiles = [row["profile"] for row in results.rows("attention") if "profile" in row]
    if profiles:
        from json import dumps

        write_whole(results.path.with_name(f"profile_{results.machine['device']}.json"), dumps(profiles[-1], indent=1))
    return text


def failed_comparisons(results: Results) -> list[str]:
    """Return the comparisons of `COMPARING` parts that do not hold, and their cases that failed."""
    rows = [row for part in COMPARING for row in results.rows(part)]
    wrong = [f"{row['case']}: {row['what']}" for row in rows if row.get("ok") is False]
    broken = [
        o.key for o in results.outcomes.values() if o.part in COMPARING and o.status not in (DONE, SKIPPED, NOT_RUN)
    ]
    return wrong + broken


def tables(results: Results, sections: Sections | None = None) -> str:
    """Return everything as Markdown; `sections` are a title and its rows each, those of GPUs if None."""
    machine, versions = results.machine, results.versions
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    head = f"{_days(results)}, {machine['description']}{driver}; " + ", ".join(f"{k} {v}" for k, v in versions.items())
    parts = [f"{head}.\n", *_largest(results)]
    for title, make in sections or SECTIONS:
        rows = make(results)
        if rows:
            parts.append(f"## {title}\n\n{_markdown(rows)}\n")
    return "\n".join(parts)


def _days(results: Results) -> str:
    """Name the day of the results, or the first and the last."""
    days = sorted({outcome.date or results.date for outcome in results.outcomes.values()} | {results.date})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _markdown(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(str(row.get(name, "")) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def _tera(value: float | None) -> str:
    return "" if value is None else f"{value / 1e12:.4g}"


def _size(value: float | None) -> str:
    return "" if value is None else format_bytes(value)


def _seconds(values: Sequence[float]) -> str:
    middle = sorted(values)[len(values) // 2]
    return f"{middle:.4g} ({min(values):.4g} to {max(values):.4g})"


def _optional(value: Any, show: Callable[[Any], str]) -> str:
    return "" if value is None else show(value)


def _largest(results: Results) -> list[str]:
    """Say what the largest compiled programs take; searches for the longest sequence overflow on purpose."""
    compiled = [row for o in results.outcomes.values() for row in o.rows if "program" in row and "longest" not in o.key]
    if not compiled:
        return []
    hbm, host = (max(row[name] for row in compiled) for name in ("hbm_bytes", "host_bytes"))
    fused = sum(row["flash_calls"] > 0 for row in compiled)
    kernels = f"; {fused} call fused attention kernels" if fused else ""
    return [
        f"{len(compiled)} programs compiled for {results.machine['device']}, none run{kernels}. The "
        f"largest take {_size(hbm)} of {_size(results.machine['hbm_bytes'])} HBM and {_size(host)} of "
        f"host memory. {_statistic(results)} Exposed are bytes of host copies with no matrix product beside them.\n"
    ]


def _statistic(results: Results) -> str:
    """Say which of XLA's figures the bytes are, see `sppo_jax.fit.figures`."""
    of_parts = "arguments + outputs + temporaries - aliases"
    if DEVICES[results.machine["device"]].platform == "tpu":
        return f"HBM is what XLA allocates; host is {of_parts}."
    return f"HBM and host are {of_parts}."


def _compiled(results: Results) -> list[Row]:
    rows = []
    for outcome in results.outcomes.values():
        for row in outcome.rows:
            if "program" in row:
                rows.append(
                    {
                        "program": f"{outcome.key}: {row['program']}",
                        "HBM": _size(row["hbm_bytes"]),
                        "host": _size(row["host_bytes"]),
                        "flash calls": row["flash_calls"],
                        "copied": _size(row["copied_bytes"]),
                        "exposed": _size(row["exposed_bytes"]),
                        "compile s": row["compile_s"],
                    }
                )
    return rows


def _system(results: Results) -> list[Row]:
    return [{"what": row["what"], "value": row["value"]} for row in results.rows("system") if "value" in row]


def _probe(results: Results) -> list[Row]:
    return [
        {
            "case": row["case"],
            "inner loop": row["what"],
            "ms a turn": _optional(row.get("turn_s"), lambda values: _seconds([1e3 * value for value in values])),
            "ms a turn waits for the copy": _optional(row.get("gap_s"), lambda value: f"{1e3 * value:.3g}"),
            "us an inner turn's read": _optional(row.get("read_s"), lambda value: f"{1e6 * value:.3g}"),
        }
        for row in results.rows("probe")
        if "what" in row
    ]


def _pool(results: Results) -> list[Row]:
    return [
        {
            "case": row["what"],
            "asked for": _size(row["asked_bytes"]),
            "taken": _size(row["taken_bytes"]),
            "expected": _size(row["expected_bytes"]),
            "first call, later ones": f"{row['first_s']:.3g} s, {row['later_s']:.3g} s",
            "filled": f"{_size(row['filled_bytes'])} in {row['filled_s']:.3g} s" if "filled_s" in row else "",
            "pinned GiB/s": _optional(row["pinned_bytes_s"], lambda value: f"{value / 2**30:.3g}"),
            "copied GiB/s": f"{row['copied_bytes_s'] / 2**30:.3g}",
        }
        for row in results.rows("pool")
        if "asked_bytes" in row
    ]


def _health(results: Results) -> list[Row]:
    return [
        {
            "what": row["what"] + (f": {_size(row['bytes'])}" if row.get("bytes") else ""),
            "TFLOP/s": _tera(row.get("flops_s")),
            "GB/s": _optional(row.get("bytes_s"), lambda value: f"{value / 1e9:.4g}"),
            "ms a turn": _optional(row.get("turn_s"), lambda values: _seconds([1e3 * value for value in values])),
        }
        for row in results.rows("health")
        if "what" in row
    ]


def _exact(results: Results) -> list[Row]:
    return [
        {
            "comparison": row["what"],
            "holds": "yes" if row["ok"] else "NO",
            "largest error": _difference(row),
        }
        for part in ("exact", "train")
        for row in results.rows(part)
        if "what" in row
    ]


def _difference(row: Row) -> str:
    """Say how large the error of a comparison is."""
    if "losses" in row:
        return (
            f"{row['error']:.2g} of a loss" if "error" in row else f"{row['losses'][0]:.3f} to {row['losses'][-1]:.3f}"
        )
    if "most" in row:
        return f"{row['error']:.2g} of its size, in {row['worst']}; at most {row['most']:.0e}"
    if not row.get("bitwise"):
        return f"{row['times_dense']:.2f} of dense bfloat16's, in {row['worst']}"
    if not row.get("differing"):
        return "none, bit for bit"
    name, distance = max(row["differing"].items(), key=lambda item: item[1])
    return f"{distance:.2g} of its size, in {name}; {len(row['differing'])} arrays differ"


def _attention(results: Results) -> list[Row]:
    ceiling, rows = ceiling_flops_s(results), {}
    for row in results.rows("attention"):
        if "way" in row:
            cells = rows.setdefault((row["what"], row["way"]), {"TFLOP/s": f"{row['what']}, {row['way']}"})
            share = f" ({row['flops_s'] / ceiling:.0%})" if ceiling else ""
            cells[f"{row['queries']} queries"] = f"{_tera(row['flops_s'])}{share}"
    return list(rows.values())


def _delta(results: Results) -> list[Row]:
    """Show what was measured beside the planner's guess."""
    return [
        {
            "run": f"{row['what']}, {row['way']}",
            "s (guess)": f"{row['seconds']:.4g} ({row['guessed_s']:.4g})",
            "TFLOP/s of the recurrence (guess)": f"{_tera(row['flops_s'])} ({_tera(row['guessed_flops_s'])})",
            "us a step (guess)": f"{1e6 * row['step_s']:.3g} ({1e6 * row['guessed_step_s']:.3g})",
        }
        for row in results.rows("delta")
        if "way" in row
    ]


def _steps(results: Results) -> list[Row]:
    rows = []
    for row in results.rows("step"):
        if "step_s" not in row:
            continue
        predicted, compiler = row["predicted"], row["compiler"]
        middle_s, again_s = sorted(row["step_s"])[len(row["step_s"]) // 2], measured_prediction_s(results, row)
        rows.append(
            {
                "step": row["what"],
                "tokens": row["length"],
                "chunks": row["num_chunks"],
                "s": _seconds(row["step_s"]),
                "tokens/s": f"{row['tokens_per_s']:.0f}",
                "MFU": f"{row['mfu']:.1%}",
                "predicted / measured s": f"{predicted['step_s'] / middle_s:.2f}"
                + (f", with measured figures {again_s / middle_s:.2f}" if again_s else ""),
                "HBM peak, compiler, predicted": ", ".join(
                    _size(x) or "-" for x in (row["hbm_peak_bytes"], compiler.get("hbm_bytes"), predicted["hbm_bytes"])
                ),
                "host peak of the process, compiler, predicted": ", ".join(
                    _size(x) or "-"
                    for x in (row["host_peak_bytes"], compiler.get("host_bytes"), predicted["host_bytes"])
                ),
            }
        )
    return rows


def _longest(results: Results) -> list[Row]:
    return [
        {
            "who": "this project" if row["case"].startswith("step") else "plain JAX",
            "tokens": row["length"],
            "fits": "yes" if row["fits"] else "no",
            "HBM": _size(row["compiler"]["hbm_bytes"]),
            "host": _size(row["compiler"]["host_bytes"]),
        }
        for part in ("step", "peer")
        for row in results.rows(part)
        if "fits" in row
    ]


def _peers(results: Results) -> list[Row]:
    ours = {
        (row["num_layers"], row["length"]): row["tokens_per_s"]
        for row in results.rows("step")
        if row.get("stash") == "planned" and "tokens_per_s" in row
    }
    rows = []
    for row in results.rows("peer"):
        if "fits" in row or "status" not in row:
            continue
        speed, ratio = row.get("tokens_per_s"), ours.get((row["num_layers"], row["length"]))
        rows.append(
            {
                "peer": row["what"],
                "tokens": row["length"],
                "result": row["status"] + (f": {row['reason']}" if row.get("reason") else ""),
                "s": _optional(row.get("step_s"), _seconds),
                "tokens/s": _optional(speed, lambda value: f"{value:.0f}"),
                "MFU": _optional(row.get("mfu"), lambda value: f"{value:.1%}"),
                "HBM peak": _size(row.get("hbm_peak_bytes")),
                "ours / peer's tokens/s": f"{ratio / speed:.2f}" if ratio and speed else "",
            }
        )
    return rows


def _overlap(results: Results) -> list[Row]:
    rows = []
    for row in results.rows("overlap"):
        if "traced_s" not in row:
            continue
        longest = "; ".join(f"{item['name']} {item['seconds']:.3g} s" for item in row["longest"][:5])
        rows.append(
            {
                "step": f"{row['what']}, {row['length']} tokens",
                "s": _optional(row.get("untraced_s"), lambda value: f"{value:.4g}"),
                "traced s": _optional(row["traced_s"], lambda value: f"{value:.4g}"),
                "host copies s": f"{row['copies_s']:.4g}",
                "of that beside a kernel": _optional(row["copies_beside_kernels"], lambda value: f"{value:.1%}"),
                "no kernel, copy running s": f"{row['idle_beside_copies_s']:.3g}",
                "no kernel, nothing running s": f"{row['idle_alone_s']:.3g}",
                "longest": longest,
                "note": row.get("note", ""),
            }
        )
    return rows


def _flex(results: Results) -> list[Row]:
    return [
        {
            "case": f"{row['case']}: {row['what']}",
            "exact": "yes" if row["ok"] else "NO",
            "largest error": f"{row['times_dense']:.2f} of dense bfloat16's, in {row['worst']}",
            "s": _seconds(row["step_s"]),
            "tokens/s": f"{row['tokens_per_s']:.0f}",
        }
        for row in results.rows("flex")
        if "ok" in row
    ]


def _missing(results: Results) -> list[Row]:
    found = [outcome for outcome in results.outcomes.values() if outcome.status != DONE]
    return [{"case": o.key, "status": o.status, "reason": o.reason.replace("|", "/")} for o in found]


SECTIONS: Sections = (
    ("Aims", aim_rows),
    ("What is here", _system),
    ("Loops that wait for host copies", _probe),
    ("Pinned host memory", _pool),
    ("Compiled, not run", _compiled),
    ("Ceilings", _health),
    ("Comparisons", _exact),
    ("Attention", _attention),
    ("The gated delta rule", _delta),
    ("Train steps", _steps),
    ("Longest sequence by the compiler", _longest),
    ("Peers", _peers),
    ("Overlap of host copies with kernels", _overlap),
    ("Flexible teams", _flex),
    ("Not measured", _missing),
)
