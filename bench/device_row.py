"""The measured row of the devices' table: what one GPU reached, made from its results and stored in the package.

python -m bench.device_row writes sppo_jax/hardware/h100.json from bench/results/gpu_h100.json.

Two shares are fits on the trace of a step of Llama-3.2-1B at 128K tokens. The results have the longest kernels of this
trace alone, and the sum of the others. So the shares cannot be made from the results: they are typed here, and the row
has beside them the seconds between which each lies. tests/test_search_evaluate.py holds them there.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from sppo_jax.files.whole import write_whole
from sppo_jax.hardware.device import LONG_HEAD_DIM

SOURCE = Path(__file__).parent / "results" / "gpu_h100.json"
STORED = Path(__file__).parents[1] / "sppo_jax" / "hardware" / "h100.json"
# Products by the peak, and the rest by the memory's rate: of the whole trace these took 1.60 s and 0.91 s.
_FITTED = {"matmul_efficiency": 0.73, "elementwise_efficiency": 0.57}
_PARTS = {"nvjet": "products", "gemm": "products", "cudnn": "attention", "D2H": "copies", "H2D": "copies"}
_LONG, _BLOCK, _SHORT_HEAD_DIM = 32768, 8192, 64


def row_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row: rates of attention with heads of 128, in whole TFLOP/s.

    Args:
        results: of bench/gpu.py.
    """
    calls = [row for case in results["cases"] if case["key"].startswith("attention/") for row in case["rows"]]
    long, triangle = _calls(calls, "rectangle", _LONG), _calls(calls, "triangle", _BLOCK)
    backward = mean([one["flops_s"] for one in (*long, *triangle) if one["way"] == "backward"])
    blocks = [one["flops_s"] for one in _calls(calls, "rectangle", _BLOCK) if one["way"] == "backward"]
    return {
        "source": f"bench/results/{SOURCE.name}",
        "date": results["date"],
        "device": results["machine"]["description"],
        "driver": results["machine"]["driver"],
        "cudnn": results["versions"]["nvidia-cudnn-cu13"],
        "forward_flops_s": _whole(next(one["flops_s"] for one in long if one["way"] == "forward")),
        "backward_flops_s": _whole(backward),
        "backward_queries": _BLOCK,
        "backward_in_blocks_flops_s": _whole(mean(blocks)),
        "attention_fixed": _fixed(calls),
        **_FITTED,
        "fitted": _fitted(results),
    }


def _fitted(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns from which measurement the fitted shares are, and the seconds of it between which their parts lie."""
    key, seconds, unlisted = traced(results)
    parts = {
        part: [round(one, 2) for one in (seconds[part], seconds[part] + unlisted)] for part in ("products", "rest")
    }
    about = (
        f"{' and '.join(_FITTED)} are typed in bench/device_row.py: fits on this trace, of which the results list the "
    )
    return {
        "case": key,
        "about": f"{about}longest kernels; the shorter ones are products or the rest",
        "seconds": parts,
    }


def traced(results: Mapping[str, Any]) -> tuple[str, dict[str, float], float]:
    """Returns the case of the traced step, the seconds of its listed kernels by part, and those of the shorter ones.

    Args:
        results: of bench/gpu.py.
    """
    cases = [case for case in results["cases"] if case["key"].startswith("overlap/")]
    ((key, trace),) = [(case["key"], row) for case in cases for row in case["rows"]]
    seconds = {"products": 0.0, "attention": 0.0, "copies": 0.0, "rest": 0.0}
    for kernel in trace["longest"]:
        part = next((part for word, part in _PARTS.items() if word in kernel["name"]), "rest")
        seconds[part] += kernel["seconds"]
    return key, seconds, trace["kernels_s"] - sum(seconds.values()) + seconds["copies"]


def _calls(calls: Sequence[Mapping[str, Any]], form: str, queries: int) -> list[Mapping[str, Any]]:
    """Returns the calls of a form with heads of 128."""
    short = f"heads of {_SHORT_HEAD_DIM}"
    return [one for one in calls if form in one["what"] and one["queries"] == queries and short not in one["what"]]


def _fixed(calls: Sequence[Mapping[str, Any]]) -> float:
    """Returns the share of the seconds with heads of 128 that shorter heads take as well, in two calls side by side."""
    both = [one for one in calls if "rectangle" in one["what"] and "heads of" in one["what"]]
    seconds = [sum(one["seconds"] for one in both if ("128" in one["what"]) == is_long) for is_long in (False, True)]
    size = _SHORT_HEAD_DIM / LONG_HEAD_DIM
    return round((seconds[0] / seconds[1] - size) / (1 - size), 2)


def _whole(flops_s: float) -> float:
    return round(flops_s / 1e12) * 1e12


def text_of(results: Mapping[str, Any]) -> str:
    """Returns the stored file."""
    return json.dumps(row_of(results), indent=1) + "\n"


if __name__ == "__main__":
    write_whole(STORED, text_of(json.loads(SOURCE.read_text(encoding="utf-8"))))
