"""The plans on which the planner's bytes are compared with the compiler's; see fit.py."""

from dataclasses import dataclass, field
from typing import Any

K = 1024


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan to compile.

    Args:
        cluster: to compile for.
        model: a preset.
        mesh: pipe and seq, and data if several.
        length: tokens of a sequence.
        chunks: their number; "auto" where the planner may choose everything.
        stash: places of inputs, attention, rest by first letter (keep, host, recompute).
        more: other settings by group.
        calibrated: whether the planner's constants were counted in this case's program.
    """

    cluster: str
    model: str
    mesh: tuple[int, ...] = ()
    length: int
    chunks: int | str = "auto"
    stash: str = ""
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    calibrated: bool = False

    @property
    def unequal(self) -> bool:
        """Whether chunks of several lengths were asked for."""
        return self.more.get("sequence", {}).get("balance") == "flops"

    @property
    def name(self) -> str:
        """The words that tell the case from others."""
        parts = [self.model, self.cluster, "x".join(map(str, self.mesh)) or "auto", f"{self.length // K}K", self.stash]
        settings = [f"{key}={value}" for group in self.more.values() for key, value in group.items()]
        return " ".join([part for part in parts if part] + settings)

    def config(self) -> dict[str, Any]:
        """Return the case as the settings of a config."""
        settings: dict[str, Any] = {
            "model": {"preset": self.model},
            "sequence": {"length": self.length, "chunks": self.chunks},
            "schedule": {"interleave": 1},  # as the stored plans were compiled
            "train": {"steps": 10},
        }
        if self.mesh:
            settings["mesh"] = dict(zip(("pipe", "seq", "data"), (*self.mesh, 1)[:3], strict=True))
        if self.stash:
            places = {"k": "keep", "h": "host", "r": "recompute"}
            names = ("inputs", "attention", "rest")
            settings["stash"] = {name: places[letter] for name, letter in zip(names, self.stash, strict=True)}
            settings["stash"] |= {"alpha": 1.0, "kv_grad_dtype": "float32"}
        for group, values in self.more.items():
            settings[group] = {**settings.get(group, {}), **values}
        return settings

    def config_of_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the settings whose prediction is comparable with a stored row's compiled bytes.

        Rows that do not name cuDNN's workspace were compiled without it: the plain kernel has none.
        """
        settings = self.config()
        if "workspace_bytes" not in row:
            settings["model"]["kernel"] = "blockwise"
        return settings


_HALF = {"stash": {"kv_grad_dtype": "bfloat16"}}
_EQUAL = {"sequence": {"balance": "equal"}}
_UNEQUAL = {"sequence": {"balance": "flops"}}
_BREADTH_FIRST = {"schedule": {"name": "breadth-first", "interleave": "auto"}}
_HOST_OPTIMIZER = {"optimizer": {"place": "host"}, "schedule": {"interleave": "auto"}}
_ROOM = {**_HOST_OPTIMIZER, "stash": {"waiting": "host"}}
_AWAY = {**_BREADTH_FIRST, "stash": {"waiting": "host"}}
# One chunk a sequence, whose backward makes K and V again.
_ONLY = _BREADTH_FIRST | {"sequence": {"chunks": 1}, "stash": {"kv": "rebuild"}}
# The same with resident weights, in so many groups of layers; the last stash stays where a group has more than two.
_LONE = {
    groups: {
        "stash": {"kv": "rebuild"},
        "mesh": {"weights": "resident"},
        "schedule": {"name": "breadth-first", "interleave": groups},
    }
    for groups in (4, 8, 16, 32)
}
_RESIDENT = _BREADTH_FIRST | {"mesh": {"weights": "resident"}}
_TWO = {"sequence": {"per_pipeline": 2}, "schedule": {"name": "seq1f1b"}}
_WAVE = {"sequence": {"per_pipeline": 4}, "schedule": {"name": "sppo", "wave": 4}}
_COST = {"sequence": {"balance": "cost"}, "schedule": {"interleave": 5}}
_FOUR, _FIVE = {"schedule": {"interleave": 4}}, {"schedule": {"interleave": 5}}
_INTERLEAVED = {"sequence": {"per_pipeline": 2}, "schedule": {"name": "interleaved-seq1f1b", "interleave": 2}}

