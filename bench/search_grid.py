"""A grid of searches: the fastest step that each finds and the seconds it takes, beside those of a stored run.

Run: python -m bench.search_grid --out new.json [--against old.json] [--only TEXT] [--documents KIND]

Steps are the planner's simulation. Seconds of a search are those of one processor core (`time.process_time`), so that
other work on the machine changes them little.
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from bench.documents import KINDS, drawn
from sppo_jax.config import config_from_dict
from sppo_jax.hardware import parse_cluster
from sppo_jax.search.search import search

K = 1024
SLOW = (3.1e9, 12.5e9)  # bytes a second of a GPU between hosts


class Setting(NamedTuple):
    """One search: a model, devices, tokens, sequences of a step, and the network where it is not the datasheet's."""

    model: str
    cluster: str
    length: int
    sequences: int = 0
    network: float = 0.0

    @property
    def name(self) -> str:
        """The setting in a line."""
        network = f" {self.network / 1e9:g} GB/s" if self.network else ""
        return f"{self.model} {self.cluster} {self.length:,} x {max(1, self.sequences)}{network}"

    def config(self) -> Any:
        """Returns the config of the setting."""
        tree: dict[str, Any] = {
            "model": {"preset": self.model},
            "train": {"steps": 1},
            "sequence": {"length": self.length} | ({"per_step": self.sequences} if self.sequences else {}),
        }
        if self.network:
            tree["hardware"] = {"network_bytes_s": self.network}
        return config_from_dict(tree)


def settings() -> list[Setting]:
    """Returns the grid: 28 settings at the datasheet's network, 35 at slow ones, and ten at the edges."""
    full = [Setting("llama3-8b", "h100:1x8", n * K, s) for n in (128, 512, 1024, 2048) for s in (0, 8)]
    full += [Setting("llama2-7b", "a100-80g:1x8", n * K, s) for n in (128, 512, 1024) for s in (0, 16)]
    full += [Setting("gpt-13b", "a100-80g:4x8", n * K, s) for n in (128, 512, 2048) for s in (0, 8)]
    full += [Setting("llama3-70b", "h100:8x8", n * K, s) for n in (128, 512) for s in (0, 16)]
    full += [Setting("qwen3-32b", "h100:2x8", n * K, s) for n in (128, 1024) for s in (0, 8)]
    slow = [Setting("llama3-8b", "h100:4x8", n * K, s, w) for n in (128, 512, 1024) for s in (0, 16) for w in SLOW]
    slow += [Setting("gpt-13b", "a100-80g:8x8", n * K, s, w) for n in (128, 512, 2048) for s in (0, 16) for w in SLOW]
    slow += [Setting("llama3-70b", "h100:8x8", 128 * K, s, w) for s in (0, 16) for w in SLOW]
    slow += [Setting("llama2-7b", "a100-80g:2x8", 512 * K, 8, w) for w in SLOW]
    slow += [Setting("llama2-7b", "a100-80g:8x8", 128 * K, 8, w) for w in SLOW]
    slow += [Setting("qwen3-32b", "h100:4x8", n * K, 0, 12.5e9) for n in (512, 1000, 2048)]
    edges = [
        Setting("llama3-8b", "h100:1x1", 128 * K),
        Setting("llama3-8b", "h100:1x1", 1024 * K),
        Setting("llama3-70b", "h100:1x8", 128 * K),
        Setting("llama3-8b", "h100:1x8", 7_340_032),
        Setting("qwen3-8b", "h100:1x8", 6_815_744),
        Setting("llama3-8b", "h200:4x8", 32 * K * K),
        Setting("llama3-8b", "v5p:2x2x4", 512 * K),
        Setting("llama3-8b", "v5e:8x8", 1024 * K, 4),
        Setting("gpt-7b", "a100-80g:16x8", 4096 * K),
        Setting("llama2-7b", "a100-80g:8x8", 100_000 // 64 * 64, 12),
    ]
    return full + slow + edges


def run(setting: Setting, kind: str | None = None) -> dict[str, Any]:
    """Returns what the search of a setting finds for documents of a kind, in plain numbers."""
    config = setting.config()
    documents = drawn(config.model, setting.length, KINDS[kind]) if kind else None
    start_s = time.process_time()
    try:
        found = search(config, parse_cluster(setting.cluster), documents)
    except ValueError as error:
        return {"error": str(error), "search_s": time.process_time() - start_s}
    plan, stash = found.plan, found.plan.stash
    return {
        "fits": found.fits,
        "fastest_s": found.fastest_s,
        "step_s": plan.predicted.step_s,
        "search_s": time.process_time() - start_s,
        "considered": found.num_considered,
        "plan": f"{plan.schedule.name}/{plan.schedule.interleave} d{plan.mesh.data} p{plan.mesh.pipe} "
        f"s{plan.mesh.seq} "
        f"c{len(plan.chunk_lengths)} w{plan.schedule.wave} {stash.inputs}/{stash.attention}/{stash.rest} "
        f"kv {stash.kv} {plan.weights} {plan.optimizer} {stash.waiting} {stash.kv_grad_dtype}",
    }


def main() -> None:
    """Runs the grid, prints a line a setting, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument(
        "--documents", choices=KINDS, help="kind of documents; full ones that are not counted by default"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    stored = json.loads(given.against.read_text()) if given.against else {}
    results: dict[str, dict[str, Any]] = {}
    for setting in settings():
        if given.only not in setting.name:
            continue
        results[setting.name] = one = run(setting, given.documents)
        before = stored.get(setting.name, {})
        ratio = one.get("fastest_s", 0) / before["fastest_s"] if before.get("fastest_s") else 0.0
        took = f"{one['search_s']:.2f} s" + (f" (was {before['search_s']:.2f})" if before else "")
        print(f"{setting.name}: {one.get('fastest_s', 0):.3f} s x{ratio:.4f}, search {took}; {one.get('plan', one)}")
        if before and one.get("plan") != before.get("plan"):
            print(f"    before: {before.get('fastest_s', 0):.3f} s; {before.get('plan')}")
        given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
