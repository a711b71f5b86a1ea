"""The rules that join the settings of a plan, each with its text in one place.

The config, the search and the plan check the same RULES, each with the facts it knows. A rule holds where one of its
facts is still open.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from sppo_jax.files.format_bytes import format_bytes

# Each shape of a tick costs segments to compile.
MOST_SHAPES = 6
BREADTH_FIRST = "breadth-first"
# Tokens that the kernel for TPUs takes at least at a time.
KERNEL_TILE = 128
# The most pairs of a block of queries and a block of keys that it visits: a core lists its own, as numbers of 4 bytes,
# in a memory of 1 MiB, a quarter of which is left free.
MOST_PAIRS = 3 * 2**16
# The most blocks of queries, and of keys, that such a number tells apart.
MOST_BLOCKS = 2**12, 2**15
# Schedules whose sequences are one chunk.
UNCUT = ("1f1b", "interleaved-1f1b")


class Broken(ValueError):
    """A rule that is broken: what must hold, what was found, and what to change."""

    def __init__(self, must: str, got: object, change: str) -> None:
        super().__init__(f"{must}, got {got}; {change}")
        self.must, self.got, self.change = must, got, change
        self.number = 0  # among RULES


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a plan; None: still open.

    Args:
        num_layers: layers of the model.
        layer_types: of each layer; () where all are alike.
        stacks: of each layer the name of the stack that holds its parameters; () where all are alike.
        num_heads: query heads of the model.
        state_heads: heads of the output of a layer's mixer with a state; None: no layer has one, or still open.
        attends: whether a layer has attention.
        data: pipelines.
        pipe: stages.
        seq: devices that share the tokens of a chunk.
        tile: tokens of which a device's part of each chunk is a multiple.
        per_step: sequences of a step over all pipelines.
        sequences: sequences of a pipeline in a step.
        length: tokens of a sequence.
        chunks: number of chunks, or the tokens of each.
        shapes: tokens that a tick may have, rising.
        split: how a stage's devices share a sequence, as `sequence.split`.
        ulysses: devices that exchange heads.
        window: tokens that a token attends to, where these are fewer than a sequence has; 0: all before it.
        groups: "static", or "flex": each document has devices of its own.
        kernel: the attention kernel.
        blocks: bytes of a step of the kernel for TPUs, and those that a core has for it.
        visits: blocks of queries of a chunk, and of keys, that the kernel for TPUs has on a device.
        schedule: name of the schedule.
        one_group_at_a_time: whether the schedule passes one group of layers at a time.
        interleave: groups of layers of a stage.
        wave: sequences of a wave.
        table_stages: stages of a schedule table given by hand.
        weights: what a device holds of its stage's layers.
        optimizer: where parameters and moments wait.
        kv: how keys and values reach the backward pass.
        waiting: where chunks wait between two groups of layers.
        places: the places of layer inputs, attention outputs and the rest.
        balance_over: whose tokens a loss that balances experts is of, "sequence" or "batch".
        forwards_first: whether every forward of a step comes before its first backward.
        is_mixed: whether layers are of several types.
        most_whole: the most layers of a group that have neither a window nor a state.
        has_tails: whether layers with a window have tails; see `has_tails`.
    """

    num_layers: int | None = None
    layer_types: tuple[str | None, ...] = ()
    stacks: tuple[str, ...] = ()
    num_heads: int | None = None
    state_heads: int | None = None
    attends: bool = True
    data: int | None = None
    pipe: int | None = None
    seq: int | None = None
    tile: int = 1
    per_step: int | None = None
    sequences: int | None = None
    length: int | None = None
    chunks: int | tuple[int, ...] | None = None
    shapes: tuple[int, ...] = ()
    split: str | None = None
    ulysses: int | None = None
    window: int = 0
    groups: str | None = None
    kernel: str | None = None
    blocks: tuple[int, int] | None = None
    visits: tuple[int, int] | None = None
    schedule: str | None = None
    one_group_at_a_time: bool | None = None
    interleave: int | None = None
    wave: int | None = None
    table_stages: int | None = None
    weights: str | None = None
    optimizer: str | None = None
    kv: str | None = None
    waiting: str | None = None
    places: tuple[str, str, str] | None = None
    balance_over: str | None = None
    forwards_first: bool | None = None
    is_mixed: bool | None = None
    most_whole: int | None = None
    has_tails: bool = False

    @property
    def unit(self) -> str:
        """The tokens that a chunk's length is a multiple of, in words."""
        return "mesh.seq" if self.tile == 1 else f"mesh.seq * {self.tile} (the tile of a device)"

    @property
    def asked(self) -> Iterator[tuple[str, str]]:
        """The settings that need a schedule of one group of layers at a time, each with the setting that does not."""
        if self.weights == "gathered":
            yield "mesh.weights=gathered", "mesh.weights=auto"
        if self.optimizer == "host":
            yield "optimizer.place=host", "optimizer.place=device"
        if self.kv in ("recompute", "rebuild", "host"):
            # A plan of an only chunk says "recompute" for the setting's "rebuild".
            yield f"stash.kv={'host' if self.kv == 'host' else 'rebuild'}", "stash.kv=keep"
        if self.waiting == "host":
            yield "stash.waiting=host", "stash.waiting=keep"


