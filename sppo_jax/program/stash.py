"""The stash of a plan by classes: stashes of one shape, which take turns in the same buffers, and their bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sppo_jax.plan.parts import StashPlan
from sppo_jax.schedule.table import Table


@dataclass(frozen=True, order=True)
class StashClass:
    """Stashes of one shape: tokens of a tick on one device, and how many of them go to the host.

    Where a class `recomputes`, its stashes hold no attention outputs, and backward computes attention again. Where
    keys and values are stashed, those of all tokens go to the host (`host_kv`), or those of none.
    """

    tokens: int
    host_inputs: int = 0
    host_attention: int = 0
    host_rest: bool = False
    recomputes: bool = False
    host_kv: int = 0

    @property
    def uses_host(self) -> bool:
        """Whether anything goes to the host."""
        return self.returns or bool(self.host_kv)

    @property
    def returns(self) -> bool:
        """Whether anything comes back for the backward of the same chunk, as keys and values do not."""
        return bool(self.host_inputs or self.host_attention or self.host_rest)


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """Bytes that a virtual stage stashes of a token.

    Args:
        kept: of what always stays on the device.
        shared: of layer inputs and attention outputs whose place is the host, where alpha says how many tokens go.
        rest: of the rest where its place is the host, where all tokens go or none.
        kv: of keys and values where their place is the host, where all tokens go or none.
        kept_attention: of attention outputs, which are a part of `kept`, or 0.
        shared_attention: of attention outputs, which are a part of `shared`, or 0.
    """

    kept: int
    shared: int
    rest: int
    kv: int = 0
    kept_attention: int = 0
    shared_attention: int = 0

    @property
    def away(self) -> int:
        """Bytes whose place is the host."""
        return self.shared + self.rest + self.kv

    def stashed(self, recomputes: bool) -> "TokenBytes":
        """Returns the bytes of a token in the stashes of a class, which may have no attention outputs."""
        if not recomputes:
            return self
        kept, shared = self.kept - self.kept_attention, self.shared - self.shared_attention
        return replace(self, kept=kept, shared=shared, kept_attention=0, shared_attention=0)


def recomputing_groups(table: Table, stash: StashPlan) -> tuple[bool, ...]:
    """Returns for each diagonal group whether its backward computes attention again; arguments as `stash_classes`."""
    return tuple(stash.attention == "recompute" or last < stash.attention_from for last in table.group_chunks)


def stash_classes(table: Table, stash: StashPlan, seq: int) -> tuple[StashClass, ...]:
    """Returns the class of each diagonal group.

    Args:
        table: the schedule, or its outline.
        stash: the places, with alpha.
        seq: devices of a stage, which share the tokens of a chunk.
    """
    alpha = dict(zip(table.diagonal_groups, stash.alpha, strict=True))
    recomputing = recomputing_groups(table, stash)

    def make(group: int, of_tick: int, hides: bool) -> StashClass:
        tokens = -(-of_tick // seq)
        count = round(alpha[group] * tokens) if hides else 0
        return StashClass(
            tokens=tokens,
            host_inputs=count if stash.inputs == "host" else 0,
            host_attention=count if stash.attention == "host" and not recomputing[group] else 0,
            host_rest=hides and stash.rest == "host",
            recomputes=recomputing[group],
            host_kv=tokens if hides and stash.kv == "host" else 0,
        )

    # Many groups have few classes.
    known: dict[tuple, StashClass] = {}
    found = []
    for group, (of_tick, hides) in enumerate(zip(table.group_tokens, table.hides_copies, strict=True)):
        key = of_tick, hides, alpha[group], recomputing[group]
        if key not in known:
            known[key] = make(group, of_tick, hides)
        found.append(known[key])
    return tuple(found)


def merged_classes(table: Table, stash: StashPlan, classes: Sequence[StashClass]) -> dict[StashClass, StashClass]:
    """Returns for each class whose ticks move as those of another one that other class.

    Where attention outputs of late chunks go to the host, the ticks of early chunks have the bodies of late ones: their
    attention outputs move too, and no backward reads them. So a pass of a group of layers is one loop, whose counter
    tells the row on the host. A row of an early chunk ends where its attention outputs begin: the next row overwrites
    them, as all forwards of a wave come before its first backward.

    Args:
        table: the schedule, or its outline.
        stash: the places, with alpha.
        classes: of the diagonal groups, from `stash_classes`.
    """
    if not table.passes_groups_in_turn or (stash.inputs, stash.attention, stash.rest) != ("host", "host", "recompute"):
        return {}
    known, merged = set(classes_of(classes)), {}
    for one in known:
        late = replace(one, recomputes=False, host_attention=one.host_inputs)
        if one.recomputes and one.host_inputs == one.tokens and late in known:
            merged[one] = late
    return merged


def short_rows(
    table: Table, classes: Sequence[StashClass], merged: dict[StashClass, StashClass]
) -> dict[StashClass, int]:
    """Returns of each class how many of its rows on the host are short, besides the last one, which never is.

    Args:
        table: the schedule, or its outline.
        classes: of the diagonal groups, from `stash_classes`.
        merged: from `merged_classes`.
    """
    if not merged:
        return {}
    # Of many groups few objects differ, and an `id` takes far less time than the hash of a class.
    rows: dict[StashClass, list[bool]] = {}
    row_of = {id(own): (rows.setdefault(merged.get(own, own), []), own in merged) for own in classes_of(classes)}
    for tick, group in zip(table.ticks, table.tick_groups, strict=True):
        if tick.kind == "B":
            break  # the next wave has the same rows
        if group is not None:
            found, is_short = row_of[id(classes[group])]
            found.append(is_short)
    return {of_class: sum(is_short[:-1]) for of_class, is_short in rows.items()}


def classes_of(classes: Sequence[StashClass]) -> list[StashClass]:
    """Returns the objects among the classes of many groups, each once; some may be equal."""
    return list({id(one): one for one in classes}.values())


def slot_bytes(of: StashClass, token: TokenBytes) -> tuple[int, int]:
    """Returns the bytes of one stash of a class: on the device, and on the host."""
    token = token.stashed(of.recomputes)
    away = max(of.host_inputs, of.host_attention) * token.shared + of.tokens * token.rest * of.host_rest
    away += of.host_kv * token.kv
    return of.tokens * (token.kept + token.away) - away, away
