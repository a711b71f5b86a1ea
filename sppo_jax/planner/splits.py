"""How the devices of a stage share a sequence: heads by ulysses, tokens round a ring, or both."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from sppo_jax.config import ModelConfig, SequenceConfig
from sppo_jax.plan.layers import divisors


@dataclass(frozen=True, kw_only=True)
class SequenceSplit:
    """The kind of sequence parallelism, its two factors (inner, outer) and why."""

    kind: str
    ulysses: int
    ring: int
    reason: str


@lru_cache(maxsize=64)
def sequence_splits(
    model: ModelConfig, sequence: SequenceConfig, seq: int, devices_per_host: int
) -> list[SequenceSplit]:
    """Returns the kinds of sequence parallelism to consider, fewest exchanges first.

    Where kind and factor are free, these are ulysses as far as the heads divide, as far as a host reaches, as far as
    key-value heads need no copies, and a ring.

    Args:
        model: the model shape; heads must divide by the ulysses factor, key-value heads are replicated.
        sequence: the request.
        seq: devices of a stage.
        devices_per_host: devices of a host, which are neighbours on the `seq` axis.

    Raises:
        ValueError: the heads do not divide, a factor does not divide `seq`, or `seq` can have no groups.
    """
    if sequence.groups == "flex" and (seq < 2 or seq & (seq - 1)):
        raise ValueError(
            f"mesh.seq must be a power of two of at least 2 for sequence.groups=flex, got {seq}; change mesh.seq, or "
            "use sequence.groups=static"
        )
    if sequence.kind == "auto" and sequence.ulysses and seq % sequence.ulysses:
        raise ValueError(
            f"sequence.ulysses must divide mesh.seq={seq}, got sequence.ulysses={sequence.ulysses}; set "
            "sequence.ulysses=0, or one of its divisors"
        )
    if sequence.kind != "auto" or seq == 1:
        return [split_sequence(model, sequence, seq)]
    if sequence.ulysses:
        return [split_sequence(model, _as_kind(sequence, sequence.ulysses, seq), seq)]
    factors = divisors(math.gcd(model.num_heads, seq))
    near = [factor for factor in factors if factor <= devices_per_host]
    whole = [factor for factor in factors if model.num_kv_heads % factor == 0]
    splits = []
    for factor in sorted({factors[-1], near[-1], whole[-1], 1}, reverse=True):
        found = split_sequence(model, _as_kind(sequence, factor, seq), seq)
        splits.append(replace(found, reason=f"{model.num_heads} heads, {model.num_kv_heads} key-value heads"))
    return splits


def _as_kind(sequence: SequenceConfig, factor: int, seq: int) -> SequenceConfig:
    if factor in (1, seq):
        return replace(sequence, kind="ulysses" if factor == seq else "ring", ulysses=0)
    return replace(sequence, kind="hybrid", ulysses=factor)


def split_sequence(model: ModelConfig, sequence: SequenceConfig, seq: int) -> SequenceSplit:
    """Resolves the kind of sequence parallelism and its factors.

    Args:
        model: the model shape; heads must divide by the ulysses factor, key-value heads are replicated.
        sequence: the request.
        seq: devices of a stage.

    Raises:
        ValueError: the heads do not divide, or a factor does not divide `seq`.
    """
    kind, reason = sequence.kind, "as requested"
    if kind == "auto":
        kind = "ulysses" if model.num_heads % seq == 0 else "ring"
        fact = "divide" if kind == "ulysses" else "do not divide"
        reason = f"{model.num_heads} heads {fact} evenly over seq={seq}"
    if kind == "ring":
        _check_no_factor(sequence, seq, 1, kind)
        return SequenceSplit(kind=kind, ulysses=1, ring=seq, reason=reason)
    if kind == "ulysses":
        _check_no_factor(sequence, seq, seq, kind)
        _check_heads(model.num_heads, seq, "mesh.seq", "or sequence.kind=ring")
        return SequenceSplit(kind=kind, ulysses=seq, ring=1, reason=reason)
    factor = sequence.ulysses or _hybrid_factor(model.num_heads, seq)
    if seq % factor:
        raise ValueError(
            f"sequence.ulysses must divide mesh.seq={seq}, got {factor}; use one of {divisors(seq)}, or 0 for auto"
        )
    _check_heads(model.num_heads, factor, "sequence.ulysses", "or 0 for auto")
    return SequenceSplit(kind=kind, ulysses=factor, ring=seq // factor, reason=reason)


def _hybrid_factor(num_heads: int, seq: int) -> int:
    """Returns the largest factor of `seq` that divides the heads and leaves a ring, if there is any."""
    shared = math.gcd(num_heads, seq)
    return max((count for count in divisors(shared) if count < seq), default=1)


def _check_heads(num_heads: int, factor: int, name: str, instead: str) -> None:
    if num_heads % factor:
        raise ValueError(
            f"{name} must divide model.num_heads={num_heads} for ulysses, got {name}={factor}; "
            f"use one of {divisors(num_heads)}, {instead}"
        )


def _check_no_factor(sequence: SequenceConfig, seq: int, factor: int, kind: str) -> None:
    if sequence.ulysses not in (0, factor):
        raise ValueError(
            f"sequence.ulysses must be 0 or {factor} for sequence.kind={kind} and mesh.seq={seq}, "
            f"got sequence.ulysses={sequence.ulysses}; set sequence.ulysses=0, or use sequence.kind=hybrid"
        )