def check(facts: Facts) -> None:
    """Checks all rules.

    Raises:
        Broken: the first rule that is broken.
    """
    for error in broken(facts):
        raise error


def broken(facts: Facts) -> Iterator[Broken]:
    """Yields each rule that is broken, in the order of RULES."""
    for number, rule in enumerate(RULES):
        error = rule(facts)
        if error is not None:
            error.number = number
            yield error


def _pipelines(facts: Facts) -> Broken | None:
    if facts.per_step is None or facts.data is None or facts.per_step % facts.data == 0:
        return None
    must = f"mesh.data must divide sequence.per_step={facts.per_step}"
    return Broken(must, f"mesh.data={facts.data}", "change one of the two")


def _stages_of_table(facts: Facts) -> Broken | None:
    if facts.table_stages is None or facts.pipe in (None, facts.table_stages):
        return None
    must = f"mesh.pipe must be {facts.table_stages}, the number of stages of schedule.table"
    return Broken(must, f"mesh.pipe={facts.pipe}", f"set mesh.pipe={facts.table_stages}")


def _layers_of_stages(facts: Facts) -> Broken | None:
    if facts.num_layers is None or facts.pipe is None:
        return None
    layers, groups = facts.num_layers, facts.interleave or 1
    stages = facts.pipe * groups
    if layers % stages == 0 or _ends_in_period(facts):
        return None
    what = "mesh.pipe" if groups == 1 else f"mesh.pipe * schedule.interleave={groups}"
    got = f"mesh.pipe={facts.pipe}"
    counts = [str(count) for count in divisors(layers)]
    below = [count for count in counts if int(count) < stages][-1:]
    above = [count for count in counts if int(count) > stages][:1]
    models = {layers // stages * stages, (layers // stages + 1) * stages} - {0}
    change = (
        f"use {' or '.join(below + above)} virtual stages, or a model of {' or '.join(map(str, sorted(models)))} layers"
    )
    return Broken(f"{what} must divide model.num_layers={layers}", got, change)


def _types_of_groups(facts: Facts) -> Broken | None:
    """One program serves all groups of all stages.

    On one stage every group has as many layers of each stack, or one layer, for a tick chooses by its group which types
    it runs. The groups of several stages have the same types in the same order, because all stages make the same
    exchanges.
    """
    if not facts.layer_types or facts.pipe is None:
        return None
    interleave = facts.interleave or 1
    if _is_even(facts, facts.pipe * interleave):
        return None
    what = "mesh.pipe" if interleave == 1 else "mesh.pipe * schedule.interleave"
    must = "equal patterns of model.layers" if facts.pipe > 1 else "groups with as many layers of each shape"
    possible = [str(count) for count in divisors(len(facts.layer_types)) if _is_even(facts, count)]
    return Broken(
        f"{what} must divide the layers into {must}",
        f"{facts.pipe * interleave} parts",
        f"use {' or '.join(possible)}, or another pattern",
    )


def _ends_in_period(facts: Facts) -> bool:
    """Returns whether the last group of one stage is the beginning of a period, and all others are the period.

    Its stacks are filled with layers of zeros, which nothing runs.
    """
    parts, count = facts.interleave or 1, len(facts.layer_types)
    size = group_size(count, parts)
    if facts.pipe != 1 or not 1 < size < count or group_size(count, size) != parts:
        return False
    return all(one == facts.layer_types[number % size] for number, one in enumerate(facts.layer_types))


def _is_even(facts: Facts, parts: int) -> bool:
    """Returns whether one program serves so many parts of the layers."""
    size, rest = divmod(len(facts.layer_types), parts)
    if rest:
        return _ends_in_period(replace(facts, interleave=parts))
    if facts.pipe != 1:
        return facts.layer_types[:size] * parts == facts.layer_types
    if size == 1:
        return True
    names = facts.stacks or facts.layer_types
    counts = [Counter(names[begin : begin + size]) for begin in range(0, len(names), size)]
    return all(count == counts[0] for count in counts)


def _layers_of_groups(facts: Facts) -> Broken | None:
    known = facts.interleave is None and facts.num_layers is not None and facts.pipe is not None
    if not known or facts.schedule != BREADTH_FIRST or facts.num_layers != facts.pipe:
        return None
    must = f"schedule {BREADTH_FIRST} must have at least 2 layers per stage"
    got = f"{facts.num_layers} layers on {facts.pipe} stages"
    return Broken(must, got, "use fewer stages, or schedule.name=sppo")


def _flexible_members(facts: Facts) -> Broken | None:
    if facts.groups != "flex" or facts.seq is None or (facts.seq >= 2 and facts.seq & (facts.seq - 1) == 0):
        return None
    must = "mesh.seq must be a power of two of at least 2 for sequence.groups=flex"
    return Broken(must, facts.seq, "change mesh.seq, or use sequence.groups=static")


def _length(facts: Facts) -> Broken | None:
    if facts.length is None or facts.seq is None or isinstance(facts.chunks, tuple):
        return None
    multiple = facts.seq * facts.tile
    if facts.length > 0 and facts.length % multiple == 0:
        return None
    must = f"{facts.unit} must divide sequence.length={facts.length}"
    return Broken(must, f"mesh.seq={facts.seq}", f"use {nearest_multiples(facts.length, multiple)} tokens")


def _count(facts: Facts) -> Broken | None:
    if facts.length is None or facts.seq is None or not isinstance(facts.chunks, int):
        return None
    most = facts.length // (facts.seq * facts.tile)
    if 1 <= facts.chunks <= most:
        return None
    must = f"each of sequence.chunks={facts.chunks} chunks must have at least {facts.unit} tokens"
    got = f"mesh.seq={facts.seq} and sequence.length={facts.length}"
    return Broken(must, got, f"use 1 to {most} chunks" if most else "use a longer sequence")


def _chunk_lengths(facts: Facts) -> Broken | None:
    if not isinstance(facts.chunks, tuple) or facts.seq is None:
        return None
    for chunk, tokens in enumerate(facts.chunks):
        if tokens < 1 or tokens % facts.seq:
            must = "the tokens of every chunk must be a positive multiple of mesh.seq"
            got = f"{tokens} in chunk {chunk} with mesh.seq={facts.seq}"
            return Broken(must, got, f"use {nearest_multiples(tokens, facts.seq)}")
    return None


def _chunks_add_up(facts: Facts) -> Broken | None:
    if not isinstance(facts.chunks, tuple) or facts.length is None or sum(facts.chunks) == facts.length:
        return None
    missing = facts.length - sum(facts.chunks)
    must = f"sequence.chunks must add up to sequence.length={facts.length}"
    return Broken(must, sum(facts.chunks), f"change a chunk by {missing:+d}, or change sequence.length")


def _rising_shapes(facts: Facts) -> Broken | None:
    shapes = facts.shapes
    if len(shapes) > MOST_SHAPES:
        must = f"sequence.shapes must be at most {MOST_SHAPES} token counts"
        return Broken(must, len(shapes), "leave some out")
    if shapes and (shapes[0] < 1 or any(low >= high for low, high in pairwise(shapes))):
        return Broken("sequence.shapes must be positive and rise", list(shapes), "sort them")
    return None


def _shared_shapes(facts: Facts) -> Broken | None:
    multiple = (facts.seq or 1) * facts.tile
    uneven = [tokens for tokens in facts.shapes if tokens % multiple]
    if not uneven:
        return None
    must = f"{facts.unit} must divide each of sequence.shapes={list(facts.shapes)}"
    return Broken(must, f"mesh.seq={facts.seq or 1} and {uneven}", f"round up to multiples of {multiple}")


def _longest_shape(facts: Facts) -> Broken | None:
    if not facts.shapes or not isinstance(facts.chunks, tuple) or facts.shapes[-1] >= max(facts.chunks):
        return None
    must = f"the last of sequence.shapes must hold the longest chunk, {max(facts.chunks)} tokens"
    return Broken(must, facts.shapes[-1], "add a longer shape, or cut shorter chunks")


def _factor(facts: Facts) -> Broken | None:
    split, factor, seq = facts.split, facts.ulysses, facts.seq
    if factor is None or seq is None:
        return None
    got = f"sequence.ulysses={factor}"
    if split in ("ulysses", "ring") and factor != (seq if split == "ulysses" else 1):
        wanted = "mesh.seq" if split == "ulysses" else "1"
        must = f"sequence.ulysses must be {wanted} (or auto) for sequence.split={split}"
        return Broken(must, f"{got} and mesh.seq={seq}", "set sequence.ulysses=auto, or use sequence.split=hybrid")
    if seq % factor:
        must = f"sequence.ulysses={factor} must divide mesh.seq"
        return Broken(must, f"mesh.seq={seq}", f"use one of {divisors(seq)}, or auto")
    return None


def _heads(facts: Facts) -> Broken | None:
    by_mesh = facts.split == "ulysses"
    factor = facts.seq if by_mesh else facts.ulysses
    if facts.num_heads is None or factor is None or facts.num_heads % factor == 0:
        return None
    name, instead = ("mesh.seq", "sequence.split=ring") if by_mesh else ("sequence.ulysses", "auto")
    must = f"{name} must divide model.num_heads={facts.num_heads} for ulysses"
    return Broken(must, f"{name}={factor}", f"use one of {divisors(facts.num_heads)}, or {instead}")


def _heads_of_states(facts: Facts) -> Broken | None:
    """Each device has a state of its own heads, and all tokens of a chunk for them."""
    heads, seq = facts.state_heads, facts.seq
    if heads is None or seq is None or heads % seq == 0:
        return None
    must = f"mesh.seq must divide the {heads} heads of a layer with a state"
    return Broken(must, f"mesh.seq={seq}", f"use one of {divisors(heads)}")


def _groups_of_states(facts: Facts) -> Broken | None:
    if facts.state_heads is None or facts.groups in (None, "static"):
        return None
    must = "a model with layers that have a state must have sequence.groups=static"
    return Broken(must, f"sequence.groups={facts.groups}", "use sequence.groups=static")


def _keys_of_states(facts: Facts) -> Broken | None:
    if facts.attends or facts.kv not in ("recompute", "rebuild", "host"):
        return None
    must = "a model without attention must have stash.kv=keep, because it has no keys and values"
    return Broken(must, f"stash.kv={'host' if facts.kv == 'host' else 'rebuild'}", "use stash.kv=keep")


def _outputs_of_states(facts: Facts) -> Broken | None:
    """A backward makes the outputs of mixers with a state anyway, so a stash never holds them."""
    if facts.attends or facts.places is None or facts.places[1] != "host" or facts.places[0] in ("auto", "host"):
        return None
    must = (
        "a model without attention has no attention outputs for stash.attention=host, and must have stash.inputs=host"
    )
    return Broken(must, f"stash.inputs={facts.places[0]}", "change it, or use stash.attention=recompute")


def _window(facts: Facts) -> Broken | None:
    """Tokens are striped over a ring, so that each two devices have one window of keys in common for every query."""
    window, factor, seq = facts.window, facts.ulysses, facts.seq
    if factor is None and facts.split in ("ulysses", "ring"):
        factor = seq if facts.split == "ulysses" else 1
    if not window or factor is None or seq is None or seq % factor or window % (seq // factor) == 0:
        return None
    ring = seq // factor
    must = f"model.sliding_window must be a multiple of the {ring} devices on the ring"
    change = f"use {nearest_multiples(window, ring)}, or another mesh.seq or sequence.ulysses"
    return Broken(must, f"{window}", change)


def _kernel_of_window(facts: Facts) -> Broken | None:
    """A call of a fused kernel has one window, and documents on unlike numbers of devices have unlike ones there."""
    if not facts.window or facts.groups != "flex" or facts.kernel in (None, "blockwise"):
        return None
    must = "a model with a sliding window must have model.kernel=blockwise where sequence.groups=flex"
    return Broken(must, f"model.kernel={facts.kernel}", "change it, or use sequence.groups=static")


def _chunks_of_kernel(facts: Facts) -> Broken | None:
    """The kernel for TPUs takes whole tiles of tokens of a ring member, or of a member of a team."""
    members = _members_of_kernel(facts)
    if members is None or not isinstance(facts.chunks, tuple):
        return None
    multiple = KERNEL_TILE * members
    uneven = [tokens for tokens in facts.chunks if tokens % multiple]
    if not uneven:
        return None
    must = f"each of sequence.chunks must be a multiple of {KERNEL_TILE} * {members} devices with model.kernel=pallas"
    return Broken(must, uneven[0], f"use {nearest_multiples(uneven[0], multiple)}, or model.kernel=blockwise")


def _window_of_kernel(facts: Facts) -> Broken | None:
    """Of a member's keys those that a window reaches travel on a ring, or are all that is kept."""
    members = _members_of_kernel(facts)
    if members is None or facts.groups == "flex":
        return None
    multiple = KERNEL_TILE * members
    if (members == 1 and not facts.has_tails) or facts.window % multiple == 0:
        return None
    must = f"model.sliding_window must be a multiple of {KERNEL_TILE} * {members} devices with model.kernel=pallas"
    return Broken(must, facts.window, f"use {nearest_multiples(facts.window, multiple)}, or model.kernel=blockwise")


def _memory_of_kernel(facts: Facts) -> Broken | None:
    """A step has all query heads of a key-value head, and at least a tile of tokens."""
    if facts.kernel != "pallas" or facts.blocks is None or facts.blocks[0] <= facts.blocks[1]:
        return None
    needed, there = map(format_bytes, facts.blocks)
    must = f"blocks of model.kernel=pallas must fit into the {there} of a core's memory for them"
    change = "use more model.num_kv_heads or smaller heads, or model.kernel=blockwise"
    return Broken(must, needed, change)


def _visits_of_kernel(facts: Facts) -> Broken | None:
    """The pairs of blocks with visible tokens are data, so each core lists them."""
    if facts.kernel != "pallas" or facts.visits is None:
        return None
    queries, keys = facts.visits
    if queries <= MOST_BLOCKS[0] and keys <= MOST_BLOCKS[1] and queries * keys <= MOST_PAIRS:
        return None
    must = f"model.kernel=pallas must visit at most {MOST_PAIRS} pairs of blocks in a chunk"
    got = f"{queries} blocks of queries and {keys} of keys"
    return Broken(must, got, "use more sequence.chunks or a longer mesh.seq, or model.kernel=blockwise")


def _members_of_kernel(facts: Facts) -> int | None:
    """Returns over how many devices the kernel for TPUs has a chunk's tokens spread; None: other kernel, or open."""
    if facts.kernel != "pallas" or facts.seq is None:
        return None
    if facts.groups == "flex":
        return facts.seq
    factor = facts.ulysses or {"ulysses": facts.seq, "ring": 1}.get(facts.split or "")
    return facts.seq // factor if factor and facts.seq % factor == 0 else None


def _wave(facts: Facts) -> Broken | None:
    if facts.wave is None:
        return None
    if facts.sequences is not None and (facts.wave < 1 or facts.sequences % facts.wave):
        possible = divisors(facts.sequences)
        near = [count for count in possible if count < facts.wave][-1:]
        near += [count for count in possible if count > facts.wave][:1]
        must = f"schedule.wave={facts.wave} must divide the sequences of a pipeline"
        return Broken(must, facts.sequences, f"use {' or '.join(map(str, near))}, or change the number of sequences")
    if facts.wave > 1 and facts.schedule in UNCUT:
        must = f"schedule.wave must be 1 with schedule.name={facts.schedule}, which does not cut sequences"
        return Broken(must, facts.wave, f"use schedule.name={facts.schedule.replace('1f1b', 'seq1f1b')}")
    return None


def _one_group_at_a_time(facts: Facts) -> Broken | None:
    if facts.one_group_at_a_time in (None, True):
        return None
    for setting, instead in facts.asked:
        must = f"{setting} must have schedule.name={BREADTH_FIRST}, which passes one group of layers at a time"
        return Broken(must, f"schedule.name={facts.schedule}", f"use schedule.name={BREADTH_FIRST}, or {instead}")
    return None


def _several_groups(facts: Facts) -> Broken | None:
    gathered = facts.weights == "gathered" or facts.optimizer == "host"
    if not gathered or facts.interleave is None or facts.interleave >= 2:
        return None
    setting, instead = next(facts.asked)
    must = f"{setting} must have at least 2 groups of layers per stage"
    return Broken(must, facts.interleave, f"change mesh.pipe or schedule.interleave, or use {instead}")


def _several_members(facts: Facts) -> Broken | None:
    if facts.weights != "gathered" or facts.data is None or facts.seq is None or facts.optimizer != "device":
        return None
    if facts.data * facts.seq > 1:
        return None
    must = "mesh.weights=gathered must have stages of at least 2 devices, which share the weights"
    return Broken(must, "mesh.data=1 and mesh.seq=1", "use mesh.weights=resident, or optimizer.place=host")


def _gathered_for_host(facts: Facts) -> Broken | None:
    if facts.optimizer != "host" or facts.weights in (None, "gathered"):
        return None
    must = "optimizer.place=host must have mesh.weights=gathered"
    return Broken(must, f"mesh.weights={facts.weights}", "use mesh.weights=auto, or optimizer.place=device")


def _one_wave_for_host(facts: Facts) -> Broken | None:
    if facts.optimizer != "host" or facts.wave is None or facts.sequences in (None, facts.wave):
        return None
    must = f"optimizer.place=host must have all {facts.sequences} sequences of a pipeline in one wave"
    change = f"use schedule.wave={facts.sequences}, or optimizer.place=device"
    return Broken(must, f"schedule.wave={facts.wave}", change)


def _all_recomputed(facts: Facts) -> Broken | None:
    if facts.places is None or facts.places[0] != "recompute":
        return None
    if all(place in ("auto", "recompute") for place in facts.places[1:]):
        return None
    must = "stash.attention and stash.rest must be recompute where stash.inputs=recompute"
    got = f"{facts.places[1]} and {facts.places[2]}"
    return Broken(must, got, "set stash.inputs=keep, or set all three to recompute")


def _rest_of_period(facts: Facts) -> Broken | None:
    if facts.places is None or facts.places[0] != "period" or facts.places[2] in ("auto", "recompute"):
        return None
    must = "stash.rest must be recompute where stash.inputs=period"
    return Broken(must, facts.places[2], "change it, or use stash.inputs=host")


def _types_of_period(facts: Facts) -> Broken | None:
    """Where layers are alike, nothing of a group is cheap to compute again, or all of it is."""
    if facts.places is None or facts.places[0] != "period" or facts.is_mixed in (None, True):
        return None
    must = "stash.inputs=period must have a model with layers of several types"
    return Broken(must, "layers that are all alike", "use stash.inputs=host, keep or recompute")


def _teams_of_period(facts: Facts) -> Broken | None:
    """A tail is of the tokens before a chunk in natural order."""
    if facts.places is None or facts.places[0] != "period" or facts.groups in (None, "static"):
        return None
    must = "stash.inputs=period must have sequence.groups=static"
    return Broken(must, facts.groups, "change it, or use stash.inputs=host")


def _rebuilds_of_period(facts: Facts) -> Broken | None:
    """Keys and values are made again from the last chunk to the first, and a layer without a window needs all before.

    So the layers before it must have windows or states: tails and states are in the stash.
    """
    if facts.places is None or facts.places[0] != "period" or facts.kv != "rebuild" or facts.most_whole in (None, 0, 1):
        return None
    must = "stash.kv=rebuild must have at most one layer without a window in a group where stash.inputs=period"
    return Broken(must, facts.most_whole, "use stash.kv=host, or change schedule.interleave")


def sums_over_batch(balance_over: str | None, groups: str | None) -> bool:
    """Returns whether a loss that balances experts is of sums over several rows of the batch.

    With teams the documents of a packed sequence may lie in any rows.

    Args:
        balance_over: whose tokens the loss is of.
        groups: see `Facts`.
    """
    return balance_over == "batch" or (balance_over == "sequence" and groups == "flex")


def _balance_over_batch(facts: Facts) -> Broken | None:
    """A backward takes the gradient of this loss at the sums over all forwards."""
    if not sums_over_batch(facts.balance_over, facts.groups) or facts.sequences is None:
        return None
    wave = 1 if facts.schedule in UNCUT else facts.wave
    is_first = facts.forwards_first
    if is_first is None:
        is_first = wave in (None, facts.sequences) or facts.schedule == "gpipe"
    if is_first:
        return None
    what, other = f"model.experts.balance_over={facts.balance_over}", "model.experts.balance_over=sequence"
    if facts.balance_over == "sequence":
        what, other = f"{what} with sequence.groups=flex", "sequence.groups=static"
    must = f"{what} must have all forwards of a step before its first backward"
    got = f"{facts.sequences} sequences of a pipeline in waves of {wave} with schedule.name={facts.schedule}"
    change = f"schedule.wave={facts.sequences}" if facts.schedule not in UNCUT else "schedule.name=gpipe"
    return Broken(must, got, f"use {change}, or {other}")


RULES = (
    _pipelines,
    _stages_of_table,
    _layers_of_stages,
    _types_of_groups,
    _layers_of_groups,
    _flexible_members,
    _length,
    _count,
    _chunk_lengths,
    _chunks_add_up,
    _rising_shapes,
    _shared_shapes,
    _longest_shape,
    _factor,
    _heads,
    _heads_of_states,
    _groups_of_states,
    _keys_of_states,
    _outputs_of_states,
    _window,
    _kernel_of_window,
    _chunks_of_kernel,
    _window_of_kernel,
    _memory_of_kernel,
    _visits_of_kernel,
    _wave,
    _one_group_at_a_time,
    _several_groups,
    _several_members,
    _gathered_for_host,
    _one_wave_for_host,
    _all_recomputed,
    _rest_of_period,
    _types_of_period,
    _teams_of_period,
    _rebuilds_of_period,
    _balance_over_batch,
)


def has_tails(inputs: str, kv: str, num_layers: int, *, flexible: bool) -> bool:
    """Returns whether layers with a window have keys and values of their window and a chunk alone.

    So it is in a period, and where keys and values of one group at a time are made again or come from the host. Without
    a period groups of one layer have no tails: they take turns in one cache, and in copies of one size. A tail is of
    the tokens before a chunk in natural order, which teams of devices have not.

    Args:
        inputs: place of the layer inputs.
        kv: how keys and values reach the backward.
        num_layers: layers of a group.
        flexible: whether documents may have their own teams of devices.
    """
    return not flexible and (inputs == "period" or (kv in ("rebuild", "host") and num_layers > 1))


def nearest_multiples(value: int, multiple: int) -> str:
    """Returns the nearest positive multiples below and above a value, in words."""
    below = max(value, 0) // multiple * multiple
    return f"{below} or {below + multiple}" if below else f"{multiple}"


def layers_per_virtual_stage(
    num_layers: int,
    pipe: int,
    interleave: int,
    layer_types: tuple[str | None, ...] = (),
    stacks: tuple[str, ...] = (),
) -> int:
    """Returns the layers of a virtual stage, of which the last may have fewer; layer types and stacks as in `Facts`.

    Raises:
        Broken: the layers, or their types, do not divide evenly.
    """
    facts = Facts(num_layers=num_layers, pipe=pipe, interleave=interleave)
    check(replace(facts, layer_types=layer_types, stacks=stacks))
    return group_size(num_layers, pipe * interleave)


def group_size(num_layers: int, parts: int) -> int:
    """Returns the layers of each of so many parts; the last one may have fewer."""
    return -(-num_layers // parts)


def divisors(value: int) -> list[int]:
    """Returns the whole numbers that divide `value`, rising."""
    small = [count for count in range(1, math.isqrt(value) + 1) if value % count == 0]
    return small + [value // count for count in reversed(small) if count * count != value]
