"""Systems that others published, modelled with this project's cost of compute and their own way of sending and waiting.

These systems differ from this project in four ways. Megatron splits weights over the tensor-parallel GPUs of a stage
and gathers activations. Its stages run freely instead of in lock-step. Its last stage alone computes the head.
Context-parallel systems have no stages and hide their ring.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from sppo_jax.config import ModelConfig, config_from_dict
from sppo_jax.hardware import DEVICES, Cluster, make_cluster
from sppo_jax.models.counts import layer_costs
from sppo_jax.plan.parts import MeshShape
from sppo_jax.predict.seconds.costs import CostModel, cost_model
from sppo_jax.predict.seconds.stage_shape import Recompute, StageShape

GPU, GPUS_PER_NODE, NODE_BYTES = DEVICES["a100-80g"], 8, 2e12
Op = tuple[str, int, int, int]  # kind, sequence, segment, virtual stage


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The constants that are calibrated.

    Args:
        matmul_efficiency: share of the peak that a long matmul reaches.
        attention_efficiency: the same of attention's forward.
        overhead_s: seconds of a unit whatever its length.
        attention_backward: seconds of attention's backward for one of its forward; 2.5 as in FLOPs.
    """

    matmul_efficiency: float
    attention_efficiency: float
    overhead_s: float
    attention_backward: float = 2.5


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A published configuration.

    Args:
        model: preset.
        gpu: device of `sppo_jax.hardware`.
        length: tokens of a sequence.
        tensor: GPUs of a stage, Megatron's tensor and sequence parallelism.
        pipe: stages.
        sequences: sequences (micro-batches) of a step.
        segments: parts of equal FLOPs that a sequence is cut into.
        interleave: virtual stages of a stage.
        vocab_size: 0: the preset's.
        heads: query heads, key-value heads and their size; empty: the preset's.
        recompute_linear: whether backward recomputes the linear parts.
        recompute_attention: share of the (query, key) pairs whose attention backward recomputes.
        offload: "none", "hidden" (copies hide behind compute), or "full" (everything is copied, and waited for).
        no_bubble: whether idle stages are put to use, at no cost.
        context: GPUs over which a system without stages spreads the sequence; 0: there are stages.
        ulysses: whether those exchange heads, without hiding it.
        backward_share: share of a device's cores that attention's backward uses.
        network_bytes_s: bytes a second of a GPU between nodes.
        host_link_bytes_s: bytes a second of a GPU to its host, one way.
    """

    model: str
    length: int
    gpu: str = "a100-80g"
    tensor: int = 1
    pipe: int = 1
    sequences: int = 1
    segments: int = 1
    interleave: int = 1
    vocab_size: int = 0
    heads: tuple[int, ...] = ()
    recompute_linear: bool = False
    recompute_attention: float = 0.0
    offload: str = "none"
    no_bubble: bool = False
    context: int = 0
    ulysses: bool = False
    backward_share: float = 1.0
    network_bytes_s: float = 25e9
    host_link_bytes_s: float = 13e9

    @property
    def num_devices(self) -> int:
        return self.context or self.tensor * self.pipe


@lru_cache
def model_of(setup: Setup) -> ModelConfig:
    """Returns the model shape of a setup."""
    heads = dict(zip(("num_heads", "num_kv_heads", "head_dim"), setup.heads, strict=False))
    model = {"preset": setup.model, **heads, **({"vocab_size": setup.vocab_size} if setup.vocab_size else {})}
    return config_from_dict({"model": model, "sequence": {"length": setup.length}, "train": {"steps": 1}}).model


def tokens_per_gpu_s(setup: Setup, rates: Rates) -> float:
    """Predicts the throughput of a setup."""
    step_s = _context_step_s(setup, rates) if setup.context else _pipeline_step_s(setup, rates)
    return setup.sequences * setup.length / (setup.num_devices * step_s)


def segment_lengths(setup: Setup) -> list[int]:
    """Cuts a sequence into segments of equal FLOPs from its end, as Seq1F1B's solver does.

    A segment of x tokens that ends at token P costs L ((4 d + 3) n (x P - x^2 / 2) + 8 h n d x + 4 h f x) + 4 h V x.
    """
    model = model_of(setup)
    pair = model.num_layers * (4 * model.head_dim + 3) * model.num_heads
    hidden, query = model.hidden_size, model.num_heads * model.head_dim
    token = model.num_layers * (8 * hidden * query + 4 * hidden * model.mlp_size) + 4 * hidden * model.vocab_size
    share = (pair * setup.length**2 / 2 + token * setup.length) / setup.segments
    lengths, end = [], setup.length
    for _ in range(setup.segments - 1):
        b = pair * end + token
        tokens = int(2 * share / (b + math.sqrt(b * b - 2 * pair * share))) // setup.tensor * setup.tensor
        lengths.append(tokens)
        end -= tokens
    return [end, *reversed(lengths)]


def _costs(setup: Setup, rates: Rates, *, layers: int, devices: int, attention: bool = False) -> CostModel:
    device = DEVICES[setup.gpu]
    device = replace(
        device,
        matmul_efficiency=rates.matmul_efficiency,
        attention_efficiency=rates.attention_efficiency,
        attention_backward=rates.attention_backward / setup.backward_share,
        overhead_s=rates.overhead_s,
        network_bytes_s=setup.network_bytes_s,
        # Split weights are read by every GPU in part; whole ones by every GPU.
        overhead_tokens=device.overhead_tokens // setup.tensor,
    )
    if not setup.context:
        # Gradients of split weights are charged in `_Stages`.
        device = replace(device, hbm_bytes_s=math.inf)
    return cost_model(
        model_of(setup),
        make_cluster(device, devices),
        StageShape(
            mesh=MeshShape(data=1, pipe=1, seq=devices),
            ulysses=devices,
            ring=1,
            layers=layers,
            compute_bytes=2,
            kernel="cudnn",
            length=setup.length,
        ),
        Recompute(linear=setup.recompute_linear, attention=attention),
    )


def _context_step_s(setup: Setup, rates: Rates) -> float:
    """Returns the seconds of a step without stages: compute alone, unless heads are exchanged in the open."""
    model = model_of(setup)
    costs = _costs(setup, rates, layers=model.num_layers, devices=setup.context)
    recomputed = replace(costs, recompute=costs.recompute._replace(attention=True))
    forward, backward = (costs.compute_s(kind, 0, setup.length) for kind in "FB")
    again = setup.recompute_attention * (recomputed.compute_s("B", 0, setup.length) - backward)
    sent = sum(recomputed.transfer_s(kind, 0, setup.length) for kind in "FB") if setup.ulysses else 0.0
    return forward + backward + again + sent + costs.compute_s("H", 0, setup.length)


class _Stages:
    """Seconds of the ops of a Megatron pipeline."""

    def __init__(self, setup: Setup, rates: Rates) -> None:
        self.setup, self.rates, self.model = setup, rates, model_of(setup)
        self.num_virtual = setup.pipe * setup.interleave
        self.layers = self.model.num_layers // self.num_virtual
        self.costs = _costs(setup, rates, layers=self.layers, devices=setup.tensor)
        self.lengths = segment_lengths(setup)
        self.starts = list(accumulate(self.lengths, initial=0))
        self.cache: dict[tuple[str, int, bool], float] = {}
        device = self.costs.cluster.device
        cluster = Cluster(device=device, num_hosts=99, devices_per_host=8, host_bytes=0)
        self.hbm_bytes_s = DEVICES[setup.gpu].hbm_bytes_s
        # A collective over several nodes crosses between them on the adapters of all GPUs of a node.
        across = min(device.link_bytes_s, device.network_bytes_s * GPUS_PER_NODE)
        self.tensor_link = device.link_bytes_s if setup.tensor <= GPUS_PER_NODE else across
        self.hop_link = cluster.link_bytes_s(setup.tensor * setup.pipe)

    def seconds(self, op: Op) -> float:
        kind, _, segment, virtual_stage = op
        key = kind, segment, virtual_stage == self.num_virtual - 1
        if key not in self.cache:
            self.cache[key] = self._seconds(*key)
        return self.cache[key]

    def hop(self, segment: int) -> float:
        """Returns the seconds in which a segment moves to the next stage; every GPU sends its part."""
        if self.setup.pipe == 1:
            return 0.0
        return self.lengths[segment] * self.model.hidden_size * 2 / self.setup.tensor / self.hop_link

    def _seconds(self, kind: str, segment: int, last: bool) -> float:
        setup, start, tokens = self.setup, self.starts[segment], self.lengths[segment]
        gathered = self._gathered_s(tokens)
        seconds = self.costs.compute_s(kind, start, tokens) + self._hbm_s(kind, start + tokens)
        # Forward gathers and scatters around attention and MLP. Backward hides four of its six behind matmuls.
        seconds += self.layers * (4 if kind == "F" else 2) * gathered
        if kind == "B" and setup.recompute_attention:
            again = replace(self.costs, recompute=self.costs.recompute._replace(attention=True)).compute_s(
                "B", start, tokens
            )
            seconds += setup.recompute_attention * (again - self.costs.compute_s("B", start, tokens))
        if kind == "B" and setup.recompute_linear:
            seconds += self.layers * 4 * gathered
        if setup.offload == "full":
            seconds = max(seconds, self.offload_bytes(tokens) / setup.host_link_bytes_s)
        if last:
            # Only the last stage computes head and loss, a third of them in the forward.
            seconds += self.costs.compute_s("H", start, tokens) * (1 if kind == "F" else 2) / 3 + gathered
        return seconds + self.rates.overhead_s

    def _gathered_s(self, tokens: int) -> float:
        size = tokens * self.model.hidden_size * 2
        return size * (self.setup.tensor - 1) / self.setup.tensor / self.tensor_link

    def _hbm_s(self, kind: str, reach: int) -> float:
        """Returns what device memory adds: float32 gradients are summed, the cache of k and v is copied."""
        layer = layer_costs(self.model)
        weights = layer.params / self.setup.tensor * 8 if kind == "B" else 0
        prefix = reach * layer.kv_elements * 2 / self.setup.tensor if self.setup.segments > 1 else 0
        # Forward reads and writes the cache; backward writes the prefix's gradient, reads it and the sum, writes that.
        return self.layers * (weights + prefix * (2 if kind == "F" else 4)) / self.hbm_bytes_s

    def offload_bytes(self, tokens: int) -> float:
        """Returns the bytes of a segment's activations on a GPU, k and v (4 of 38 h) excepted."""
        return 34 * self.model.hidden_size * tokens * self.layers / self.setup.tensor


