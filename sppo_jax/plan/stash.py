"""The stash of a plan by classes: stashes of one shape, which take turns in the same buffers, and their bytes."""

from dataclasses import dataclass

from sppo_jax.plan.plan import StashPlan
from sppo_jax.plan.table import Table


@dataclass(frozen=True, order=True)
class StashClass:
    """Stashes of one shape: tokens of a tick on one device, and how many of them go to the host."""

    tokens: int
    host_inputs: int = 0
    host_attention: int = 0
    host_rest: bool = False

    @property
    def uses_host(self) -> bool:
        return bool(self.host_inputs or self.host_attention or self.host_rest)


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """Bytes that a virtual stage stashes of a token.

    Args:
        kept: of what always stays on the device.
        shared: of layer inputs and attention outputs whose place is the host, where alpha says how many tokens go.
        rest: of the rest where its place is the host, where all tokens go or none.
    """

    kept: int
    shared: int
    rest: int

    @property
    def away(self) -> int:
        """Bytes whose place is the host."""
        return self.shared + self.rest


def stash_classes(table: Table, stash: StashPlan, seq: int) -> tuple[StashClass, ...]:
    """Returns the class of each diagonal group.

    Args:
        table: the schedule, or its outline.
        stash: the places, with alpha.
        seq: devices of a stage, which share the tokens of a chunk.
    """
    alpha = dict(zip(table.diagonal_groups, stash.alpha, strict=True))

    def make(group: int, of_tick: int, hides: bool) -> StashClass:
        tokens = -(-of_tick // seq)
        count = round(alpha[group] * tokens) if hides else 0
        return StashClass(
            tokens=tokens,
            host_inputs=count if stash.inputs == "host" else 0,
            host_attention=count if stash.attention == "host" else 0,
            host_rest=hides and stash.rest == "host",
        )

    groups = zip(table.group_tokens, table.hides_copies, strict=True)
    return tuple(make(group, of_tick, hides) for group, (of_tick, hides) in enumerate(groups))


def slot_bytes(of: StashClass, token: TokenBytes) -> tuple[int, int]:
    """Returns the bytes of one stash of a class: on the device, and on the host."""
    away = max(of.host_inputs, of.host_attention) * token.shared + of.tokens * token.rest * of.host_rest
    return of.tokens * (token.kept + token.away) - away, away