CASES = (
    # The numbers of planner/fitted.py were counted in these programs.
    Case(
        cluster="a100-80g:16x8",
        model="gpt-7b",
        mesh=(8, 16),
        length=4096 * K,
        chunks=128,
        stash="hhr",
        more=_HALF,
        calibrated=True,
    ),
    Case(
        cluster="a100-80g:1x1", model="qwen2.5-0.5b", mesh=(1, 1), length=64 * K, chunks=8, stash="hhr", calibrated=True
    ),
    Case(cluster="h100:1x1", model="llama3.2-1b", mesh=(1, 1), length=256 * K, chunks=32, stash="hhr", calibrated=True),
    Case(
        cluster="a100-80g:1x4",
        model="llama3.2-1b",
        mesh=(4, 1),
        length=128 * K,
        chunks=16,
        stash="kkr",
        calibrated=True,
    ),
    Case(cluster="h100:1x2", model="qwen3-0.6b", mesh=(1, 2), length=128 * K, chunks=16, stash="hhr", calibrated=True),
    Case(cluster="h200:1x1", model="qwen3-0.6b", mesh=(1, 1), length=64 * K, chunks=16, stash="kkr", calibrated=True),
    Case(
        cluster="a100-80g:1x8",
        model="llama3.2-1b",
        mesh=(2, 2, 2),
        length=128 * K,
        chunks=16,
        stash="hhr",
        more=_TWO,
        calibrated=True,
    ),
    Case(cluster="h100:4x8", model="llama3-8b", mesh=(4, 8), length=1024 * K, chunks=64, stash="hhr", calibrated=True),
    Case(cluster="h200:1x2", model="llama3.2-1b", mesh=(1, 2), length=128 * K, chunks=16, stash="hhh", calibrated=True),
    Case(
        cluster="v5e:2x2",
        model="qwen2.5-0.5b",
        mesh=(2, 2),
        length=32 * K,
        chunks=4,
        stash="hhr",
        more=_EQUAL,
        calibrated=True,
    ),
    Case(
        cluster="v6e:2x4",
        model="qwen3-0.6b",
        mesh=(2, 4),
        length=128 * K,
        chunks=8,
        stash="kkr",
        more=_EQUAL,
        calibrated=True,
    ),
    Case(cluster="v5p:2x2x4", model="llama3-8b", mesh=(4, 4), length=512 * K, chunks=32, stash="hhr", calibrated=True),
    # These cases were held out.
    Case(cluster="a100-80g:16x8", model="gpt-7b", length=4096 * K),
    Case(cluster="a100-80g:8x8", model="gpt-7b", length=4096 * K),
    Case(cluster="h100:1x8", model="llama3-8b", length=1536 * K),
    Case(cluster="h100:1x8", model="llama3-8b", length=2048 * K, more=_RESIDENT, calibrated=True),
    Case(cluster="h100:1x8", model="llama3-8b", length=5120 * K, more=_RESIDENT),
    Case(cluster="a100-80g:2x8", model="gpt-7b", length=4096 * K, more=_RESIDENT),
    Case(cluster="h100:1x8", model="llama3-8b", length=2048 * K, more=_BREADTH_FIRST),
    Case(cluster="h100:1x8", model="llama3-8b", length=5120 * K, more=_BREADTH_FIRST, calibrated=True),
    Case(cluster="h100:1x8", model="llama3-8b", length=7_000_064, more=_BREADTH_FIRST),
    Case(cluster="a100-80g:1x8", model="gpt-7b", length=4096 * K, more=_BREADTH_FIRST),
    Case(cluster="h100:1x8", model="llama3-8b", length=128 * K, more=_BREADTH_FIRST),
    Case(cluster="h100:1x8", model="llama3-8b", length=512 * K, more=_BREADTH_FIRST),
    Case(cluster="h100:1x8", model="llama3-8b", length=1024 * K, more=_BREADTH_FIRST),
    Case(cluster="a100-80g:1x8", model="gpt-7b", length=512 * K, more=_BREADTH_FIRST),
    Case(cluster="a100-80g:8x8", model="gpt-7b", length=4096 * K, more=_BREADTH_FIRST),
    Case(cluster="h100:2x8", model="llama3-8b", mesh=(2, 8), length=5120 * K, more=_BREADTH_FIRST),
    Case(cluster="h100:2x8", model="llama3-8b", mesh=(4, 4), length=5120 * K, more=_BREADTH_FIRST),
    Case(cluster="h100:1x8", model="llama3-8b", length=128 * K, more=_ONLY, calibrated=True),
    Case(cluster="h100:1x8", model="llama3-8b", length=256 * K, more=_ONLY),
    Case(
        cluster="h100:1x8",
        model="llama3-8b",
        mesh=(1, 8),
        length=64 * K,
        chunks=1,
        stash="hhh",
        more=_LONE[4],
        calibrated=True,
    ),
    Case(
        cluster="h100:1x8",
        model="llama3-8b",
        mesh=(1, 8),
        length=64 * K,
        chunks=1,
        stash="hhh",
        more=_LONE[8],
        calibrated=True,
    ),
    Case(cluster="h100:1x8", model="llama3-8b", mesh=(1, 8), length=256 * K, chunks=1, stash="hhh", more=_LONE[16]),
    Case(cluster="h100:1x8", model="llama3-8b", mesh=(1, 8), length=256 * K, chunks=1, stash="hhh", more=_LONE[32]),
    Case(cluster="a100-80g:1x8", model="gpt-7b", length=128 * K, more=_ONLY),
    Case(cluster="a100-80g:1x8", model="gpt-7b", length=256 * K, more=_ONLY, calibrated=True),
    Case(cluster="a100-80g:1x2", model="llama3.2-1b", mesh=(2, 1), length=256 * K, chunks=32, stash="rrr"),
    Case(cluster="h200:1x2", model="llama3.2-1b", mesh=(1, 2), length=64 * K, chunks=8, stash="kkk"),
    Case(cluster="h100:1x8", model="llama3-8b", mesh=(2, 4), length=256 * K, chunks=16, stash="hhr", more=_TWO),
    Case(
        cluster="h100:1x8",
        model="llama3-8b",
        mesh=(1, 8),
        length=256 * K,
        chunks=16,
        stash="hhr",
        more={"sequence": {"kind": "ring"}},
    ),
    Case(
        cluster="h100:2x8",
        model="llama3-8b",
        mesh=(1, 16),
        length=512 * K,
        chunks=32,
        stash="hhr",
        more={"sequence": {"kind": "hybrid", "ulysses": 8}},
    ),
    Case(cluster="h100:2x8", model="llama3-8b", mesh=(4, 4), length=256 * K, chunks=16, stash="hhr", more=_INTERLEAVED),
    Case(cluster="a100-80g:4x8", model="gpt-7b", mesh=(1, 32), length=1024 * K, chunks=64, stash="hhr", more=_HALF),
    Case(
        cluster="a100-80g:4x8",
        model="gpt-7b",
        mesh=(4, 8),
        length=512 * K,
        chunks=32,
        stash="hhr",
        more={"stash": {"alpha": 0.5}},
    ),
    Case(cluster="a100-80g:8x8", model="gpt-13b", mesh=(8, 8), length=512 * K, chunks=32, stash="hhr"),
    Case(cluster="a100-80g:8x8", model="gpt-30b", mesh=(16, 4), length=256 * K, chunks=32, stash="hhr"),
    Case(cluster="a100-80g:16x8", model="gpt-65b", mesh=(16, 8), length=512 * K, chunks=64, stash="hhr"),
    Case(cluster="a100-80g:16x8", model="gpt-65b", mesh=(8, 16), length=512 * K, chunks=32, stash="hhr", more=_HALF),
    Case(cluster="h100:8x8", model="qwen3-32b", mesh=(8, 8), length=512 * K, chunks=32, stash="hhr", more=_HALF),
    Case(cluster="b200:2x8", model="mistral-7b-v0.3", mesh=(2, 8), length=512 * K, chunks=32, stash="hrr"),
    Case(cluster="v5p:4x4x4", model="gpt-13b", mesh=(8, 8), length=256 * K, chunks=16, stash="hhr"),
    # Waves, and groups of one layer; held out as well.
    Case(cluster="a100-80g:8x8", model="llama2-7b", mesh=(8, 8), length=128 * K, chunks=16, stash="hhr", more=_WAVE),
    Case(cluster="a100-80g:8x8", model="gpt-13b", mesh=(8, 8), length=512 * K, chunks=80, stash="hhr", more=_FIVE),
    Case(cluster="h100:8x8", model="llama3-8b", mesh=(8, 8), length=1024 * K, chunks=64, stash="hhr", more=_FOUR),
    Case(cluster="a100-80g:8x8", model="gpt-13b", mesh=(8, 8), length=512 * K, chunks=40, stash="hhr", more=_COST),
    # The optimizer on the host, and what single hosts hold.
    Case(cluster="h100:1x1", model="llama3-8b", length=1024 * K, more=_ROOM, calibrated=True),
    Case(cluster="h100:1x1", model="llama3-8b", length=2560 * K, more=_ROOM, calibrated=True),
    Case(cluster="h200:1x1", model="llama3-8b", length=4096 * K, more=_ROOM, calibrated=True),
    Case(cluster="h100:1x1", model="llama3-8b", length=128 * K, more=_HOST_OPTIMIZER),
    Case(cluster="h100:1x1", model="llama3-8b", length=256 * K, more=_HOST_OPTIMIZER),
    Case(cluster="h100:1x8", model="qwen3-32b", length=2048 * K, more=_HOST_OPTIMIZER, calibrated=True),
    Case(cluster="h100:4x8", model="llama3-70b", length=5120 * K, more=_BREADTH_FIRST),
    Case(cluster="h100:4x8", model="llama3-8b", length=24576 * K, more=_BREADTH_FIRST),
    # Chunks that wait on the host, on several devices.
    Case(cluster="h100:1x8", model="llama3-8b", length=2048 * K, more=_AWAY, calibrated=True),
    Case(cluster="h100:1x8", model="llama3-8b", length=5120 * K, more=_AWAY, calibrated=True),
    Case(cluster="a100-80g:1x8", model="gpt-7b", length=4096 * K, more=_AWAY, calibrated=True),
    # Chunks of several lengths on TPUs; held out as well.
    Case(cluster="v5e:2x2", model="qwen2.5-0.5b", mesh=(2, 2), length=32 * K, chunks=4, stash="hhr", more=_UNEQUAL),
    Case(cluster="v6e:2x4", model="qwen3-0.6b", mesh=(2, 4), length=128 * K, chunks=8, stash="kkr", more=_UNEQUAL),
)
