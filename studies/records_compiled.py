"""Compiled plans at lengths that other systems hold records for, in bench/results/records.md.

    python -m studies.records_compiled --write

The plans and the compiler's bytes come from results/fit.json, which `bench/fit.py` writes; this script compiles
nothing. Tokens per second and MFU are predicted. Theirs were run.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.blocks import print_block
from bench.fit_cases import CASES, Case
from sppo_jax.config import Config, config_from_dict
from sppo_jax.fit.compiled import GRAPHS
from sppo_jax.hardware import Cluster, parse_cluster, pool_bytes, usable_bytes, usable_host_bytes
from sppo_jax.models.counts import flops_per_token
from sppo_jax.plan.parts import StashPlan
from sppo_jax.plan.plan import Plan
from sppo_jax.search.evaluate import memory_of

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "bench" / "results" / "records.md", ROOT / "bench" / "results" / "fit.json"
GIB = 2**30


@dataclass(frozen=True)
class Aim:
    """A published record, and the compiled case that is compared with it.

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
Ours are compiled: XLA:GPU (jax 0.12.0.1) compiled the whole training step ahead of time, without the hardware. Nothing
was run. Theirs were run. All figures of memory are for one device.

* "HBM compiled" includes cuDNN's workspace. Some cases were also compiled with cuBLAS for all matrix products; their
  figure is the larger of the two. "Pool" is the memory that a run gets of the device. "Prediction" is the planner's
  figure relative to the compiled one.
* "Host: optimizer" holds parameters, moments and gradients, if the plan keeps the optimizer on the host.
* "Exposed" is the share of the copied bytes that overlap with no compute. The copies of an optimizer update on the host
  are always exposed; they have a column of their own.
* "Copies outlast compute" is an upper bound: the seconds by which copies outlast the compute that overlaps with them,
  as a share of the predicted step.
* "Loops wait" is a further share of the step, also at most. Loops whose number of iterations is not known in advance
  wait for writes to the host. A second figure is the share with these loops in CUDA graphs, where no loop waits.
* "By kernels" is the share of the copied bytes that kernels move instead of DMA engines.
* Tokens per second and MFU (causal, recomputation not counted) are the planner's predictions.

"""
_COLUMNS = (
    "model",
    "cluster",
    "record of others",
    "tokens",
    "optimizer",
    "HBM compiled",
    "pool",
    "prediction",
    "host: activations",
    "host: optimizer",
    "exposed in ticks",
    "exposed in the update",
    "copies outlast compute",
    "loops wait",
    "by kernels",
    "tokens/s per device",
    "MFU",
)
_HELD_TEXT = """\
The next table splits the predicted memory of one device, in GiB. "Full" is the share of the memory that plans may use.
The planner keeps the attention outputs of the last chunks on the host, for as many chunks as the host has room for. The
last table of this page names the resource that limits a longer sequence.
"""
# Holders of device memory, by column.
_HOLDERS = {
    "HBM: weights, gradients": ("params", "weights", "grads"),
    "K, V, dK, dV": ("kv", "kv_grad"),
    "chunks between groups": ("waiting", "carries", "batch"),
    "stash, copies": ("stash", "copies"),
    "a tick's work": ("work",),
}
_HELD_COLUMNS = (
    "model",
    "cluster",
    "tokens",
    *_HOLDERS,
    "host: layer inputs",
    "host: attention outputs",
    "host: chunks between groups",
    "host: optimizer",
    "HBM full",
    "host full",
)


def report() -> str:
    """Returns the block."""
    rows = {row["name"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]}
    cases = {case.name: case for case in CASES}
    made = [(cases[aim.case], rows[aim.case], aim) for aim in AIMS]
    compiled = [_row(aim, case, row) for case, row, aim in made]
    held = [_held_row(case, row) for case, row, _ in made]
    return _TEXT + "\n".join([*_head(_COLUMNS), *compiled, "", _HELD_TEXT, *_head(_HELD_COLUMNS), *held])


def _head(columns: tuple[str, ...]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _held_row(case: Case, row: dict[str, Any]) -> str:
    config, cluster = config_from_dict(case.config()), parse_cluster(case.cluster)
    plan = Plan.from_dict(row["plan"])
    memory, stash = memory_of(plan, config, cluster), plan.stash
    of_device = [sum(memory.hbm[name] for name in names) for names in _HOLDERS.values()]
    attention = memory.host - _host(plan, config, cluster, replace(stash, attention="recompute", attention_from=0))
    room = memory.host - _host(plan, config, cluster, replace(stash, waiting="keep"))
    rest = memory.host - attention - room - memory.host_optimizer
    shares = memory.hbm_bytes / usable_bytes(cluster), memory.host / usable_host_bytes(cluster)
    sizes = [*of_device, rest, attention, room, memory.host_optimizer]
    cells = [case.model, case.cluster, f"{plan.sequence_length / 1e6:.2f}M"]
    cells += [f"{size / GIB:.1f}" if size else "0" for size in sizes]
    return f"| {' | '.join([*cells, *(f'{share:.0%}' for share in shares)])} |"


def _host(plan: Plan, config: Config, cluster: Cluster, stash: StashPlan) -> int:
    """Returns the bytes of host memory with another stash."""
    return memory_of(replace(plan, stash=stash), config, cluster).host


def _row(aim: Aim, case: Case, row: dict[str, Any]) -> str:
    config, cluster = config_from_dict(case.config_of_row(row)), parse_cluster(case.cluster)
    plan = Plan.from_dict(row["plan"])
    memory, copies = memory_of(plan, config, cluster), row["host_copies"]
    largest = row.get("largest", row["compiler"])["hbm_bytes"]
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
        f"{largest / GIB:.1f} GiB",
        f"{pool_bytes(cluster) / GIB:.1f} GiB",
        f"{memory.hbm_bytes / compiled - 1:+.1%}",
        f"{(memory.host - memory.host_optimizer) / GIB:.0f} GiB",
        f"{memory.host_optimizer / GIB:.0f} GiB",
        f"{(copies['exposed_bytes'] - of_update) / copied:.1%}",
        f"{of_update / copied:.1%}",
        f"{copies['waiting_share']:.1%}",
        _loops(row),
        f"{copies['kernel_bytes'] / copied:.0%}",
        f"{tokens_s:.1f}",
        f"{mfu:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def _loops(row: dict[str, Any]) -> str:
    """Returns the share of a step for which loops wait, and the share with loops in CUDA graphs."""
    shares = [one["host_copies"].get("loops_share") for one in (row, row.get("variants", {}).get(GRAPHS, row))]
    return "" if None in shares else " / ".join(dict.fromkeys(f"{share:.1%}" for share in shares))


def main(arguments: list[str] | None = None) -> int:
    """Prints the block, and writes it if asked to."""
    return print_block(PAGE, "compiled", report, __doc__, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