def _pipeline_step_s(setup: Setup, rates: Rates) -> float:
    stages = _Stages(setup, rates)
    orders = [_order(setup, stage) for stage in range(setup.pipe)]
    if setup.no_bubble:
        return max(sum(stages.seconds(op) for op in order) for order in orders)
    if setup.interleave > 1:
        return _run_exchanging(orders, stages)
    return _run_freely(orders, stages)


def _order(setup: Setup, stage: int) -> list[Op]:
    """Returns a stage's ops: 1F1B, Seq1F1B and their interleaved forms as their code has them; SPPO is one sequence."""
    pipe, segments, groups = setup.pipe, setup.segments, setup.interleave
    total = setup.sequences * segments * groups
    if groups == 1:
        warm = min(pipe - stage + segments - 2, total)
    else:
        warm = min((groups - 1) * pipe + 2 * (pipe - stage - 1) + segments - 1, total)

    def op(kind: str, number: int) -> Op:
        place, group = number, 0
        if groups > 1:
            period = pipe * groups
            place, group = number // period * pipe + number % pipe, number % period // pipe
        sequence, segment = divmod(place, segments)
        if kind == "B":
            group, segment = groups - 1 - group, segments - 1 - segment
        return kind, sequence, segment, group * pipe + stage

    ops = [op("F", number) for number in range(warm)]
    for number in range(warm, total):
        ops += [op("F", number), op("B", number - warm)]
    return ops + [op("B", number) for number in range(total - warm, total)]


