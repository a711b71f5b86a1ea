"""The groups of settings of a run, one frozen dataclass each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from sppo_jax.config.data import DataConfig
from sppo_jax.config.group import ConfigError, Group
from sppo_jax.config.model import ModelConfig

Place = Literal["auto", "keep", "host", "recompute"]
# Steps, seeds and positions are int32 on the devices.
_INT32 = 2**31 - 1
_MOST_SIMULATED = 1024


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Group):
    """Number of devices along each mesh axis; the planner shares out over "auto" axes what the others leave."""

    group: ClassVar[str] = "mesh"
    data: Literal["auto"] | int = "auto"
    pipe: Literal["auto"] | int = "auto"
    seq: Literal["auto"] | int = "auto"

    def _check(self) -> None:
        self._at_least(1, "data", "pipe", "seq")

    @property
    def pinned(self) -> dict[str, int]:
        """The axes that have a given size, outermost first."""
        axes = {"data": self.data, "pipe": self.pipe, "seq": self.seq}
        return {name: size for name, size in axes.items() if isinstance(size, int)}


@dataclass(frozen=True, kw_only=True)
class SequenceConfig(Group):
    """Length of a sequence in tokens, its chunks, and how a chunk is spread over the `seq` axis.

    Args:
        chunks: "auto", a count, or a list of lengths in tokens.
        balance: chunks of a count have equal lengths, or equal FLOPs; "auto": whichever is faster.
        ulysses: the hybrid kind's inner factor; 0: chosen by the planner.
        ring_pass: what travels on a ring: keys and values, queries, or whichever is fewer bytes in each tick.
        per_pipeline: sequences a pipeline takes in one step.
        per_step: sequences of one step over all pipelines, shared out by the planner where `mesh.data` is auto;
            0: `mesh.data * sequence.per_pipeline`, with one pipeline where `mesh.data` is auto.
    """

    group: ClassVar[str] = "sequence"
    length: int
    chunks: Literal["auto"] | int | tuple[int, ...] = "auto"
    balance: Literal["auto", "equal", "flops"] = "auto"
    kind: Literal["auto", "ulysses", "ring", "hybrid"] = "auto"
    ulysses: int = 0
    ring_pass: Literal["auto", "kv", "q"] = "auto"
    per_pipeline: int = 1
    per_step: int = 0

    def _check(self) -> None:
        self._at_least(1, "length", "per_pipeline")
        self._at_most(_INT32, "length", "per_pipeline", "per_step")
        self._at_least(0, "ulysses", "per_step")
        if self.per_step % self.per_pipeline:
            raise ConfigError(
                f"sequence.per_step must be a multiple of sequence.per_pipeline = {self.per_pipeline}, "
                f"got {self.per_step}; change one of them"
            )
        lengths = self.chunks if isinstance(self.chunks, tuple) else ()
        if self.chunks == () or (isinstance(self.chunks, int) and self.chunks < 1) or any(c < 1 for c in lengths):
            got = list(self.chunks) if isinstance(self.chunks, tuple) else self.chunks
            raise ConfigError(f"sequence.chunks must be auto, a count or lengths of at least 1, got {got}; change it")
        if lengths and sum(lengths) != self.length:
            raise ConfigError(
                f"sequence.chunks must add up to sequence.length = {self.length}, got {sum(lengths)}; change a chunk"
            )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Group):
    """Order of the units.

    Args:
        name: the schedule's name.
        interleave: layer groups that a device holds; "auto": chosen by the planner.
        table: a CSV file with the schedule, for the name "table".
    """

    group: ClassVar[str] = "schedule"
    name: Literal["auto", "gpipe", "1f1b", "sppo", "seq1f1b", "interleaved-1f1b", "interleaved-seq1f1b", "table"] = (
        "auto"
    )
    interleave: Literal["auto"] | int = 1
    table: str | None = None

    def _check(self) -> None:
        self._at_least(1, "interleave")
        if (self.name == "table") != (self.table is not None):
            raise ConfigError(
                f"schedule.table (a CSV file) goes with schedule.name=table and with no other, "
                f"got name={self.name} and table={self.table}; give both or neither"
            )


@dataclass(frozen=True, kw_only=True)
class StashConfig(Group):
    """Where each kind of activation waits for the backward pass; alpha is the share of tokens that goes to the host."""

    group: ClassVar[str] = "stash"
    inputs: Place = "auto"
    attention: Place = "auto"
    rest: Place = "auto"
    alpha: Literal["auto"] | float | tuple[float, ...] = "auto"
    kv_grad_dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    def _check(self) -> None:
        values = self.alpha if isinstance(self.alpha, tuple) else (self.alpha,)
        if any(not isinstance(value, str) and not 0 <= value <= 1 for value in values):
            raise ConfigError(f"stash.alpha must be auto or in [0, 1], got {self.alpha}; it is a share of tokens")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Group):
    """AdamW with linear warm-up and a cosine decay to `lr * min_lr_ratio`; gradients are clipped by global norm."""

    group: ClassVar[str] = "optimizer"
    lr: float = 3e-4
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0

    def _check(self) -> None:
        self._at_least(0, "lr", "warmup_steps", "min_lr_ratio", "weight_decay", "eps")
        # Steps are taken in float32.
        self._at_most(1e30, "lr", "min_lr_ratio", "weight_decay", "eps", "clip_norm")
        self._fraction("b1", "b2")
        if self.clip_norm <= 0:
            raise ConfigError(f"optimizer.clip_norm must be above 0, got {self.clip_norm}; a large one never clips")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Group):
    """Length of the run and how often it reports.

    Args:
        devices: "auto", or "cpu:N" for N devices simulated on the CPU.
        eval_every: steps between validations; 0: only at the end.
        eval_sequences: validation sequences, rounded up to whole batches.
        max_nonfinite: steps in a row whose loss or gradient is not finite, and which are skipped, before the run stops.
        stall_s: seconds without progress after which the run names the process that stopped, and ends; 0: never.
    """

    group: ClassVar[str] = "train"
    steps: int
    seed: int = 0
    devices: str = "auto"
    log_every: int = 1
    eval_every: int = 0
    eval_sequences: int = 8
    max_nonfinite: int = 10
    stall_s: float = 1800.0

    def _check(self) -> None:
        self._at_least(1, "steps", "log_every", "max_nonfinite")
        self._at_least(0, "seed", "eval_every", "eval_sequences", "stall_s")
        self._at_most(_INT32, "steps", "seed", "eval_sequences")
        if 0 < self.stall_s < 1:
            raise ConfigError(f"train.stall_s must be 0 or at least 1, got {self.stall_s}; no step is that quick")
        if self.devices != "auto" and not self.num_simulated_devices:
            raise ConfigError(f"train.devices must be auto or cpu:N, got {self.devices}; write e.g. cpu:8")
        if self.num_simulated_devices > _MOST_SIMULATED:
            raise ConfigError(
                f"train.devices must be at most cpu:{_MOST_SIMULATED}, got {self.devices}; plan for more with "
                "hardware.cluster"
            )

    @property
    def num_simulated_devices(self) -> int:
        """Number of devices to simulate on the CPU, 0 for the real ones."""
        kind, _, count = self.devices.partition(":")
        return int(count) if kind == "cpu" and count.isdecimal() else 0


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Group):
    """When the run is saved, where, and what is kept.

    Args:
        dir: where checkpoints go; None: `checkpoints` in the run directory.
        every_s: seconds between saves; 0: not by the clock.
        every_steps: steps between saves; 0: not by steps.
        keep_last: newest checkpoints to keep.
        keep_every: steps whose multiples are kept for good; 0: none.
        keep_best: checkpoints of the lowest validation loss to keep, saved right after a validation; 0: none.
        final: save the end of the run.
    """

    group: ClassVar[str] = "checkpoint"
    dir: str | None = None
    every_s: float = 900.0
    every_steps: int = 0
    keep_last: int = 2
    keep_every: int = 0
    keep_best: int = 0
    final: bool = True

    def _check(self) -> None:
        self._at_least(0, "every_s", "every_steps", "keep_every", "keep_best")
        self._at_least(1, "keep_last")


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Group):
    """What is reported besides metrics.jsonl and report.html.

    Args:
        peak_flops: FLOP/s of one device, of which the share that is used (MFU) is reported; "auto": the datasheet's.
        tensorboard: whether to write TensorBoard events into the run directory too.
        wandb: project at Weights & Biases to report to; null: none. WANDB_MODE=offline keeps it on this machine.
    """

    group: ClassVar[str] = "metrics"
    peak_flops: Literal["auto"] | float = "auto"
    tensorboard: bool = False
    wandb: str | None = None

    def _check(self) -> None:
        self._at_least(1, "peak_flops")
        wrong = sorted(set(self.wandb or "") & set("/\\#?%:"))
        if self.wandb is not None and (wrong or not 1 <= len(self.wandb.strip()) <= 128):
            raise ConfigError(
                f"metrics.wandb must be a project's name of 1 to 128 characters without any of / \\ # ? % :, "
                f"got {self.wandb!r}; choose such a name, or null for none"
            )


@dataclass(frozen=True, kw_only=True)
class HardwareConfig(Group):
    """What the planner may assume of the machines; "auto" takes the figure of the device found.

    Args:
        cluster: the devices to plan for, e.g. a100-80g:16x8; None: those of this machine.
        hbm_bytes: memory of a device.
        host_bytes: memory of a host, shared by its devices.
        host_link_bytes_s: bytes a second between a device and its host, one way.
        link_bytes_s: bytes a second between devices of a host, one way.
        network_bytes_s: bytes a second between devices of different hosts, one way.
        matmul_flops_s: FLOP/s that a device reaches.
        measured: a file of `sppo profile`, whose figures take the place of the datasheet's; None: the datasheet.
    """

    group: ClassVar[str] = "hardware"
    cluster: str | None = None
    measured: str | None = None
    hbm_bytes: Literal["auto"] | int = "auto"
    host_bytes: Literal["auto"] | int = "auto"
    host_link_bytes_s: Literal["auto"] | float = "auto"
    link_bytes_s: Literal["auto"] | float = "auto"
    network_bytes_s: Literal["auto"] | float = "auto"
    matmul_flops_s: Literal["auto"] | float = "auto"

    def _check(self) -> None:
        self._at_least(1, "hbm_bytes", "host_bytes", "host_link_bytes_s", "link_bytes_s", "network_bytes_s")
        self._at_least(1, "matmul_flops_s")


@dataclass(frozen=True, kw_only=True)
class Config(Group):
    """All settings of a run; `planner` chooses what is "auto": our search, or the rules of the SPPO paper."""

    planner: Literal["search", "paper"] = "search"
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    sequence: SequenceConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    stash: StashConfig = field(default_factory=StashConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def _check(self) -> None:
        self._check_simulated()
        self._check_sequences()
        if 0 < self.model.sliding_window < self.sequence.length:
            raise ConfigError(
                f"model.sliding_window must be at least sequence.length = {self.sequence.length}, or 0 for attention "
                f"over the whole sequence, got {self.model.sliding_window}; set it to 0 to train with that"
            )
        seq = self.mesh.pinned.get("seq", 0)
        if self.sequence.ulysses and seq % self.sequence.ulysses:
            raise ConfigError(
                f"sequence.ulysses must divide mesh.seq = {seq}, got {self.sequence.ulysses}; "
                f"use 0 to let the planner choose"
            )
        if self.optimizer.warmup_steps > self.train.steps:
            raise ConfigError(
                f"optimizer.warmup_steps must be at most train.steps = {self.train.steps}, "
                f"got {self.optimizer.warmup_steps}; lower it"
            )

    def _check_simulated(self) -> None:
        simulated, pinned = self.train.num_simulated_devices, self.mesh.pinned
        needed = math.prod(pinned.values())
        if simulated and (simulated != needed if len(pinned) == 3 else simulated % needed):
            shown = " * ".join(f"mesh.{name}" for name in pinned)
            must = "match" if len(pinned) == 3 else "be a multiple of"
            raise ConfigError(
                f"train.devices must {must} {shown} = {needed}, got {self.train.devices}; "
                f"write cpu:{needed} or change the mesh"
            )

    def _check_sequences(self) -> None:
        data, sequence = self.mesh.pinned.get("data", 1), self.sequence
        if not sequence.per_step:
            return
        if sequence.per_step % data:
            raise ConfigError(
                f"sequence.per_step must be a multiple of mesh.data = {data}, got {sequence.per_step}; change one"
            )
        if "data" in self.mesh.pinned and sequence.per_pipeline not in (1, sequence.per_step // data):
            raise ConfigError(
                f"sequence.per_step must be mesh.data * sequence.per_pipeline = {data * sequence.per_pipeline}, "
                f"got {sequence.per_step}; leave one of them out"
            )

    @property
    def num_sequences(self) -> int:
        """Sequences in one step, over all pipelines."""
        return self.sequence.per_step or self.mesh.pinned.get("data", 1) * self.sequence.per_pipeline
