"""Device and host bytes of a step, from the slots of its table; every device pays alike, as all run one program."""

import math
from dataclasses import dataclass

from sppo_jax.config import ModelConfig
from sppo_jax.hardware import Cluster
from sppo_jax.planner.costs import layer_costs, vocabulary_params
from sppo_jax.planner.plan import StashPlan
from sppo_jax.schedule.diagonals import MIN_HOST_GAP, diagonal_groups, group_gaps, unit_diagonals
from sppo_jax.schedule.slots import head_slots, kv_slots, stash_slots
from sppo_jax.schedule.table import Table, Unit
from sppo_jax.units import format_bytes

# Gradients and both Adam moments are as large as a parameter each, with the parameter itself that makes four.
_STATES = 4
# Tokens whose logits the loss holds at once, and float32 copies of them (logits, their gradient, the exponentials).
_LOSS_TOKENS, _LOSS_COPIES = 1024, 3
# Copies of a layer's activations that a tick works on: values, gradients, temporaries.
_WORK_COPIES = 3
# Share of device memory that stays free for the compiler's own buffers and fragmentation.
_RESERVE = 0.06


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the memory of a stage depends on besides its table and stash.

    Args:
        model: the model shape.
        layers: layers of a virtual stage.
        seq: devices of a stage.
        ulysses: devices over which heads are spread.
        compute_bytes: bytes of an activation.
    """

    model: ModelConfig
    layers: int
    seq: int
    ulysses: int
    compute_bytes: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes a device, by what they hold."""

    hbm: dict[str, int]
    host: int

    @property
    def hbm_bytes(self) -> int:
        return sum(self.hbm.values())

    def fits(self, cluster: Cluster) -> bool:
        """Returns whether a device, with a small reserve, has this much."""
        room = cluster.device.hbm_bytes * (1 - _RESERVE)
        return self.hbm_bytes <= room and self.host <= cluster.device_host_bytes

    def describe(self) -> str:
        """Returns the parts, largest first."""
        parts = sorted(self.hbm.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)


def offload_bytes(shape: Shape, stash: StashPlan) -> tuple[int, int]:
    """Returns the bytes of a token of a virtual stage that alpha divides, and those that all go to the host."""
    layer, size = layer_costs(shape.model), shape.compute_bytes
    shared = layer.input_elements * size if stash.inputs == "host" else 0
    if stash.attention == "host":
        shared += layer.attention_elements * size + 4 * layer.lse_elements
    rest = layer.rest_elements * size if stash.rest == "host" else 0
    return shape.layers * shared, shape.layers * rest


def kept_bytes(shape: Shape, stash: StashPlan) -> int:
    """Returns the bytes of a token of a virtual stage that always stay on the device."""
    layer, size = layer_costs(shape.model), shape.compute_bytes
    kept = layer.input_elements * size if stash.inputs == "keep" else 0
    if stash.attention == "keep":
        kept += layer.attention_elements * size + 4 * layer.lse_elements
    if stash.rest == "keep":
        kept += layer.rest_elements * size
    # Without the layers' inputs, the virtual stage's input is what everything is computed from.
    chunk_input = layer.input_elements * size if stash.inputs == "recompute" else 0
    return shape.layers * kept + chunk_input


def stash_bytes(table: Table, shape: Shape, stash: StashPlan) -> tuple[int, int, int]:
    """Returns the bytes of a device's stash buffers: on the device, on the host, and of copies under way."""
    groups, gaps, diagonals = diagonal_groups(table), group_gaps(table), unit_diagonals(table)
    longest = longest_chunks(table)
    shared, rest = offload_bytes(shape, stash)
    kept = kept_bytes(shape, stash)

    # Stashes of one length and share have one shape and take turns in the same buffers.
    def shape_of(unit: Unit) -> tuple[int, float]:
        diagonal = diagonals[unit.sequence, unit.chunk, unit.virtual_stage]
        group = groups[diagonal]
        away = stash.alpha[diagonal] * shared + (rest if gaps[group] >= MIN_HOST_GAP else 0)
        return -(-longest[group] // shape.seq), away

    device = host = copies = 0
    for (tokens, away), (count, _) in stash_slots(table, shape_of).items():
        device += int(count * tokens * (kept + shared + rest - away))
        host += int(count * tokens * away)
        # One copy leaves while another comes back.
        copies = max(copies, int(2 * tokens * away))
    return device, host, copies


def longest_chunks(table: Table) -> tuple[int, ...]:
    """Returns the longest chunk of each diagonal group, in tokens over all devices of a stage."""
    groups = diagonal_groups(table)
    longest = [0] * (max(groups) + 1)
    for (_, chunk, _), diagonal in unit_diagonals(table).items():
        group = groups[diagonal]
        longest[group] = max(longest[group], table.chunk_lengths[chunk])
    return tuple(longest)


def predict_memory(table: Table, shape: Shape, stash: StashPlan) -> Memory:
    """Predicts the bytes of one device.

    States are the parameters of the stage's layers and of its share of the vocabulary, with gradients and Adam
    moments, and the copy in the compute dtype. Keys and values, and their gradients, have one slot for each
    sequence that the table keeps in flight, each one longest chunk longer than the sequence.
    """
    model, size = shape.model, shape.compute_bytes
    layer = layer_costs(model)
    stage_layers = shape.layers * table.num_groups
    params = stage_layers * layer.params + -(-vocabulary_params(model) // table.num_stages)
    tokens = -(-max(table.chunk_lengths) // shape.seq)
    # Under ulysses a device has its heads of all tokens of its ring neighbours, elsewhere all heads of its tokens.
    heads = kv_heads_per_device(model, shape.ulysses)
    prefix = (sum(table.chunk_lengths) + max(table.chunk_lengths)) * shape.ulysses // shape.seq
    kv = kv_slots(table)[0] * stage_layers * prefix * 2 * heads * model.head_dim
    stash_device, stash_host, copies = stash_bytes(table, shape, stash)
    everything = layer.input_elements + layer.attention_elements + layer.rest_elements + layer.kv_elements
    vocabulary = -(-model.vocab_size // table.num_stages)
    return Memory(
        hbm={
            "states": params * (_STATES * max(4, size) + (size if size < 4 else 0)),
            "kv": kv * size,
            "kv_grad": kv * (2 if stash.kv_grad_dtype == "bfloat16" else max(4, size)),
            "stash": stash_device,
            "copies": copies,
            "carries": (3 + head_slots(table)[0]) * tokens * model.hidden_size * size,
            "work": tokens * (_WORK_COPIES * everything * size + 2 * 4 * layer.attention_elements),
            "loss": min(tokens, _LOSS_TOKENS) * vocabulary * 4 * _LOSS_COPIES,
        },
        host=stash_host,
    )


def kv_heads_per_device(model: ModelConfig, ulysses: int) -> int:
    """Returns the key-value heads a device holds under `ulysses`; they are replicated until they divide evenly."""
    return math.lcm(model.num_kv_heads, ulysses) // ulysses
