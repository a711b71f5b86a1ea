"""Device and host bytes of a step, from the slots of its table; every device pays alike, as all run one program."""

import math
from dataclasses import dataclass
from functools import lru_cache

from sppo_jax.config import ModelConfig
from sppo_jax.hardware import Cluster, usable_bytes, usable_host_bytes
from sppo_jax.models.counts import layer_costs, layer_matrices, layer_vectors, num_tables
from sppo_jax.plan.check_stash import STASH_PLACES
from sppo_jax.plan.parts import StashPlan
from sppo_jax.plan.spread import padded, spread
from sppo_jax.plan.stash import (
    StashClass,
    TokenBytes,
    classes_of,
    merged_classes,
    short_rows,
    slot_bytes,
    stash_classes,
)
from sppo_jax.plan.table import Table
from sppo_jax.plan.turns import slot_counts
from sppo_jax.plan.waiting import waiting_room
from sppo_jax.planner.shape import Shape
from sppo_jax.planner.workspace import kv_heads_per_device, workspace_bytes
from sppo_jax.units import format_bytes

# A parameter and the two moments that Adam keeps of it.
_STATES = 3
# Logits of a tile of tokens: in float32, their exponentials or gradient in float32, the gradient in the compute dtype.
_LOSS_TOKENS, _LOSS_BYTES = 1024, 10
# Arrays of a token's hidden state, queries, keys and values that a layer's backward holds at once: before and after
# norm, rotary and the all-to-all, with their cotangents. Counted in compiled programs, as all of `work` is.
_WORK_ARRAYS = 7
# On the way back through the MLP there are so many of its arrays (gate, up, their product, two cotangents) and of the
# others. Where weights are resident and layers do not go backward group by group, that adds nothing: other parts are
# charged that are not there at that moment.
_MLP_ARRAYS = 5
# The same where chunks wait on the host, with groups of 1, 2 and more layers. Elsewhere the dX of heads, which only the
# first pass of the backward needs, has been in the place of some of these arrays. Calibrated on five compiled plans.
_LATE_HEAD_ARRAYS = (7.6, 11.0, 8.4)
# The same on stages of one device, which exchanges nothing; calibrated on three plans with groups of 1 and 2 layers.
_LATE_HEAD_ARRAYS_ALONE = (5.4, 5.6, 8.4)
# Copies of a layer's largest matrix at once: a slice, the gradient and its transpose in the compute dtype; two sums.
_MATRIX_COPIES, _MATRIX_SUMS = 3, 2
# XLA:TPU keeps arrays in tiles of 8 x 128, holds a tick's packed stash four times on its way (made, copied, sent, and
# fetched), and copies K, V and what is kept once between forward and backward, which want other layouts.
_TPU_LANES, _TPU_PARTS = 128, 4
# The most layers of a group that are no loop: the last one stands alone, see `pipeline.stage.run_layers`.
_LAYERS_WITHOUT_LOOP = 2


@dataclass(frozen=True, kw_only=True)
class StageParams:
    """Parameters of a stage.

    Args:
        whole: all of them, which a step works with.
        own: those that a device owns between steps.
        matrices: of these, those in matrices of layers.
        tables: of these, those in the embedding and the head.
    """

    whole: int
    own: int
    matrices: int
    tables: int


