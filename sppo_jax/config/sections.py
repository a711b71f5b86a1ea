"""The sections of settings of a run, one frozen dataclass each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from sppo_jax.config.data import DataConfig
from sppo_jax.config.hardware import HardwareConfig
from sppo_jax.config.model import ModelConfig
from sppo_jax.config.section import ConfigError, Section
from sppo_jax.rules import Facts

Place = Literal["auto", "keep", "host", "recompute"]
InputPlace = Literal["auto", "keep", "host", "recompute", "period"]
# AdamW divides by these and by 1 minus these, in float32.
_LEAST_EPS, _MOST_DECAY = 1.2e-38, 0.999999
# Steps, seeds and positions are int32 on the devices.
_INT32 = 2**31 - 1
_MOST_SIMULATED = 1024


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """Number of devices along each axis of the mesh.

    Args:
        data: number of pipelines, each with its own sequences; at least 1, or "auto": 1 where `sequence.per_step` is
            "auto", else chosen by the planner.
        pipe: number of pipeline stages; at least 1, or "auto": chosen by the planner.
        seq: number of devices that share the tokens of a chunk; at least 1, or "auto": chosen by the planner.
        weights: the weights of its stage that a device holds during a step: "resident" is the weights and gradient sums
            of all layers; "gathered" is those of one group of layers at a time, plus a share of the others, and needs
            `schedule.name` "breadth-first", and stages of at least 2 devices or `optimizer.place` "host"; "auto":
            "gathered" where it is possible, unless "resident" fits and makes a step shorter by more than 0.5%.
    """

    section: ClassVar[str] = "mesh"
    data: Literal["auto"] | int = "auto"
    pipe: Literal["auto"] | int = "auto"
    seq: Literal["auto"] | int = "auto"
    weights: Literal["auto", "resident", "gathered"] = "auto"

    def _check(self) -> None:
        self._at_least(1, "data", "pipe", "seq")

    @property
    def pinned(self) -> dict[str, int]:
        """The axes that have a given size, outermost first."""
        axes = {"data": self.data, "pipe": self.pipe, "seq": self.seq}
        return {name: size for name, size in axes.items() if isinstance(size, int)}


@dataclass(frozen=True, kw_only=True)
class SequenceConfig(Section):
    """Length of a sequence, its chunks, how a chunk is spread over the `seq` axis, and sequences per step.

    Args:
        length: tokens of a sequence; 1 to 2147483647.
        chunks: number of chunks of a sequence, at least 1; or a list of chunk lengths in tokens, each at least 1, which
            add up to `sequence.length`; "auto": chosen by the planner.
        balance: whether the chunks have "equal" lengths, equal "flops" in four lengths, or equal "cost" (seconds) in as
            many lengths as chunks; must be "auto" with a list of chunks or a table; "auto": the faster of "equal" and
            "flops", or "cost" where it is faster in the same layout and the devices are not CPUs.
        longest: length of the longest chunk of equal cost, as a multiple of the mean chunk, at least 1; a number
            implies `sequence.balance` "cost", and is refused with another balance, a list of chunks or a table; "auto":
            chosen by the planner from 1.25, 1.5 and 2.
        shapes: at most 6 token counts to which ticks are rounded up, in rising order, each a multiple of `mesh.seq`
            times the tile of a device; the last count must hold the longest chunk; "auto": for chunks of equal cost the
            counts with the least padding, for other chunks the longest chunk of each tick.
        split: how attention is spread over the `seq` axis: "ulysses" exchanges heads, "ring" passes arrays from device
            to device, "hybrid" does both; "auto": chosen by the planner.
        ulysses: devices among which Ulysses exchanges attention heads; at least 1, a divisor of
            `mesh.seq` where `mesh.seq` is a number; "auto": chosen by the planner.
        ring_pass: arrays that travel on the ring: keys and values ("kv") or queries ("q"); "auto": those with fewer
            bytes in each tick.
        per_pipeline: sequences of one pipeline in one step; 1 to 2147483647.
        per_step: sequences of all pipelines in one step; 1 to 2147483647, a multiple of `sequence.per_pipeline` and of
            `mesh.data`, and equal to their product where `mesh.data` is a number and `sequence.per_pipeline` is above
            1; "auto": `mesh.data * sequence.per_pipeline`.
        groups: devices that share a document: all of the `seq` axis ("static"), or as many as the document needs
            ("flex", where `mesh.seq` is a power of two of at least 2); "auto": flex where `sppo train` predicts a
            shorter step for the documents of the run, else static.
        plan_for: documents whose step the planner makes short: those of `data.source` where their lengths are known
            ("documents"), or "full" ones, each as long as a sequence.
    """

    section: ClassVar[str] = "sequence"
    length: int
    chunks: Literal["auto"] | int | tuple[int, ...] = "auto"
    balance: Literal["auto", "equal", "flops", "cost"] = "auto"
    longest: Literal["auto"] | float = "auto"
    shapes: Literal["auto"] | tuple[int, ...] = "auto"
    split: Literal["auto", "ulysses", "ring", "hybrid"] = "auto"
    ulysses: Literal["auto"] | int = "auto"
    ring_pass: Literal["auto", "kv", "q"] = "auto"
    per_pipeline: int = 1
    per_step: Literal["auto"] | int = "auto"
    groups: Literal["auto", "static", "flex"] = "static"
    plan_for: Literal["documents", "full"] = "documents"

    def _check(self) -> None:
        self._at_least(1, "length", "per_pipeline", "ulysses", "per_step")
        self._at_most(_INT32, "length", "per_pipeline", "per_step")
        self._check_lengths()
        if self.given_per_step is not None and self.given_per_step % self.per_pipeline:
            raise ConfigError(
                f"sequence.per_step must be a multiple of sequence.per_pipeline = {self.per_pipeline}, "
                f"got {self.per_step}; change one of the two"
            )
        lengths = self.chunks if isinstance(self.chunks, tuple) else ()
        if self.chunks == () or (isinstance(self.chunks, int) and self.chunks < 1) or any(c < 1 for c in lengths):
            got = list(self.chunks) if isinstance(self.chunks, tuple) else self.chunks
            raise ConfigError(f"sequence.chunks must be auto, a count or lengths of at least 1, got {got}; change it")
        self._hold(Facts(length=self.length, chunks=lengths or None))

    @property
    def given_ulysses(self) -> int | None:
        """The devices among which heads are exchanged, where a number is given."""
        return self.ulysses if isinstance(self.ulysses, int) else None

    @property
    def given_per_step(self) -> int | None:
        """The sequences of a step, where a number is given."""
        return self.per_step if isinstance(self.per_step, int) else None

    @property
    def asked_balance(self) -> str:
        """How chunks are asked to share the work: a longest chunk of equal cost asks for chunks of equal cost."""
        return "cost" if self.longest != "auto" else self.balance

    def _check_lengths(self) -> None:
        if self.balance != "auto" and isinstance(self.chunks, tuple):
            raise ConfigError(
                "sequence.balance must be auto where sequence.chunks is a list of lengths, got "
                f"{self.balance}; set sequence.balance=auto, or sequence.chunks={len(self.chunks)}"
            )
        if self.longest != "auto" and self.longest < 1:
            raise ConfigError(
                f"sequence.longest must be at least 1 (the mean chunk), got {self.longest:g}; raise it or set auto"
            )
        if self.longest != "auto" and (self.balance in ("equal", "flops") or isinstance(self.chunks, tuple)):
            got = "a list of sequence.chunks" if isinstance(self.chunks, tuple) else f"sequence.balance={self.balance}"
            raise ConfigError(
                f"sequence.longest must be auto unless chunks have equal cost, got {self.longest:g} with {got}; set "
                f"sequence.longest=auto, or {'sequence.chunks=auto' if '.chunks' in got else 'sequence.balance=cost'}"
            )
        if self.shapes != "auto":
            self._hold(Facts(shapes=self.shapes))
        if self.shapes == ():
            raise ConfigError("sequence.shapes must be auto or at least one token count, got []; set auto")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """Order of the forward and backward passes of the chunks on each stage.

    Args:
        name: name of the schedule; "table" reads `schedule.table`; "auto": chosen by the planner.
        interleave: layer groups (virtual stages) that a device holds; at least 1, or "auto": chosen by the planner.
        table: path of a CSV file with the schedule, given if and only if `schedule.name` is "table"; null: none.
        wave: sequences of a pipeline that run as one sequence of all their chunks; at least 1, a divisor of the
            sequences of a pipeline; "auto": chosen by the planner.
    """

    section: ClassVar[str] = "schedule"
    name: Literal[
        "auto",
        "gpipe",
        "1f1b",
        "sppo",
        "breadth-first",
        "seq1f1b",
        "interleaved-1f1b",
        "interleaved-seq1f1b",
        "table",
    ] = "auto"
    interleave: Literal["auto"] | int = "auto"
    table: str | None = None
    wave: Literal["auto"] | int = "auto"

    def _check(self) -> None:
        self._at_least(1, "interleave", "wave")
        if (self.name == "table") != (self.table is not None):
            raise ConfigError(
                f"schedule.table (a CSV file) must be given with schedule.name=table and with no other name, "
                f"got name={self.name} and table={'null' if self.table is None else self.table}; give both or neither"
            )


@dataclass(frozen=True, kw_only=True)
class StashConfig(Section):
    """Where each kind of activation is kept until the backward pass.

    Args:
        inputs: place of the inputs of the layers: "keep" is device memory, "host" is host memory, "recompute"
            recomputes them from the input of the virtual stage; "period" does so too, with a share of these inputs on
            the host and few keys and values for layers with a window, and needs layers of several types; "auto":
            chosen by the planner.
        attention: place of the attention outputs: "keep" is device memory, "host" is host memory, "recompute"
            recomputes them in the backward pass; "auto": chosen by the planner, which may stash only those of the last
            chunks in breadth-first schedules.
        rest: place of the other saved matrix products of a layer: "keep" is device memory, "host" is host memory,
            "recompute" recomputes them in the backward pass; "auto": chosen by the planner.
        alpha: share of the tokens of a chunk whose inputs and attention outputs go to the host, where their place is
            "host" or "period"; 0 to 1, one number or a list with one number per diagonal of the schedule; "auto":
            chosen by the planner.
        kv_grad_dtype: dtype in which the gradients of keys and values are summed; "auto": float32 where it fits, else
            bfloat16.
        kv: how keys and values reach the backward pass: "keep" keeps those of all layers in device memory; "rebuild"
            keeps those of one group of layers and recomputes the others from the inputs of the layers (if a sequence is
            one chunk, in the backward pass of this chunk; a plan then says "recompute"); "host" keeps those of one
            group of layers, fetches the others from host memory, and needs at least 2 chunks; "rebuild" and "host" need
            `schedule.name` "breadth-first"; "auto": "rebuild" where it is possible, else "keep", unless another way
            fits and makes a step shorter by more than 0.5%.
        waiting: where chunks wait between two groups of layers: "keep" is device memory, "host" is host memory, which
            needs `schedule.name` "breadth-first"; "auto": "keep" where that fits, else "host".
    """

    section: ClassVar[str] = "stash"
    inputs: InputPlace = "auto"
    attention: Place = "auto"
    rest: Place = "auto"
    alpha: Literal["auto"] | float | tuple[float, ...] = "auto"
    kv_grad_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv: Literal["auto", "keep", "rebuild", "host"] = "auto"
    waiting: Literal["auto", "keep", "host"] = "auto"

    def _check(self) -> None:
        values = self.alpha if isinstance(self.alpha, tuple) else (self.alpha,)
        if any(not isinstance(value, str) and not 0 <= value <= 1 for value in values):
            raise ConfigError(f"stash.alpha must be auto or in [0, 1], got {self.alpha}; give a share of tokens")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """AdamW with a linear warm-up and a decay of the learning rate, and clipping by global norm.

    Args:
        lr: peak learning rate; 0 to 1e30.
        warmup_steps: steps of the linear warm-up, W; 0 (none) to `train.steps`.
        warmup_ratio: the warm-up as a share of `train.steps`, rounded up to steps as in transformers, in place of
            `warmup_steps`; in [0, 1]; null: `warmup_steps` counts.
        warmup: learning rate of step i of the warm-up, i from 0: "first_step": `lr * (i + 1) / W`, as in torchtitan;
            "from_zero": `lr * i / W`, so that the first step changes nothing, as in transformers (TRL), optax and
            MaxText.
        decay: how the learning rate goes from its peak to its minimum after the warm-up: "cosine", "linear", or "none":
            it stays at the peak.
        decay_steps: steps of the decay, D, the last ones of the run; the rate stays at the peak between the warm-up and
            the decay (WSD); at least 1, at most `train.steps` minus W; "auto": all steps after the warm-up.
        min_lr_ratio: minimum of the learning rate as a multiple of `optimizer.lr`; 0 to 1e30; step i of n is at the
            share `(i - (n - D)) / D` of the decay, as in TRL, optax and torchtitan, so the minimum would come at step
            n, one step after the last one.
        weight_decay: decay coefficient of AdamW, applied to matrices only and multiplied by the learning rate; 0 (none)
            to 1e30.
        decay_embeddings: whether `weight_decay` applies to the embedding too, and to the head where it is tied to the
            embedding; true or false.
        b1: decay rate per step of the first moment; at least 0, at most 0.999999.
        b2: decay rate per step of the second moment; at least 0, at most 0.999999.
        eps: term that AdamW adds to the denominator, which is 0 without it where a gradient is 0; above 0 (1.2e-38, the
            least normal float32, is the least that is taken), at most 1e30.
        clip_norm: largest global norm of the gradient; a larger gradient is scaled down to this norm; above 0, at most
            1e30; null: gradients are taken as they are.
        place: where the parameters and the moments of AdamW are kept between their uses: "device" is device memory;
            "host" is host memory, from which a step fetches one group of layers at a time, and needs `schedule.name`
            "breadth-first" and all sequences of a pipeline in one wave; "auto": "device" where that fits, else "host"
            on GPUs.
    """

    section: ClassVar[str] = "optimizer"
    lr: float = 3e-4
    warmup_steps: int = 0
    warmup_ratio: float | None = None
    warmup: Literal["first_step", "from_zero"] = "first_step"
    decay: Literal["cosine", "linear", "none"] = "cosine"
    decay_steps: Literal["auto"] | int = "auto"
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    decay_embeddings: bool = True
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float | None = 1.0
    place: Literal["auto", "device", "host"] = "auto"

    def _check(self) -> None:
        self._at_least(0, "lr", "warmup_steps", "min_lr_ratio", "weight_decay")
        # Steps are taken in float32.
        self._at_most(1e30, "lr", "min_lr_ratio", "weight_decay", "eps", *(["clip_norm"] if self.clip_norm else []))
        self._fraction("b1", "b2")
        # AdamW divides by eps where gradients were 0, and by 1 - b1 and 1 - b2, which float32 must tell from 0.
        self._at_least(_LEAST_EPS, "eps")
        self._at_most(_MOST_DECAY, "b1", "b2")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ConfigError(
                f"optimizer.clip_norm must be above 0, got {self.clip_norm}; raise it, or write "
                "optimizer.clip_norm=null for no clipping"
            )
        if self.decay_steps != "auto":
            self._at_least(1, "decay_steps")
        if self.warmup_ratio is not None:
            self._check_ratio(self.warmup_ratio)

    def _check_ratio(self, ratio: float) -> None:
        if not 0 <= ratio <= 1:
            raise ConfigError(f"optimizer.warmup_ratio must be in [0, 1], got {ratio:g}; write 0.1 for a tenth")
        if self.warmup_steps:
            raise ConfigError(
                "one of optimizer.warmup_steps and optimizer.warmup_ratio must say the warm-up, got "
                f"{self.warmup_steps} and {ratio:g}; write optimizer.warmup_ratio=null, or optimizer.warmup_steps=0"
            )

    def num_warmup_steps(self, num_steps: int) -> int:
        """Returns the steps of the warm-up of a run of so many steps."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(num_steps * self.warmup_ratio)

    def num_decay_steps(self, num_steps: int) -> int:
        """Returns the steps of the decay, the last ones of a run of so many steps."""
        return num_steps - self.num_warmup_steps(num_steps) if isinstance(self.decay_steps, str) else self.decay_steps


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Length of the run, its devices, how often it reports and validates, and when it gives up.

    Args:
        steps: number of optimizer steps; the cosine of the learning rate would end one step after the last one; 1 to
            2147483647; a run that is resumed with more steps follows the longer cosine, with a higher learning rate.
        seed: seed of the initial parameters; 0 to 2147483647.
        devices: devices to train on; "cpu:N" simulates N devices on the CPU, N from 1 to 1024, a multiple of the
            product of the mesh axes that are numbers, and equal to the product where all three axes are numbers;
            "auto": the devices present.
        log_every: steps between two lines of metrics; at least 1.
        eval_every: steps between two validations, besides the one at the end; at least 1, or 0: only at the end.
        eval_sequences: most held-out sequences of one validation, each measured once; 0 (no validation) to 2147483647.
        eval_context: whether the last validation also measures what context beyond an eighth of `sequence.length` is
            worth, with two more passes over the held-out sequences; true or false.
        init: a run directory or a checkpoint of a model of the same shape; a new run starts from its weights; null:
            weights drawn from `seed`, or those of `model.hf`.
        init_optimizer: whether a run with `init` also starts from the optimizer's moments; true or false.
        max_nonfinite: number of consecutive skipped steps after which the run stops; a step is skipped if its loss, its
            gradient or the state after it is not finite; at least 1.
        stall_s: seconds without progress after which the run names the stuck process and ends; at least 1, or 0: never;
            "auto": the time of 4 predicted steps plus the time in which the first step pins host memory, at least 1800.
    """

    section: ClassVar[str] = "train"
    steps: int
    seed: int = 0
    devices: str = "auto"
    log_every: int = 1
    eval_every: int = 0
    eval_sequences: int = 8
    eval_context: bool = False
    init: str | None = None
    init_optimizer: bool = False
    max_nonfinite: int = 10
    stall_s: Literal["auto"] | float = "auto"

    def _check(self) -> None:
        self._at_least(1, "steps", "log_every", "max_nonfinite")
        if self.init_optimizer and self.init is None:
            raise ConfigError(
                "train.init_optimizer=true must have train.init, got null; set train.init to a run or a checkpoint"
            )
        self._local("init")
        self._at_least(0, "seed", "eval_every", "eval_sequences", "stall_s")
        self._at_most(_INT32, "steps", "seed", "eval_sequences")
        if not isinstance(self.stall_s, str) and 0 < self.stall_s < 1:
            raise ConfigError(f"train.stall_s must be 0 or at least 1, got {self.stall_s}; raise it or set 0")
        if self.devices != "auto" and not self.num_simulated_devices:
            raise ConfigError(f"train.devices must be auto or cpu:N, got {self.devices}; write e.g. cpu:8")
        if self.num_simulated_devices > _MOST_SIMULATED:
            raise ConfigError(
                f"train.devices must be at most cpu:{_MOST_SIMULATED}, got {self.devices}; lower N, or plan for more "
                "devices with "
                "hardware.cluster"
            )

    @property
    def num_simulated_devices(self) -> int:
        """Numbers of devices to simulate on the CPU, 0 for the real ones."""
        platform, _, count = self.devices.partition(":")
        return int(count) if platform == "cpu" and count.isdecimal() else 0


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When the run saves checkpoints, where they go, and which are kept.

    Args:
        dir: directory of the checkpoints; null: `checkpoints` in the run directory.
        every_s: seconds between two checkpoints; above 0, or 0: no checkpoints by time.
        every_steps: steps between two checkpoints; at least 1, or 0: no checkpoints by steps.
        keep_last: number of newest checkpoints to keep; at least 1.
        keep_every: a saved checkpoint whose step is a multiple of this number is never deleted; at least 1, or 0: none.
        keep_best: number of checkpoints with the lowest validation loss to keep, each saved right after its validation;
            at least 1, or 0: none.
        final: whether to save a checkpoint after the last step; true or false.
    """

    section: ClassVar[str] = "checkpoint"
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
        self._local("dir")


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Section):
    """What the run reports besides metrics.jsonl and report.html.

    Args:
        peak_flops: peak FLOP/s of one device, for the model FLOPs utilization (MFU); at least 1, or "auto": the
            datasheet's figure, and no MFU where the device is not known.
        tensorboard: whether to write TensorBoard events into the run directory; true or false.
        wandb: name of the Weights & Biases project to report to, 1 to 128 characters without any of `/ \\ # ? % :`;
            null: none; with WANDB_MODE=offline in the environment nothing leaves the machine.
    """

    section: ClassVar[str] = "metrics"
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
class Config(Section):
    """All settings of a run, one section for each part.

    Args:
        planner: method that chooses the keys left at "auto": "search" is this project's search, "paper" applies the
            rules of the SPPO paper.
        model: shape of the decoder.
        data: documents to train on, and how they fill sequences.
        mesh: number of devices along each axis of the mesh.
        sequence: length of a sequence, its chunks, and sequences per step.
        schedule: order of the passes on each stage.
        stash: places of the activations until the backward pass.
        optimizer: AdamW and its learning rate.
        train: length of the run, its devices and its reports.
        checkpoint: times, place and number of checkpoints.
        metrics: reports besides metrics.jsonl and report.html.
        hardware: figures of the machines that the planner assumes.
    """

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
        for name in ("balance", "longest") if self.schedule.table is not None else ():
            if (value := getattr(self.sequence, name)) != "auto":
                raise ConfigError(
                    f"sequence.{name} must be auto with schedule.table, which gives the chunk lengths, got "
                    f"{value if isinstance(value, str) else f'{value:g}'}; set sequence.{name}=auto"
                )
        self._hold(Facts(ulysses=self.sequence.given_ulysses, seq=self.mesh.pinned.get("seq")))
        if self.optimizer.warmup_steps > self.train.steps:
            raise ConfigError(
                f"optimizer.warmup_steps must be at most train.steps = {self.train.steps}, "
                f"got {self.optimizer.warmup_steps}; lower it"
            )
        most = self.train.steps - self.optimizer.num_warmup_steps(self.train.steps)
        if self.optimizer.num_decay_steps(self.train.steps) > most:
            raise ConfigError(
                f"optimizer.decay_steps must be at most train.steps less the warm-up = {most}, got "
                f"{self.optimizer.decay_steps}; lower it, or write optimizer.decay_steps=auto"
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
        data, sequence, schedule = self.mesh.pinned.get("data", 1), self.sequence, self.schedule
        per_step = sequence.given_per_step
        if per_step is None:
            if schedule.wave != "auto":
                self._hold(Facts(schedule=schedule.name, sequences=sequence.per_pipeline, wave=schedule.wave))
            return
        self._hold(Facts(data=data, per_step=per_step))
        if "data" in self.mesh.pinned and sequence.per_pipeline not in (1, per_step // data):
            raise ConfigError(
                f"sequence.per_step must be mesh.data * sequence.per_pipeline = {data * sequence.per_pipeline}, "
                f"got {per_step}; leave out one of the two"
            )

    @property
    def num_sequences(self) -> int:
        """Sequences in one step, over all pipelines."""
        return self.sequence.given_per_step or self.mesh.pinned.get("data", 1) * self.sequence.per_pipeline
