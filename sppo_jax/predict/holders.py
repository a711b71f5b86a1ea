"""What holds device memory in a training step: each holder's bytes, and the moments in which it is alive.

The peak is the largest sum of a moment. What depends on a schedule comes in as `Held`: the counts of a table give the
bytes of a plan, and the least counts of a choice give their lower bound.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from sppo_jax.models.counts import layer_costs, num_tables
from sppo_jax.models.state_counts import device_bytes, state_counts
from sppo_jax.plan.parts import StashPlan, cache_head_dim
from sppo_jax.predict.experts import expert_work
from sppo_jax.predict.fitted import NUMBERS, Numbers
from sppo_jax.predict.group_layers import are_unlike, group_caches, group_costs, group_experts, group_stacks
from sppo_jax.predict.period import made_again_bytes
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.stage_params import largest_matrix, layer_share, stage_params_of, table_params
from sppo_jax.predict.stash_bytes import StashBytes
from sppo_jax.predict.states import state_bytes_of_group, stretch_bytes
from sppo_jax.predict.tails import ends_in_windows, holds_tails, key_value_elements
from sppo_jax.predict.tpu_work import HIDDEN_ARRAYS, attention_bytes
from sppo_jax.predict.workspace import kv_heads_per_device, workspace_bytes
from sppo_jax.schedule.turns import slot_counts

# The moments of a step, and what a device does in each.
MOMENTS = {
    "forward": "the forward of a layer",
    "head": "the loss of a chunk, and its gradient",
    "turn": "the first backward of a stage: of the last group of layers",
    "mlp": "the backward of an MLP",
    "attention": "the backward of attention",
    "rebuild": "keys and values of the previous group are rebuilt",
    "tables": "the gradient of the embedding or of the head is summed",
    "update": "the optimizer changes the parameters",
}
ALL = frozenset(MOMENTS)
TICKS = ALL - {"update"}
BACKWARD = frozenset({"turn", "mlp", "attention", "rebuild"})
_F = frozenset({"forward"})
_LAYER = BACKWARD - {"rebuild"}
_AFTER = BACKWARD - {"turn"}
# Before the first backward; behind it.
_BEFORE = frozenset({"forward", "head"})
_BEHIND = ALL - _BEFORE

# Logits of a tile of tokens: in float32, their exponentials or gradient in float32, the gradient in the compute dtype.
LOSS_TOKENS, _LOSS_BYTES = 1024, 10
# A parameter and the two moments that Adam keeps of it.
_STATES = 3
# The most layers of a group that are no loop: the last one stands alone, see `pipeline.layer_types.run_layers`.
_LAYERS_WITHOUT_LOOP = 2
# A norm behind an MLP asks for the MLP's output before the cotangents of its inner arrays come, so the MLP's forward is
# made again first: so many more of its arrays are there, as compiled in two plans of Gemma 3 and one of OLMo 3.
# None are in three compiled plans of Gemma 3 with a period, whose layers ran again just before, and none in plans for
# TPUs (compiled: one of Gemma 3 and one of OLMo 3).
_BEHIND_NORM = 5
# XLA:TPU keeps arrays in tiles of 8 x 128.
_TPU_LANES = 128
# XLA:TPU holds a tick's packed stash twice: one that is sent or was fetched, and the next one.
_TPU_COPIES = 2


class Holder(NamedTuple):
    """Something that holds device memory.

    Attributes:
        name: what it is called; several holders may have one name.
        size_bytes: its bytes on one device.
        moments: those of `MOMENTS` in which it is alive.
    """

    name: str
    size_bytes: float
    moments: frozenset[str]


class Held(NamedTuple):
    """What one device of a stage holds at once, as a table counts it, or at least.

    Attributes:
        num_stages: stages of the pipeline.
        num_groups: groups of layers of a stage.
        num_parts: ticks over which the weights of a group come from the host.
        tick_tokens: tokens of the longest tick.
        prefix_tokens: tokens whose keys and values it has after the all-to-all, with space for a longest tick.
        kv_prefixes: prefixes with keys and values, each of one sequence and one group of layers.
        grad_prefixes: the same with dK and dV.
        waiting_tokens: tokens that wait between two groups of layers.
        head_tokens: tokens whose gradients come from heads and wait.
        batch_bytes: of the batch.
        stash: of the stash.
        heads_first: whether all heads come before the first backward.
        is_one_chunk: whether a step has one chunk.
    """

    num_stages: int
    num_groups: int
    num_parts: int
    tick_tokens: int
    prefix_tokens: int
    kv_prefixes: int
    grad_prefixes: int
    waiting_tokens: float
    head_tokens: float
    batch_bytes: int
    stash: StashBytes
    heads_first: bool
    is_one_chunk: bool


class Ways(NamedTuple):
    """What the work of a layer depends on of the places of a stash; see `StashPlan`."""

    inputs: str
    rest: str
    kv: str
    waiting: str


def sums(holders: Iterable[Holder]) -> dict[str, float]:
    """Returns the bytes that are alive in each moment."""
    found: dict[str, float] = dict.fromkeys(MOMENTS, 0)
    for _, size_bytes, moments in holders:
        for moment in moments:
            found[moment] += size_bytes
    return found


def holders_of(shape: MemoryShape, stash: StashPlan, held: Held, numbers: Numbers = NUMBERS) -> list[Holder]:
    """Returns all holders of one device.

    Unlike the papers, which count model states, K and V, and activations of a token, these are the buffers of the
    program that runs: with the space of one longest tick behind each prefix, the spare slots of idle stages, weights
    gathered in the compute dtype, and float32 sums of gradients.

    Args:
        shape: of the model on a stage.
        stash: places; alpha is in `held`.
        held: what the schedule tells.
        numbers: the fitted ones.
    """
    return [
        *beside_work(shape, stash, held),
        *work_holders(shape, stash, held, numbers),
        *stash_holders(shape, held),
    ]


def beside_work(shape: MemoryShape, stash: StashPlan, held: Held) -> list[Holder]:
    """Returns the holders that depend neither on `held.stash` nor on the place of the rest; arguments as `holders_of`.

    The place of layer inputs counts only as far as it makes tails; see `tails.holds_tails`.
    """
    return [
        *_parameters(shape, held.num_groups, held.num_stages, held.num_parts, stash.kv),
        *_experts_again(shape, held),
        *_gradients(shape, held.num_groups, held.num_stages, held.num_parts, held.heads_first, held.is_one_chunk),
        *_tables(shape, held),
        *prefix_holders(shape, stash, held),
        *between_holders(shape, held),
    ]


def work_holders(shape: MemoryShape, stash: StashPlan, held: Held, numbers: Numbers = NUMBERS) -> tuple[Holder, ...]:
    """Returns what the forward or the backward of a layer works on; arguments as `holders_of`."""
    ways = Ways(stash.inputs, stash.rest, stash.kv, stash.waiting)
    return _work(shape, ways, (held.tick_tokens, held.prefix_tokens), numbers)


@lru_cache(maxsize=1024)
def _parameters(shape: MemoryShape, num_groups: int, num_stages: int, num_parts: int, kv: str) -> tuple[Holder, ...]:
    """Returns parameters with their moments, and the working weights of layers, with those that come from the host."""
    params, _ = optimizer_bytes(shape, num_groups, num_stages)
    coming, _ = on_way_bytes(shape, num_groups, num_stages, num_parts)
    weights = working_params(shape, num_groups, num_stages, kv) * shape.compute_bytes
    return Holder("params", params, ALL), Holder("weights", weights + coming, TICKS)


def working_params(shape: MemoryShape, num_groups: int, num_stages: int, kv: str) -> int:
    """Returns the parameters of layers that a device has in the compute dtype besides its own, with the final norm."""
    if shape.weights == "resident":
        whole = stage_params_of(shape, num_groups, num_stages).whole
        return (whole - params_of_tables(shape, num_stages)) * shape.works_on_copies
    return shape.model.hidden_size + slot_counts(num_stages, num_groups, kv)[0] * _params_of_group(shape)


def _experts_again(shape: MemoryShape, held: Held) -> list[Holder]:
    """Returns experts that a device holds a second time.

    Where gathered, in each tick of a lone chunk those of the group before lie in the loop. Where resident, XLA for TPUs
    makes another layout for forwards than for backwards. A lone stage whose heads come first has one behind the other.
    """
    resident = shape.weights == "resident"
    if not (shape.platform == "tpu" and shape.works_on_copies if resident else held.is_one_chunk):
        return []
    groups = replace(shape, layers=shape.layers * held.num_groups) if resident else shape
    params = sum(map(math.prod, group_experts(groups)))
    lasting = _BEFORE if held.heads_first and held.num_stages == 1 else TICKS
    moments = lasting if resident else BACKWARD | {"forward"}
    return [Holder("weights", params * shape.compute_bytes, moments)] if params else []


@lru_cache(maxsize=4096)
def _gradients(
    shape: MemoryShape, num_groups: int, num_stages: int, num_parts: int, heads_first: bool, is_one_chunk: bool
) -> tuple[Holder, ...]:
    """Returns the sums of gradients of layers: of all groups, or of those that are not scattered yet and a share.

    Arguments as `Held`.
    """
    stage, size = stage_params_of(shape, num_groups, num_stages), shape.sum_bytes
    _, leaving = on_way_bytes(shape, num_groups, num_stages, num_parts)
    first = _BEHIND if heads_first else ALL
    if shape.weights == "gathered":
        totals = stage.own
        if shape.optimizer == "host":
            # The embedding's sum begins with the last group, when no keys and values are made again.
            totals -= stage.matrices + stage.tables - stage.tables // num_tables(shape.model)
        group = slot_counts(num_stages, num_groups, "keep")[1] * _params_of_group(shape)
        if not any(layer_type.experts.count for layer_type, _ in shape.model.counts(shape.layers)):
            return (Holder("grads", (group + totals) * size + leaving, first),)
        # The first scatter makes the totals, and waits for the sums of the last group: so compiled with experts.
        later = first - {"turn"} if heads_first else first
        return Holder("grads", group * size + leaving, first), Holder("grads", totals * size, later)
    layers, tables = stage.whole - params_of_tables(shape, num_stages), params_of_tables(shape, num_stages)
    # Where a stage turns once, the sums of the other groups come into being behind the last group's backward.
    others = (num_groups - 1) * _params_of_group(shape) if heads_first else 0
    # The embedding's sum comes into being behind the backwards of all layers where there is a lone chunk.
    is_last = is_one_chunk and heads_first and num_groups > 1 and num_tables(shape.model) > 1
    late = tables // 2 if is_last else 0
    return (
        Holder("grads", (layers - others) * size, first),
        Holder("grads", others * size, _BEHIND - {"turn"}),
        Holder("grads", (tables - late) * size, ALL),
        Holder("grads", late * size, frozenset({"tables", "update"})),
    )


def _tables(shape: MemoryShape, held: Held) -> list[Holder]:
    """Returns the weights of the embedding and the head, and a tile of logits.

    Resident ones are copies for the whole of the ticks, but no backward reads them behind the last head. Of gathered
    ones a tick with ends has one, and its whole gradient.
    """
    tile = min(held.tick_tokens, LOSS_TOKENS) * -(-shape.model.vocab_size // held.num_stages)
    logits = Holder("work", tile * _LOSS_BYTES * shape.compute_bytes // 2, frozenset({"head"}))
    if shape.weights == "resident":
        of_tables = params_of_tables(shape, held.num_stages) * shape.compute_bytes * shape.works_on_copies
        return [Holder("weights", of_tables, _BEFORE if held.heads_first else TICKS), logits]
    table = table_params(shape.model, held.num_stages)
    return [
        logits,
        Holder("work", table * shape.compute_bytes, _BEFORE),
        Holder("work", table * shape.sum_bytes, frozenset({"head", "tables"})),
    ]


def prefix_holders(shape: MemoryShape, stash: StashPlan, held: Held) -> list[Holder]:
    """Returns keys and values, and states, with their gradients, of all layers of the groups that have some."""
    lanes = _TPU_LANES if shape.platform == "tpu" or shape.kernel == "pallas" else 1

    def padded(head_dim: int) -> int:
        return -(-head_dim // lanes) * lanes

    tails = holds_tails(shape, stash)
    if tails:
        of_group = key_value_elements(shape, held.prefix_tokens, held.tick_tokens * shape.ulysses, padded)
    else:
        elements = (
            count * kv_heads_per_device(layer_type, shape.ulysses) * padded(layer_type.head_dim)
            for layer_type, count in group_caches(shape)
        )
        of_group = held.prefix_tokens * 2 * sum(elements)
    kv = of_group * held.kv_prefixes * shape.compute_bytes
    sum_bytes = 2 if stash.kv_grad_dtype == "bfloat16" else shape.sum_bytes
    backward = BACKWARD | {"tables"} if held.heads_first else TICKS
    if tails and ends_in_windows(shape):
        # Those of whole prefixes come with the group before the last, so compiled; those of tails are few.
        backward -= {"head", "turn"}
    found = [Holder("kv", kv, TICKS), Holder("kv_grad", of_group * held.grad_prefixes * sum_bytes, backward)]
    if states := state_bytes_of_group(shape):
        num_states = held.kv_prefixes + held.grad_prefixes
        found.append(Holder("work", num_states * states, TICKS))
    return found


def stash_holders(shape: MemoryShape, held: Held) -> list[Holder]:
    """Returns the slots of the stash on the device, and the copies on their way; arguments as `holders_of`.

    Of a class with one stash that stays on the device, the stash is gone behind the last group's backward. A fetched
    one is used in its place. A loop over layers reads the stash to its end.
    """
    device, _, copy, last, fetched = held.stash
    copies = [Holder("copies", copy * (_TPU_COPIES if shape.platform == "tpu" else 1), TICKS)]
    is_loop = shape.layers > _LAYERS_WITHOUT_LOOP or not fetched
    if is_loop or held.num_groups == 1 or not held.heads_first:
        return [Holder("stash", device, TICKS), *copies]
    return [
        Holder("stash", device - last, TICKS),
        Holder("stash", last, _BEFORE | {"turn"}),
        Holder("stash", min(last, fetched), _AFTER | {"tables"}),
        *copies,
    ]


def between_holders(shape: MemoryShape, held: Held) -> list[Holder]:
    """Returns what travels between stages, waits between groups of layers, and comes from heads; and the batch."""
    token = shape.model.hidden_size * shape.compute_bytes
    return [
        Holder("waiting", held.waiting_tokens * token, TICKS),
        Holder("carries", 2 * held.tick_tokens * token, TICKS),
        Holder("carries", held.head_tokens * token, TICKS - {"forward"} if held.heads_first else TICKS),
        Holder("batch", held.batch_bytes, TICKS),
    ]


@lru_cache(maxsize=4096)
def _work(shape: MemoryShape, ways: Ways, held_tokens: tuple[int, int], numbers: Numbers) -> tuple[Holder, ...]:
    """Returns what the forward or the backward of a layer works on; of layers of several types what the widest does.

    Args:
        shape: of the model on a stage.
        ways: the places.
        held_tokens: of the longest tick, and those whose keys and values there are, as in `Held`.
        numbers: the fitted ones.
    """
    of_types = [
        _work_of_type(replace(shape, model=layer_type), ways, *held_tokens, numbers)
        for layer_type, _ in shape.model.counts(shape.layers)
    ]
    if ways.inputs == "period":
        again = Holder("work", made_again_bytes(shape, held_tokens[0]), _LAYER)
        # Layers run again in a rebuild as in a forward, before the arrays of a backward come.
        forward = max(_alive_bytes(found, "forward") for found in of_types) if ways.kv == "rebuild" else 0
        of_types = [
            [*found, again, Holder("work", max(0, forward - _alive_bytes(found, "rebuild")), frozenset({"rebuild"}))]
            for found in of_types
        ]
    if len(of_types) == 1:
        return tuple(of_types[0])
    return tuple(_widest(of_types))


def _widest(of_types: list[list[Holder]]) -> Iterable[Holder]:
    """Yields for each moment what the type works on that holds most then: layers run one after another."""
    for moment in MOMENTS:
        widest = max(of_types, key=lambda found: _alive_bytes(found, moment))
        alive = [holder for holder in widest if moment in holder.moments]
        for name in dict.fromkeys(holder.name for holder in alive):
            size = sum(holder.size_bytes for holder in alive if holder.name == name)
            yield Holder(name, size, frozenset({moment}))


def _alive_bytes(holders: Iterable[Holder], moment: str) -> float:
    return sum(size for _, size, moments in holders if moment in moments)


def _work_of_type(shape: MemoryShape, ways: Ways, tokens: int, prefix_tokens: int, numbers: Numbers) -> list[Holder]:
    """Returns what the forward or the backward of a layer of one type works on; arguments as `_work`."""
    model, size = shape.model, shape.compute_bytes
    layer = layer_costs(model)
    # Under ulysses heads of keys and values are replicated until they divide evenly.
    heads = kv_heads_per_device(model, shape.ulysses) * shape.ulysses
    elements = layer.input_elements + layer.attention_elements + heads * model.head_dim
    states = state_counts(model)
    if states is not None:
        elements = layer.input_elements + shape.seq * device_bytes((*states.takes, states.gives), shape.seq, 1, 1)
    # Of the MLP there are gate, up, their product, and a cotangent, until XLA computes the gradients of its matrices:
    # behind the backward of attention. What the rest of a stash brings is there already.
    gated = model.experts.count > 0 or model.mlp != "gelu"
    mlp_size = (model.experts.shared_size if model.experts.count else model.mlp_size) or 0
    of_mlp = (3 + gated - (0 if ways.rest == "recompute" else 1 + gated)) * mlp_size
    is_early = ways.inputs != "period" and shape.platform != "tpu"
    if model.norms != "before" and not model.experts.count and is_early:
        of_mlp += _BEHIND_NORM * mlp_size
    # Where chunks wait on the host and devices exchange, XLA puts these gradients off for layers outside a loop.
    outside_loop = shape.layers if shape.layers <= _LAYERS_WITHOUT_LOOP else 1
    late = 1 + (numbers.late_share * outside_loop if ways.waiting == "host" and shape.seq > 1 else 0)
    # Gradients of the MLP's matrices in float32, and one as it is computed.
    matrices = largest_matrix(model) * ((2 + gated) * shape.sum_bytes + size)
    of_arrays, mixed = numbers.token_arrays * elements, 0
    if states is not None:
        mixed, of_attention = stretch_bytes(model, tokens, shape.seq, shape.sum_bytes)
    elif shape.kernel == "pallas":
        # Of layers outside a loop XLA:TPU makes arrays ahead, so as many are counted as on GPUs.
        if shape.layers > _LAYERS_WITHOUT_LOOP:
            of_arrays = HIDDEN_ARRAYS * layer.input_elements
        of_attention = attention_bytes(shape, tokens, prefix_tokens) + group_work(shape, tokens)
    else:
        of_attention = ring_work(shape, tokens, prefix_tokens) + group_work(shape, tokens)
        of_attention += workspace_bytes(shape, tokens, prefix_tokens)
    of_tokens = int(late * tokens * of_arrays * size)
    if model.experts.count:
        # Half of these arrays are cotangents, which come behind the experts' backward.
        of_tokens //= 2
        of_attention += of_tokens
    found = [
        Holder("work", tokens * (elements + layer.rest_elements) * size + mixed, _F),
        Holder("work", of_tokens, BACKWARD),
        Holder("work", int(late * tokens * of_mlp * size), _LAYER),
        Holder("work", matrices, _LAYER),
        Holder("work", of_attention, BACKWARD - {"mlp"}),
        *_work_of_experts(shape, tokens, of_attention),
    ]
    if ways.inputs == "recompute":
        # A chunk's stash is made again for all layers of the virtual stage.
        stashed = (layer.input_elements + layer.attention_elements) * size + shape.sum_bytes * layer.lse_elements
        found.append(Holder("work", shape.layers * tokens * stashed, _LAYER))
    return found


def _work_of_experts(shape: MemoryShape, tokens: int, of_attention: int) -> list[Holder]:
    """Returns what the experts of a layer work on, which is gone before attention's backward.

    Args:
        shape: of the model on a stage.
        tokens: of the tick on one device.
        of_attention: bytes of what attention's backward works on, which come behind those of the experts.
    """
    work, size = expert_work(shape.model, shape.platform), shape.compute_bytes
    if work is None:
        return []
    # Of the router there are products and probabilities in the dtype of sums.
    besides = 2 * tokens * work.count * shape.sum_bytes
    # Of several layers the arrays of one layer's experts are sliced from those of all; where gathered, its sums too.
    besides += work.sums_bytes(size) if shape.layers > 1 else 0
    # XLA:TPU computes and adds one gradient after another. What it has instead is the arrays in another layout.
    sums = work.sums_bytes(shape.sum_bytes if work.is_tiled else size)
    if shape.weights == "gathered" and shape.layers > 1:
        sums += work.sums_bytes(shape.sum_bytes)
    backward = work.backward_bytes(tokens, size) + sums + besides
    return [
        Holder("experts", work.forward_bytes(tokens, size) + besides, frozenset({"forward"})),
        Holder("experts", backward, frozenset({"mlp"})),
        Holder("experts", max(0, backward - of_attention), frozenset({"turn"})),
    ]


def ring_work(shape: MemoryShape, tokens: int, prefix_tokens: int) -> int:
    """Returns what a hop of the ring sends and receives in a backward, whichever travels; without a ring 0.

    That is queries, output, its cotangent, LSE and the gradient of the queries; or keys, values and their gradients.
    What the kernel for TPUs holds is in `tpu_work`.

    Args:
        shape: of the model on a stage.
        tokens: of the tick on one device.
        prefix_tokens: whose keys and values a device holds, after the all-to-all.
    """
    if shape.seq == shape.ulysses:
        return 0
    model, size = shape.model, shape.compute_bytes
    rows = tokens * shape.ulysses * (model.num_heads // shape.ulysses)
    queries = rows * (model.head_dim * (3 * size + shape.sum_bytes) + shape.sum_bytes)
    heads = kv_heads_per_device(model, shape.ulysses)
    keys = 2 * prefix_tokens * heads * model.head_dim * (size + shape.sum_bytes)
    return 2 * min(queries, keys)


def group_work(shape: MemoryShape, tokens: int) -> int:
    """Returns what the attention of grouped chunks holds: keys, values and their gradients of half the members.

    A message with a part of these, sent and received, comes on top: the gradients' are larger. Without teams: 0.
    """
    if not shape.groups:
        return 0
    members, model = shape.seq // 2, shape.model
    elements = 2 * members * tokens * model.num_kv_heads * cache_head_dim(shape.kernel, model.head_dim)
    return elements * (shape.compute_bytes + 2 * shape.sum_bytes)


def optimizer_bytes(shape: MemoryShape, num_groups: int, num_stages: int) -> tuple[int, int]:
    """Returns the bytes of a device's parameters and moments between steps in its own memory, and on the host.

    On the host the gradients of layers wait as well.
    """
    stage = stage_params_of(shape, num_groups, num_stages)
    whole = state_bytes(shape, num_groups, num_stages)
    if shape.optimizer == "device":
        return whole, 0
    away = (stage.matrices + stage.tables) * _STATES * shape.sum_bytes
    return whole - away, away + stage.matrices * shape.sum_bytes


def state_bytes(shape: MemoryShape, num_groups: int, num_stages: int) -> int:
    """Returns the bytes of a device's parameters and moments, wherever they wait."""
    return stage_params_of(shape, num_groups, num_stages).own * _STATES * shape.sum_bytes


def on_way_bytes(shape: MemoryShape, num_groups: int, num_stages: int, num_parts: int) -> tuple[int, int]:
    """Returns the bytes of a group's weights that come from the host and of gradients that leave for it; else 0.

    A device's share of either waits, and a part of it moves in float32; see `program.share_transfers`.
    """
    if shape.optimizer == "device":
        return 0, 0
    share = stage_params_of(shape, num_groups, num_stages).matrices // num_groups
    if are_unlike(shape.model, shape.layers):
        share = sum(count * layer_share(layer_type, shape.data, shape.seq) for layer_type, count in group_stacks(shape))
    part = 4 * -(-share // num_parts)
    return share * shape.compute_bytes + part, share * shape.sum_bytes + part


def _params_of_group(shape: MemoryShape) -> int:
    return group_costs(shape).params


def params_of_tables(shape: MemoryShape, num_stages: int) -> int:
    """Returns the parameters of a stage's rows of the embedding and the head."""
    return num_tables(shape.model) * table_params(shape.model, num_stages)
