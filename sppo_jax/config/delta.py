"""Settings of the gated delta rule; imports no jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sppo_jax.config.section import ConfigError, Section


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(Section):
    """The gated delta rule of layers that have it in place of attention: a state for each head of values.

    Args:
        value_heads: heads of values; 1 to 10000000, a multiple of `model.delta.key_heads`, or 0: `model.num_heads`.
        key_heads: heads of queries and keys; 1 to 10000000, or 0: `model.num_kv_heads`.
        key_size: elements of a head of queries and keys; 1 to 10000000, or 0: `model.head_dim`.
        value_size: elements of a head of values; 1 to 10000000, or 0: `model.head_dim`.
        taps: tokens over which the short convolution goes, a token itself and those before it; 1 to 64.
    """

    section: ClassVar[str] = "model.delta"
    value_heads: int = 0
    key_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    taps: int = 4

    def filled(self, num_heads: int, num_kv_heads: int, head_dim: int) -> DeltaConfig:
        """Returns these settings with those of attention in place of zeros.

        Raises:
            ConfigError: the heads do not fit together.
        """
        delta = DeltaConfig(
            value_heads=self.value_heads or num_heads,
            key_heads=self.key_heads or num_kv_heads,
            key_size=self.key_size or head_dim,
            value_size=self.value_size or head_dim,
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
        self._at_least(0, *sizes)
        self._at_most(10**7, *sizes)
        self._at_least(1, "taps")
        self._at_most(64, "taps")