def _run_freely(orders: list[list[Op]], stages: _Stages) -> float:
    """Returns when the last op ends if each starts as soon as its stage and its input are there."""
    done: dict[Op, float] = {}
    free, place = [0.0] * len(orders), [0] * len(orders)
    while any(place[stage] < len(order) for stage, order in enumerate(orders)):
        for stage, order in enumerate(orders):
            while place[stage] < len(order):
                kind, sequence, segment, virtual = op = order[place[stage]]
                if kind == "F":
                    needed = ("F", sequence, segment, virtual - 1) if virtual else None
                else:
                    last = virtual == stages.num_virtual - 1
                    needed = ("F", sequence, segment, virtual) if last else ("B", sequence, segment, virtual + 1)
                if needed is not None and needed not in done:
                    break
                start = max(free[stage], done[needed] if needed else 0.0)
                free[stage] = done[op] = start + stages.seconds(op) + stages.hop(segment)
                place[stage] += 1
    return max(free)


def _run_exchanging(orders: list[list[Op]], stages: _Stages) -> float:
    """Returns when the last op ends if stages wait for their neighbours after each op, or pair of ops.

    Interleaved Megatron, unless told to overlap, sends and receives both ways in one call after each pair of a forward
    and a backward; so nobody goes on before its neighbours round the ring are through with theirs.
    """
    steps = [_paired(order) for order in orders]
    count = len(steps)
    ends = [0.0] * count
    for tick in range(max(stage + len(own) for stage, own in enumerate(steps))):
        busy = []
        for stage, own in enumerate(steps):
            ops = own[tick - stage] if 0 <= tick - stage < len(own) else ()
            busy.append(sum(stages.seconds(op) + stages.hop(op[2]) for op in ops))
        ends = [
            max(ends[stage - 1], ends[stage], ends[(stage + 1) % count]) + seconds for stage, seconds in enumerate(busy)
        ]
    return max(ends)


