"""What memory depends on besides table and stash: a model on the devices of a stage."""

from dataclasses import dataclass, fields
from functools import cached_property

from sppo_jax.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class MemoryShape:
    """What the memory of a stage depends on besides its schedule table and stash.

    Args:
        model: the model shape.
        layers: layers of a virtual stage.
        seq: devices of a stage.
        ulysses: devices over which heads are spread.
        compute_bytes: bytes of an activation.
        data: pipelines.
        platform: the compiler, "cpu", "gpu" or "tpu".
        groups: whether documents may have their own teams of devices.
        kernel: the attention kernel; see `plan.plan.Plan`.
        length: tokens of a sequence; 0: not known, and no window counts.
        weights: what a device holds of its stage's layers during a step; see `plan.plan.Plan`.
        optimizer: where parameters and moments wait; see `plan.plan.Plan`.
        cores: of a device, each of which has a part of dQ in the kernel for TPUs.
        ring_pass: what travels on the ring, as the config says: "kv", "q" or "auto".
        backward_queries: of a call of the fused kernel's backward at most, in layers without a window; see
            `plan.plan.Plan`.
        has_one_document: whether a sequence holds one document at most; see `plan.plan.Plan`.
    """

    model: ModelConfig
    layers: int
    seq: int
    ulysses: int
    compute_bytes: int
    data: int = 1
    platform: str = "gpu"
    groups: bool = False
    kernel: str = "blockwise"
    length: int = 0
    weights: str = "resident"
    optimizer: str = "device"
    cores: int = 1
    ring_pass: str = "auto"
    backward_queries: int = 0
    has_one_document: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, worked out once: a search looks up figures of a shape very often, and a model has many fields."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def sum_bytes(self) -> int:
        """Bytes of an element of a sum: float32 at least."""
        return max(4, self.compute_bytes)

    @property
    def works_on_copies(self) -> bool:
        """Whether resident weights are no parameters: other devices share those, or the dtype differs."""
        return self.compute_bytes < 4 or self.data * self.seq > 1
