"""Settings of rotary positions; imports no jax."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from sppo_jax.config.section import ConfigError, Section


@dataclass(frozen=True, kw_only=True)
class RopeConfig(Section):
    """Rotary position embedding, and its scaling beyond the length on which the model was trained.

    Args:
        theta: base of the rotation frequencies; at least 1.
        fraction: share of a head's elements that are rotated, the first ones; from 0 to 1, where 0 is no rotation.
        scaling: rule that stretches the rotation: "linear" divides every frequency by `model.rope.factor`, "llama3" and
            "yarn" divide only the slow ones; "none": no scaling.
        factor: number by which frequencies are divided; at least 1.
        original_length: tokens of the sequences on which the model was trained; at least 1; null: not known, which
            the scalings "llama3" and "yarn" do not allow.
        low_freq_factor: rotations over `model.rope.original_length` below which "llama3" divides a frequency by the
            whole factor; any number.
        high_freq_factor: rotations over `model.rope.original_length` above which "llama3" leaves a frequency as it is;
            any number.
        beta_fast: rotations over `model.rope.original_length` above which "yarn" leaves a frequency as it is; any
            number.
        beta_slow: rotations over `model.rope.original_length` below which "yarn" divides a frequency by the whole
            factor; any number.
        truncate: whether "yarn" rounds the two ends of its ramp between frequencies to whole pairs; true or false.
    """

    section: ClassVar[str] = "model.rope"
    theta: float = 10000.0
    fraction: float = 1.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_length: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def _check(self) -> None:
        self._at_least(1, "theta", "factor", "original_length")
        self._at_least(0, "fraction")
        self._at_most(1, "fraction")
        if self.scaling in ("llama3", "yarn") and self.original_length is None:
            raise ConfigError(
                f"model.rope.original_length must be the length on which the model was trained, at least 1, where "
                f"model.rope.scaling={self.scaling}, got null; set the length, e.g. to 8192"
            )