def _paired(order: list[Op]) -> list[tuple[Op, ...]]:
    """Returns a stage's ops with each forward and the backward after it as one step."""
    steps: list[tuple[Op, ...]] = []
    for op in order:
        if op[0] == "B" and steps and len(steps[-1]) == 1 and steps[-1][0][0] == "F":
            steps[-1] = (*steps[-1], op)
        else:
            steps.append((op,))
    return steps


# -- memory ---------------------------------------------------------------------------------------------------------

_STATE_BYTES = 18  # bfloat16 parameter, float32 gradient, parameter and both moments
_TOKEN_BYTES = 42  # activations of a token and layer in units of h bytes: SPPO's Fig. 9 counts 38, rotary keeps 4 more
_CACHE_BYTES = 4  # the cache that segments put together of k and v, beside the k and v saved for backward; same units
_FRAMEWORK_BYTES = 2e9  # CUDA context and NCCL buffers


def _state_bytes(setup: Setup) -> float:
    model = model_of(setup)
    params = model.num_layers * layer_costs(model).params + 2 * model.vocab_size * model.hidden_size
    return _STATE_BYTES * params / (setup.tensor * setup.pipe)


def memory_bytes(setup: Setup) -> float:
    """Predicts the bytes of the first stage's GPUs, which hold most: states, and activations of what is in flight.

    Where sequences are cut, Seq1F1B's code also holds the cache of k and v, and the gradients of one sequence's.
    """
    model, lengths = model_of(setup), segment_lengths(setup)
    layers = model.num_layers // (setup.pipe * setup.interleave)
    held: dict[Op, int] = {}
    most = 0
    for kind, sequence, segment, virtual in _order(setup, 0):
        if kind == "F":
            held["F", sequence, segment, virtual] = lengths[segment]
            most = max(most, sum(held.values()))
        else:
            del held["F", sequence, segment, virtual]
    cached = _CACHE_BYTES * (most + setup.length * setup.interleave) if setup.segments > 1 else 0
    activations = (most * _TOKEN_BYTES + cached) * layers * model.hidden_size / setup.tensor
    return _state_bytes(setup) + activations + _FRAMEWORK_BYTES


def longest_tokens(setup: Setup) -> float:
    """Predicts the longest sequence of a setup whose bytes grow with the sequence alone.

    With offload: k, v, dk and dv stay on the device and 34 h bytes a token and layer go to the host. Without, with full
    recomputation: layer inputs, one layer's activations, four gathered copies of the whole sequence (the input of a
    matmul and its output before the scatter, forward and backward), and logits with their gradient.
    """
    model, devices = model_of(setup), setup.tensor * setup.pipe
    hidden = model.hidden_size
    free_bytes = GPU.hbm_bytes * 0.95 - _state_bytes(setup) - _FRAMEWORK_BYTES
    if setup.offload != "none":
        # While a chunk computes, the copy of the one before may still be under way.
        chunk = 2 * _TOKEN_BYTES * hidden * max(segment_lengths(setup)) * model.num_layers / devices
        resident = 2 * layer_costs(model).kv_elements * 2 * model.num_layers / devices
        host = 34 * hidden * model.num_layers * GPUS_PER_NODE / devices
        return min((free_bytes - chunk) / resident, NODE_BYTES / host)
    inputs = 2 * hidden * model.num_layers / devices
    return free_bytes / (inputs + _TOKEN_BYTES * hidden / devices + 4 * 2 * hidden + 10 * model.vocab_size / devices)


Predict = Callable[[Setup, Rates], float]
PREDICTIONS: dict[str, Predict] = {
    "tokens/s": lambda setup, rates: tokens_per_gpu_s(setup, rates) * setup.num_devices,
    "tokens/GPU/s": tokens_per_gpu_s,
    "GB": lambda setup, rates: memory_bytes(setup) / 1e9,
    "tokens": lambda setup, rates: longest_tokens(setup),
}
