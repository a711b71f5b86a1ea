"""Compiled plans at lengths that other systems hold records for, in docs/records.md.

    python benchmarks/records_compiled.py --write

The plans and the compiler's bytes are those of results/fit.json (`benchmarks/fit.py` compiles); this script compiles
nothing. Tokens a second and MFU are predicted. Theirs were run.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocks import print_block
from fit_cases import CASES, Case

from sppo_jax.config import config_from_dict
from sppo_jax.hardware import parse_cluster
from sppo_jax.models.counts import flops_per_token
from sppo_jax.plan.plan import Plan
from sppo_jax.planner.evaluate import memory_of

HERE = Path(__file__).parent
PAGE, RESULTS = HERE.parent / "docs" / "records.md", HERE / "results" / "fit.json"
GIB = 2**30


@dataclass(frozen=True)
class Aim:
    """A published record, and the compiled case beside it.

    Args:
        case: the name of the case.
        theirs: the record in words.
    """

    case: str
    theirs: str


AIMS = (
    Aim("gpt-7b a100-80g:1x8 auto 4096K name=breadth-first interleave=auto", "4M: SPPO 128 GPUs, BurstEngine 64"),
    Aim("llama3-8b h100:1x8 auto 6836K name=breadth-first interleave=auto", "UPipe 5M"),
    Aim("llama3-8b h200:1x1 auto 4096K place=host interleave=auto waiting=host", "ALST 1.2M"),
    Aim("llama3-8b h100:1x1 auto 2560K place=host interleave=auto waiting=host", "ALST 0.5M"),
    Aim("llama3-8b h100:4x8 auto 24576K name=breadth-first interleave=auto", "ALST 15M"),
    Aim("qwen3-32b h100:1x8 auto 2048K place=host interleave=auto", "ALST 1.55M"),
    Aim("llama3-70b h100:4x8 auto 5120K name=breadth-first interleave=auto", "ALST 4M"),
)
_TEXT = """\
Ours are compiled: the whole train step, by XLA:GPU of jax 0.12.0.1 for clusters that were not there. Nothing was run.
Theirs were run. HBM is of one device, of the 79 GiB (H200: 139 GiB) that it has. Host memory is of one device: its
activations, and parameters, moments and gradients where the optimizer waits there. Exposed are copied bytes without
compute beside them; those of an update on the host never have any, and have a column of their own. Late are seconds
by which copies outlast the compute beside them, as a share of the predicted step, at most. Tokens a second and MFU
(causal, no recompute counted) are the planner's predictions.

"""
_COLUMNS = (
    "model",
    "cluster",
    "record of others",
    "tokens",
    "optimizer",
    "HBM compiled",
    "predicted",
    "host: activations",
    "optimizer",
    "exposed in ticks",
    "exposed in the update",
    "late",
    "by kernels",
    "tokens/s a device",
    "MFU",
)


def report() -> str:
    """Returns the block."""
    rows = {row["name"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]}
    cases = {case.name: case for case in CASES}
    made = [_row(aim, cases[aim.case], rows[aim.case]) for aim in AIMS]
    return _TEXT + "\n".join([f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|", *made])


def _row(aim: Aim, case: Case, row: dict[str, Any]) -> str:
    config, cluster = config_from_dict(case.config()), parse_cluster(case.cluster)
    plan = Plan.from_dict(row["plan"])
    memory, copies = memory_of(plan, config, cluster), row["host_copies"]
    tokens_s = plan.sequence_length / plan.mesh.num_devices / plan.predicted.step_s
    mfu = tokens_s * flops_per_token(config.model, plan.sequence_length) / cluster.device.matmul_flops_s
    compiled = row["compiler"]["hbm_bytes"]
    copied, of_update = copies["overlapped_bytes"] + copies["exposed_bytes"], copies.get("optimizer_bytes", 0)
    cells = [
        case.model,
        case.cluster,
        aim.theirs,
        f"{plan.sequence_length / 1e6:.2f}M",
        plan.optimizer,
        f"{compiled / GIB:.1f} GiB",
        f"{memory.hbm_bytes / compiled - 1:+.1%}",
        f"{(memory.host - memory.host_optimizer) / GIB:.0f} GiB",
        f"{memory.host_optimizer / GIB:.0f} GiB",
        f"{(copies['exposed_bytes'] - of_update) / copied:.1%}",
        f"{of_update / copied:.1%}",
        f"{copies['waiting_share']:.1%}",
        f"{copies['kernel_bytes'] / copied:.0%}",
        f"{tokens_s:.1f}",
        f"{mfu:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> int:
    """Prints the block, and writes it if asked to."""
    return print_block(PAGE, "compiled", report, __doc__, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
