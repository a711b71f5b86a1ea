"""How the devices of a stage share a sequence: heads by ulysses, tokens round a ring, or both."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from sppo_jax.config import ModelConfig, SequenceConfig
from sppo_jax.rules import Facts, broken, check, divisors


@dataclass(frozen=True, kw_only=True)
class SequenceSplit:
    """How devices share a sequence, as `sequence.split`, and its two factors (inner, outer)."""

    name: str
    ulysses: int
    ring: int


@lru_cache(maxsize=64)
def sequence_splits(
    model: ModelConfig, sequence: SequenceConfig, seq: int, num_linked: int, kernel: str | None = None
) -> list[SequenceSplit]:
    """Returns the ways to share a sequence to consider, fewest exchanges first.

    Where split and factor are free, these are ulysses as far as the heads divide, as far as a host reaches, as far as
    key-value heads need no copies, and a ring.

    Args:
        model: the model shape; heads must divide by the ulysses factor, key-value heads are replicated.
        sequence: the request.
        seq: devices of a stage.
        num_linked: devices that are joined by the links of a host, which are neighbours on the `seq` axis.
        kernel: the attention kernel; None: any.

    Raises:
        ValueError: the heads do not divide, or a factor does not divide `seq`.
    """
    if sequence.split != "auto" or seq == 1:
        return [split_sequence(model, sequence, seq, kernel)]
    if sequence.given_ulysses is not None:
        return [split_sequence(model, _with_factor(sequence, sequence.given_ulysses, seq), seq, kernel)]
    num_heads, num_kv_heads = model.shared_heads
    factors = divisors(math.gcd(num_heads, seq))
    near = [factor for factor in factors if factor <= num_linked]
    whole = [factor for factor in factors if num_kv_heads % factor == 0]
    found = _on_rings(model, sequence, seq, {factors[-1], near[-1], whole[-1], 1}, kernel)
    return [split_sequence(model, _with_factor(sequence, factor, seq), seq, kernel) for factor in found]


def _on_rings(
    model: ModelConfig, sequence: SequenceConfig, seq: int, factors: set[int], kernel: str | None
) -> list[int]:
    """Returns the factors, falling, whose rings the model's windows allow; all if there are none."""
    facts = Facts(seq=seq, window=model.shared_window(sequence.length), kernel=kernel)
    allowed = [factor for factor in factors if not any(broken(replace(facts, ulysses=factor)))]
    return sorted(allowed or factors, reverse=True)


def _with_factor(sequence: SequenceConfig, factor: int, seq: int) -> SequenceConfig:
    if factor in (1, seq):
        return replace(sequence, split="ulysses" if factor == seq else "ring", ulysses="auto")
    return replace(sequence, split="hybrid", ulysses=factor)


def split_sequence(model: ModelConfig, sequence: SequenceConfig, seq: int, kernel: str | None = None) -> SequenceSplit:
    """Resolves how devices share a sequence, and its factors.

    Args:
        model: the model shape; heads must divide by the ulysses factor, key-value heads are replicated.
        sequence: the request.
        seq: devices of a stage.
        kernel: the attention kernel; None: any.

    Raises:
        ValueError: the heads do not divide, or a factor does not divide `seq`.
    """
    split, (num_heads, _) = sequence.split, model.shared_heads
    if split == "auto":
        split = "ulysses" if num_heads % seq == 0 else "ring"
    check(Facts(num_heads=num_heads, split=split, ulysses=sequence.given_ulysses, seq=seq))
    factor = {"ring": 1, "ulysses": seq}.get(split) or sequence.given_ulysses or _hybrid_factor(num_heads, seq)
    check(Facts(ulysses=factor, seq=seq, window=model.shared_window(sequence.length), kernel=kernel))
    return SequenceSplit(name=split, ulysses=factor, ring=seq // factor)


def _hybrid_factor(num_heads: int, seq: int) -> int:
    """Returns the largest factor of `seq` that divides the heads and leaves a ring, if there is any."""
    shared = math.gcd(num_heads, seq)
    return max((count for count in divisors(shared) if count < seq), default=1)
