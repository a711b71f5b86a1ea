"""Settings of the gated delta rule; imports no jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sppo_jax.config.section import AUTO, ConfigError, Section, WorkedOut


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(Section):
    """The gated delta rule of layers that have it in place of attention: a state for each head of values.

    Args:
        value_heads: heads of values; 1 to 10000000, a multiple of `model.delta.key_heads`; "auto":
            `model.num_heads`.
        key_heads: heads of queries and keys; 1 to 10000000; "auto": `model.num_kv_heads`.
        key_size: elements of a head of queries and keys; 1 to 10000000; "auto": `model.head_dim`.
        value_size: elements of a head of values; 1 to 10000000; "auto": `model.head_dim`.
        taps: tokens over which the short convolution goes, a token itself and those before it; 1 to 64.
    """

    section: ClassVar[str] = "model.delta"
    value_heads: WorkedOut = AUTO
    key_heads: WorkedOut = AUTO
    key_size: WorkedOut = AUTO
    value_size: WorkedOut = AUTO
    taps: int = 4

    def filled(self, num_heads: int, num_kv_heads: int, head_dim: int) -> DeltaConfig:
        """Returns these settings with those of attention in place of "auto".

        Raises:
            ConfigError: the heads do not fit together.
        """
        delta = DeltaConfig(
            value_heads=num_heads if self.value_heads == AUTO else self.value_heads,
            key_heads=num_kv_heads if self.key_heads == AUTO else self.key_heads,
            key_size=head_dim if self.key_size == AUTO else self.key_size,
            value_size=head_dim if self.value_size == AUTO else self.value_size,
            taps=self.taps,
        )
        if delta.value_heads % delta.key_heads:
            raise ConfigError(
                f"model.delta.value_heads must be a multiple of model.delta.key_heads, got {delta.value_heads} and "
                f"{delta.key_heads}; set both"
            )
        return delta

    def _check(self) -> None:
        sizes = ("value_heads", "key_heads", "key_size", "value_size")
        self._at_least(1, *sizes)
        self._at_most(10**7, *sizes)
        self._at_least(1, "taps")
        self._at_most(64, "taps")