@lru_cache(maxsize=1024)
def stage_params(model: ModelConfig, layers: int, pipe: int, data: int, seq: int) -> StageParams:
    """Counts a stage's layers and its share of the vocabulary, spread over its devices as `pipeline.storage` does.

    Args:
        model: the model shape.
        layers: layers of a stage.
        pipe: stages.
        data: pipelines.
        seq: devices of a stage in one pipeline.
    """
    arrays = [*layer_matrices(model), *layer_vectors(model)]
    table, tables = (-(-model.vocab_size // pipe), model.hidden_size), num_tables(model)
    whole = layers * sum(map(math.prod, arrays)) + tables * math.prod(table)
    matrices = layers * sum(_share(dims, data, seq) for dims in layer_matrices(model))
    vectors = layers * sum(_share(dims, data, seq) for dims in layer_vectors(model))
    of_tables = tables * _share(table, data, seq)
    # Every device has the final norm.
    own = matrices + vectors + of_tables + model.hidden_size
    return StageParams(whole=whole + model.hidden_size, own=own, matrices=matrices, tables=of_tables)


def largest_matrix(model: ModelConfig) -> int:
    """Returns the parameters of a layer's largest matrix."""
    return max(map(math.prod, layer_matrices(model)))


def _share(dims: tuple[int, ...], data: int, seq: int) -> int:
    return math.prod(padded(dims, spread(dims, data, seq))) // (data * seq)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes a device.

    Args:
        hbm: of device memory, by what they hold.
        host: of host memory.
        host_optimizer: of these, those of parameters, moments and gradients that wait there.
        host_stash: of these, those of the stash.
        save: of host memory for the copy of parameters and moments that an asynchronous save writes; not in `host`.
    """

    hbm: dict[str, int]
    host: int
    host_optimizer: int = 0
    host_stash: int = 0
    save: int = 0

    @property
    def hbm_bytes(self) -> int:
        return sum(self.hbm.values())

    def fits(self, cluster: Cluster) -> bool:
        """Returns whether a device, with a small reserve, has this much."""
        return self.hbm_bytes <= usable_bytes(cluster) and self.host <= usable_host_bytes(cluster)

    def saves(self, cluster: Cluster) -> str:
        """Returns how checkpoints could be saved, by the bytes alone; see `plan.Plan` and `pinned.pinned_of`."""
        return "async" if self.host + self.save <= usable_host_bytes(cluster) else "blocking"

    def excess(self, cluster: Cluster) -> float:
        """Returns by how much this is over a limit, as a share of it; at most 0 if it fits."""
        return max(self.hbm_bytes / usable_bytes(cluster) - 1, self.host / usable_host_bytes(cluster) - 1)

    def describe(self) -> str:
        """Returns the parts, largest first."""
        parts = sorted(self.hbm.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)


def optimizer_bytes(shape: Shape, num_groups: int, num_stages: int) -> tuple[int, int]:
    """Returns the bytes of a device's parameters and moments between steps in its own memory, and on the host.

    On the host the gradients of layers wait as well.
    """
    whole, stage = state_bytes(shape, num_groups, num_stages), _stage_of(shape, num_groups, num_stages)
    if shape.optimizer == "device":
        return whole, 0
    away = (stage.matrices + stage.tables) * _STATES * shape.sum_bytes
    return whole - away, away + stage.matrices * shape.sum_bytes


def state_bytes(shape: Shape, num_groups: int, num_stages: int) -> int:
    """Returns the bytes of a device's parameters and moments, wherever they wait."""
    return _stage_of(shape, num_groups, num_stages).own * _STATES * shape.sum_bytes


def _stage_of(shape: Shape, num_groups: int, num_stages: int) -> StageParams:
    return stage_params(shape.model, shape.layers * num_groups, num_stages, shape.data, shape.seq)


def token_bytes(shape: Shape, stash: StashPlan) -> TokenBytes:
    """Returns the bytes that a virtual stage stashes of a token."""
    layer, size = layer_costs(shape.model), shape.compute_bytes
    inputs = layer.input_elements * size
    attention = layer.attention_elements * size + shape.sum_bytes * layer.lse_elements
    of_place = dict.fromkeys(STASH_PLACES, 0)
    of_place[stash.inputs] += inputs
    of_place[stash.attention] += attention
    rest = layer.rest_elements * size
    # Without the layers' inputs, the virtual stage's input is what everything is computed from.
    chunk_input = inputs if stash.inputs == "recompute" else 0
    return TokenBytes(
        kept=shape.layers * (of_place["keep"] + (rest if stash.rest == "keep" else 0)) + chunk_input,
        shared=shape.layers * of_place["host"],
        rest=shape.layers * rest if stash.rest == "host" else 0,
        kv=shape.layers * layer.kv_elements * size if stash.kv == "host" else 0,
        kept_attention=shape.layers * attention if stash.attention == "keep" else 0,
        shared_attention=shape.layers * attention if stash.attention == "host" else 0,
    )


def stash_bytes(table: Table, shape: Shape, stash: StashPlan) -> tuple[int, int, int]:
    """Returns the bytes of a device's stash buffers: on the device, on the host, and of a copy under way.

    Each class of stashes has a slot more on the device than it needs: what an idle stage writes has to go somewhere.
    """
    token, alone = token_bytes(shape, stash), stash_classes(table, stash, shape.seq)
    merged = merged_classes(table, stash, alone)
    classes = list(alone)
    if merged:
        of_id = {id(one): merged.get(one, one) for one in classes_of(alone)}
        classes = [of_id[id(one)] for one in alone]
    num_rows, num_short = table.host_rows(classes), short_rows(table, alone, merged)
    device = host = copies = 0
    for of_class, count in table.stash_peaks(classes).items():
        kept, away = slot_bytes(of_class, token)
        device, host = device + (count + 1) * kept, host + num_rows[of_class] * away
        copies = max(copies, away, fetched_bytes(of_class, shape, stash))
    for early, late in merged.items():
        host -= num_short[late] * (slot_bytes(late, token)[1] - slot_bytes(early, token)[1])
    return device, host, copies * (_TPU_PARTS if shape.platform == "tpu" else 1)


def _turns_once(table: Table) -> bool:
    """Returns whether all groups of a stage's layers go forward, and all heads, before the first goes backward."""
    return table.num_groups > 1 and not table.heads_among_backwards


def turn_bytes(table: Table, shape: Shape, stash: StashPlan) -> int:
    """Returns what the turn from forward to backward and a later backward do not both hold, of a device's stash.

    Where a stage's sums are whole and nothing but a last stash stays on the device, that stash is gone when the sums of
    the next groups come into being. A fetched one is used in its place. Where a group's layers are a loop, which they
    are from the third layer on, the stash stays: the loop reads it.
    """
    if shape.weights == "gathered" or not _turns_once(table) or shape.layers > _LAYERS_WITHOUT_LOOP:
        return 0
    of_groups = stash_classes(table, stash, shape.seq)
    classes = set(classes_of(of_groups))
    if all(not of_class.uses_host for of_class in classes):
        return 0
    token = token_bytes(shape, stash)
    peaks = table.stash_peaks(of_groups)
    last = sum(2 * slot_bytes(one, token)[0] for one, count in peaks.items() if count == 1 and not one.uses_host)
    sums = (table.num_groups - 1) * shape.layers * layer_costs(shape.model).params * shape.sum_bytes
    return min(max(0, last - max(fetched_bytes(one, shape, stash) for one in classes)), sums)


def refetch_bytes(of_class: StashClass, shape: Shape, stash: StashPlan) -> int:
    """Returns the bytes that come back from the host so that a chunk's keys and values are there again.

    That is the keys and values themselves, or the layer inputs to compute them from.
    """
    if stash.kv == "host":
        return of_class.host_kv * token_bytes(shape, stash).kv
    if stash.kv != "rebuild":
        return 0
    return of_class.host_inputs * shape.layers * layer_costs(shape.model).input_elements * shape.compute_bytes


def fetched_bytes(of_class: StashClass, shape: Shape, stash: StashPlan) -> int:
    """Returns the bytes that come back from the host for one chunk: its stash, and for its keys and values."""
    token = token_bytes(shape, stash)
    unread = of_class.host_kv * token.kv
    return slot_bytes(of_class, token)[1] - unread + refetch_bytes(of_class, shape, stash)


def predict_memory(table: Table, shape: Shape, stash: StashPlan) -> Memory:
    """Predicts the bytes of one device, part by part.

    Unlike the papers, which count model states, K and V, and activations of a token, this counts the buffers of the
    program that runs: with the space of one longest tick behind each prefix, the spare slots of idle stages, weights
    gathered in the compute dtype, and float32 sums of gradients. `work` is what the fullest moment takes: a layer's
    backward, a tile of logits, or the gradient of a gathered table. Where every head is through before the first
    backward, the logits exist before dK and dV.
    """
    model, size = shape.model, shape.compute_bytes
    tokens, most = sum(table.chunk_lengths), table.most_tokens
    local = -(-most // shape.seq)
    params, host_optimizer = optimizer_bytes(shape, table.num_groups, table.num_stages)
    # Under ulysses a device has its heads of all tokens of its ring neighbours, elsewhere all heads of its tokens.
    heads = kv_heads_per_device(model, shape.ulysses)
    prefix = (tokens + most) * shape.ulysses // shape.seq
    head_dim = model.head_dim if shape.platform != "tpu" else -(-model.head_dim // _TPU_LANES) * _TPU_LANES
    peaks, of_group = table.prefix_peaks, shape.layers * prefix * 2 * heads * head_dim
    kv = of_group * (peaks.kept if stash.kv == "keep" else peaks.rebuilt)
    kv_grad = of_group * peaks.grads * (2 if stash.kv_grad_dtype == "bfloat16" else shape.sum_bytes)
    waiting = (table.waiting_peak + 1) * local if table.waiting_peak else 0
    stash_device, host_stash, copies = stash_bytes(table, shape, stash)
    host = host_stash
    stash_device -= turn_bytes(table, shape, stash)
    if stash.waiting == "host":
        # One chunk is used while the next one comes.
        waiting, host = 2 * local, host + waiting_room(table).num_rows * waiting_bytes(shape, local)
    head_share = table.head_peak * -(-local // table.num_stages)
    weights, grads = weight_bytes(shape, table.num_groups, table.num_stages, stash.kv)
    coming, leaving = on_way_bytes(table, shape)
    lone, idle = table.num_sequences == table.num_chunks == 1, (0, 0)
    if _turns_once(table):
        idle = idle_table_bytes(shape, table.num_stages, lone)
    loss = min(local, _LOSS_TOKENS) * -(-model.vocab_size // table.num_stages) * _LOSS_BYTES * size // 2
    tables = table_work(shape, table.num_stages)
    loss += sum(tables) + idle[0]
    if not table.heads_among_backwards:
        loss -= kv_grad
    copied = kv * size + stash_device if shape.platform == "tpu" else 0
    layer_work = backward_work(shape, stash, local, _turns_once(table))
    layer_work += group_work(shape, local) + ring_work(shape, local, prefix) + workspace_bytes(shape, local, prefix)
    return Memory(
        hbm={
            "params": params,
            "weights": weights - idle[0] + coming,
            "grads": grads - idle[1] + leaving,
            "kv": kv * size,
            "kv_grad": kv_grad,
            "stash": stash_device,
            "copies": copies,
            "waiting": waiting_bytes(shape, waiting),
            "carries": (2 * local + head_share) * model.hidden_size * size,
            "batch": batch_bytes(table, shape.seq),
            "work": max(layer_work, loss, tables[1], idle[1]) + copied,
        },
        host=host + host_optimizer,
        host_optimizer=host_optimizer,
        host_stash=host_stash,
        save=state_bytes(shape, table.num_groups, table.num_stages),
    )


def waiting_bytes(shape: Shape, tokens: int) -> int:
    """Returns the bytes of a chunk of so many tokens of a device that waits between two groups of layers."""
    return tokens * shape.model.hidden_size * shape.compute_bytes


def weight_bytes(shape: Shape, num_groups: int, num_stages: int, kv: str) -> tuple[int, int]:
    """Returns the bytes of the working weights that a device has in every tick, and of its gradient sums.

    Weights of all layers are those of the parameters themselves where no other device shares them and no dtype differs.
    """
    stage = _stage_of(shape, num_groups, num_stages)
    if shape.weights == "resident":
        return stage.whole * shape.compute_bytes * shape.works_on_copies, stage.whole * shape.sum_bytes
    group = shape.layers * layer_costs(shape.model).params
    num_weights, num_sums = slot_counts(num_stages, num_groups, kv)
    # Every device has the final norm.
    weights = shape.model.hidden_size + num_weights * group
    totals = stage.own
    if shape.optimizer == "host":
        # The embedding's sum begins with the last group, when no keys and values are made again, and adds to no peak.
        totals -= stage.matrices + stage.tables - stage.tables // num_tables(shape.model)
    return weights * shape.compute_bytes, (num_sums * group + totals) * shape.sum_bytes


def on_way_bytes(table: Table, shape: Shape) -> tuple[int, int]:
    """Returns the bytes of a group's weights that come from the host and of gradients that leave for it; else 0.

    A device's share of either waits, and a part of it moves in float32; see `plan.share_trips`.
    """
    if shape.optimizer == "device":
        return 0, 0
    stage = _stage_of(shape, table.num_groups, table.num_stages)
    share = stage.matrices // table.num_groups
    part = 4 * -(-share // max(table.num_stages, table.wave * table.num_chunks))
    return share * shape.compute_bytes + part, share * shape.sum_bytes + part


def idle_table_bytes(shape: Shape, num_stages: int, lone: bool) -> tuple[int, int]:
    """Returns the bytes of resident tables, and of their sums, that no backward of a layer has beside it.

    That is so where a step turns once from forward to backward: no backward reads the embedding or the head.

    Args:
        shape: of the model on a stage.
        num_stages: which share the tables.
        lone: whether a step has one chunk, which adds to the embedding's sum behind the backwards of all layers.
    """
    if shape.weights == "gathered":
        return 0, 0
    params, tables = table_params(shape.model, num_stages), num_tables(shape.model)
    late = shape.sum_bytes if lone and tables > 1 else 0
    return tables * params * shape.compute_bytes * shape.works_on_copies, params * late


def table_params(model: ModelConfig, num_stages: int) -> int:
    """Returns the parameters of a stage's rows of the embedding, or of the head."""
    return -(-model.vocab_size // num_stages) * model.hidden_size


def table_work(shape: Shape, num_stages: int) -> tuple[int, int]:
    """Returns the bytes of a gathered table and of its whole gradient, which exist in ticks with ends; else 0."""
    if shape.weights == "resident":
        return 0, 0
    params = table_params(shape.model, num_stages)
    return params * shape.compute_bytes, params * shape.sum_bytes


def batch_bytes(table: Table, seq: int) -> int:
    """Returns the bytes of a pipeline's sequences on one device.

    Four int32 of each of the device's own tokens come in. They are held a second time, with space for a longest tick
    behind each sequence. Of the sequences in flight the device holds the positions and documents of all tokens.
    """
    tokens, most = sum(table.chunk_lengths), table.most_tokens
    own = table.num_sequences * (2 * tokens + most) // seq
    return 4 * (4 * own + 2 * table.kv_peak * (tokens + most))


def backward_work(shape: Shape, stash: StashPlan, tokens: int, turns_once: bool = False) -> int:
    """Returns what a layer's backward works on: the gradient of its weights, and activations of a tick's tokens."""
    layer, size = layer_costs(shape.model), shape.compute_bytes
    matrix = largest_matrix(shape.model) * (_MATRIX_COPIES * size + _MATRIX_SUMS * shape.sum_bytes)
    work = matrix + tokens * _elements_at_once(shape, stash, turns_once) * size
    if stash.inputs == "recompute":
        # A chunk's stash is made again for all layers of the virtual stage.
        stashed = (layer.input_elements + layer.attention_elements) * size + shape.sum_bytes * layer.lse_elements
        work += shape.layers * tokens * stashed
    return work


def _elements_at_once(shape: Shape, stash: StashPlan, turns_once: bool) -> int:
    layer, model = layer_costs(shape.model), shape.model
    elements = layer.input_elements + layer.attention_elements + layer.kv_elements // 2
    at_once = _WORK_ARRAYS * elements
    gated = model.mlp == "swiglu"
    if shape.weights == "gathered" or turns_once:
        # What the rest of a stash brings of the MLP is there already.
        of_mlp = _MLP_ARRAYS - (0 if stash.rest == "recompute" else 1 + gated)
        at_once = max(at_once, of_mlp * model.mlp_size + _MLP_ARRAYS * elements)
    if stash.waiting == "host":
        # Without a gate there are half as many arrays of the MLP.
        counts = _LATE_HEAD_ARRAYS_ALONE if shape.seq == 1 else _LATE_HEAD_ARRAYS
        of_mlp = model.mlp_size if gated else model.mlp_size // 2
        at_once = max(at_once, int(counts[min(shape.layers, 3) - 1] * (of_mlp + elements)))
    return at_once


def ring_work(shape: Shape, tokens: int, prefix_tokens: int) -> int:
    """Returns what a hop of the ring sends and receives in a backward, whichever travels; without a ring 0.

    That is queries, output, its cotangent, LSE and the gradient of the queries; or keys, values and their gradients.

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
    keys_values = 2 * prefix_tokens * heads * model.head_dim * (size + shape.sum_bytes)
    return 2 * min(queries, keys_values)


def group_work(shape: Shape, tokens: int) -> int:
    """Returns what the attention of grouped chunks holds: keys, values and their gradients of half the members.

    A message with a part of these, sent and received, comes on top: the gradients' are larger. Without groups: 0.
    """
    if not shape.groups:
        return 0
    members, model = shape.seq // 2, shape.model
    elements = 2 * members * tokens * model.num_kv_heads * model.head_dim
    return elements * (shape.compute_bytes + 2 * shape.sum_bytes)
