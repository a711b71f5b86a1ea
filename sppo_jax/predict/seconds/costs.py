"""Seconds of the units of a schedule, of what they send, and of the end of a step, for a causal decoder.

Departures from the papers, each because the program that runs is another one:

* SPPO writes a step as (p - 1 + N) / N * F(N) with F(N) read off a profile. Here every unit has its own seconds, from
  FLOPs, bytes and a few rates, and the simulator adds up ticks.
* Attention's backward is 2.5 times its forward in FLOPs (five matmuls to two), and 2.9 to 3.3 times in the seconds of
  cuDNN's kernel; a linear layer's is 2 times. SPPO, Seq1F1B and the usual `6 P` rule take 2 for both; at a million
  tokens a step is then at least a seventh too short.
* Causal attention counts the pairs that exist, `tokens * start + tokens^2 / 2`; PipeOffload's formula counts all keys.
  With a window these are the pairs within it, at a lower rate (`WINDOW_RATE`).
* The fused kernel's forward takes whole waves of queries and both passes have a tail (`predict.seconds.attention`).
  SPPO lets one efficiency fall with the length of a chunk.
* A tick is lock-step: the linear parts of a chunk shorter than its tick are charged for the padding, and collectives
  over the stages (embedding, head, their gradients) for every tick that has them. Attention skips padding.
* Heads and tokens travel by all-to-all and ring, not by Megatron's all-gather and reduce-scatter, and weights are whole
  on every device of a stage: so each B adds a gradient as large as the stage's weights to an accumulator in device
  memory, whatever the length of the chunk. The papers have no such term; it is what makes chunks too short.
* Experts multiply more rows than they have: every tile that any router may need. Each lot of tiles copies the arrays of
  its experts, so experts take time whatever the length of the chunk (`predict.experts`).
* The kernel for TPUs takes what its compiled bundles say (`predict.seconds.tpu_attention`), and the hops of a ring hide
  behind it. Nothing else that is sent hides behind compute, except copies to the host, which the planner sizes to hide.

The seconds of one unit are a function of its chunk, with all else worked out beforehand. The search asks for the
seconds of hundreds of thousands of chunks. So what does not depend on the chunk is a constant
of the function. Every function takes the same arguments:

    start: tokens of the sequence before the chunk.
    tokens: tokens of the chunk.
    padded: tokens of the tick, where it is longer than the chunk; else at most `tokens`.
    reach: tokens of the sequence up to the end of the tick's furthest chunk, where that is another one.
    has_ends: whether the tick may meet the vocabulary (`schedule.table.TickShape`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from sppo_jax.config import ModelConfig
from sppo_jax.hardware import Cluster
from sppo_jax.models.counts import LINEAR_BACKWARD, LayerCosts, chunk_pairs, head_flops, layer_costs, num_tables
from sppo_jax.models.state_counts import state_counts
from sppo_jax.plan.parts import MeshShape, cache_head_dim
from sppo_jax.predict.experts import ExpertWork, expert_work
from sppo_jax.predict.seconds import elementwise
from sppo_jax.predict.seconds.attention import AttentionOfType, attention_seconds
from sppo_jax.predict.seconds.documents import PairCounts
from sppo_jax.predict.seconds.stage_shape import Recompute, StageShape, WeightsPlace
from sppo_jax.predict.stage_params import stage_params, table_params
from sppo_jax.predict.states import StateWork, state_work
from sppo_jax.program.ring import AttentionShape, Ring, mixed_shape
from sppo_jax.schedule.table import TickShape, Unit, chunk_starts

_FLOAT32 = 4
# The share of its FLOP/s that a kernel reaches in a window, where a mask cuts many of its tiles: a guess. Where whole
# blocks are counted, the rate is that of whole blocks.
WINDOW_RATE = 0.5
# The tick of a chunk by itself.
ALONE = TickShape(0, 0)
# Passes over float32 parameters at the end of a step: the update reads four arrays (parameters, gradients and both
# moments) and writes three; the norm for clipping reads gradients once more.
_OPTIMIZER_PASSES = 8


UnitSeconds = Callable[..., float]


_RESIDENT = WeightsPlace()


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of the units of a schedule on one kind of device; made by `cost_model`.

    Args:
        layer: costs of a layer, a mean where layers are of several types.
        layers: layers of a virtual stage, in the mean.
        head_flops: FLOPs of a token in the whole head, forward and backward.
        vocab_size: logits of a token.
        params: parameters of a stage with its share of the vocabulary.
        attention: of each layer type.
        mesh: devices along each axis.
        ulysses: devices over which heads are spread.
        ring: the ring, and what travels on it.
        compute_bytes: bytes of an activation.
        recompute: how much of a forward its backward computes again.
        cluster: the devices and what joins them.
        again: how often a stage gathers the weights of all its layers, and scatters their sums, after the first time.
        stage_layers: layers of a stage.
        table_params: parameters of a stage's embedding, or of its head, where ticks gather these; else 0.
        num_tables: 2, or 1 where the embedding and the head are tied.
        host_params: a device's parameters in matrices of layers, and in tables, that wait on the host; else 0.
        experts: the work of a layer's experts; None without.
        with_experts: share of the layers that have experts.
        states: the work of mixers with a state; None without.
        attended: the pairs of a query and a key within one document; None: sequences are one document each.
        backward_queries: of a call of attention's backward at most, in layers without a window; 0: all of a chunk.
    """

    layer: LayerCosts
    layers: float
    head_flops: float
    vocab_size: int
    params: int
    attention: tuple[AttentionOfType, ...]
    mesh: MeshShape
    ulysses: int
    ring: Ring
    compute_bytes: int
    recompute: Recompute
    cluster: Cluster
    again: tuple[float, float]
    stage_layers: int
    table_params: int
    num_tables: int
    host_params: tuple[int, int] = (0, 0)
    experts: ExpertWork | None = None
    with_experts: float = 1
    states: StateWork | None = None
    attended: PairCounts | None = None
    backward_queries: int = 0

    def seconds(self, op: str, start: int, tokens: int, tick: TickShape = ALONE) -> float:
        """Returns the seconds of a unit: its compute, what it sends, and what any tick takes.

        Args:
            op: "F", "B" or "H".
            start: tokens of the sequence before the chunk.
            tokens: tokens of the chunk.
            tick: the shape of the tick, where it is larger than the chunk. Linear layers compute padding, attention
                skips it. What travels on the ring depends on the tick's reach.
        """
        return self.seconds_of[op](start, tokens, *tick)

    def compute_s(self, op: str, start: int, tokens: int, tick: TickShape = ALONE) -> float:
        """Returns the seconds in which a unit computes; arguments as `seconds`."""
        return self.compute_of[op](start, tokens, *tick)

    def transfer_s(self, op: str, start: int, tokens: int, tick: TickShape = ALONE) -> float:
        """Returns the seconds in which a unit sends to other devices; arguments as `seconds`."""
        return self.transfer_of[op](start, tokens, *tick)

    @cached_property
    def seconds_of(self) -> dict[str, UnitSeconds]:
        """The functions behind `seconds`, by op."""
        return {op: whole_seconds(self, op) for op in "FBH"}

    @cached_property
    def compute_of(self) -> dict[str, UnitSeconds]:
        """The functions behind `compute_s`, by op."""
        return {op: compute_seconds(self, op) for op in "FBH"}

    @cached_property
    def transfer_of(self) -> dict[str, UnitSeconds]:
        """The functions behind `transfer_s`, by op."""
        return {op: transfer_seconds(self, op) for op in "FBH"}

    @property
    def kv_width(self) -> float:
        """Elements of a token's keys over all devices, in the mean of all layers."""
        return sum(layer_type.share * layer_type.kv_width for layer_type in self.attention)

    @property
    def cache_share(self) -> float:
        """Elements that keys take in caches and on the way, by those that they have."""
        times = [cache_head_dim(self.ring.kernel, one.head_dim) / one.head_dim for one in self.attention]
        taken = sum(one.share * one.kv_width * more for one, more in zip(self.attention, times, strict=True))
        return taken / self.kv_width if self.attention else 1.0

    def wave_tokens(self, layer_type: AttentionOfType) -> float:
        """Returns the tokens of a chunk whose queries occupy all units of the fused kernel once; 0: not counted."""
        device = self.cluster.device
        if device.attention_block or self.ring.kernel != "cudnn" or layer_type.window:
            return 0.0
        return device.attention_rows * self.mesh.seq / layer_type.num_heads

    def products_s(self, op: str) -> float:
        """Returns the seconds of the linear layers' products for one token of a device."""
        return self._token_rates[op]

    def token_s(self, op: str, again: bool = False) -> float:
        """Returns the seconds of one token of a device, attention's kernel aside.

        Args:
            op: "F", "B" or "H".
            again: whether the backward computes attention again.
        """
        return self.products_s(op) + self._moved_bytes(op, again) / self.cluster.device.elementwise_bytes_s

    def pair_s_of(self, layer_type: AttentionOfType) -> float:
        """Returns the seconds of a (query, key) pair forward, in the layers of a type of a virtual stage."""
        device = self.cluster.device
        flops_s = device.attention_flops_s(self.compute_bytes, self.ring.kernel, layer_type.head_dim)
        if layer_type.window and not device.attention_block and not self.has_bundles:
            flops_s *= WINDOW_RATE
        return self.layers * layer_type.share * layer_type.pair_flops / flops_s / self.mesh.seq

    def backward_times(self, layer_type: AttentionOfType) -> float:
        """Returns the seconds of attention's backward for one of its forward."""
        if not self.has_bundles:
            return self.cluster.device.attention_backward if layer_type.window else self.long_backward_times
        forward, backward = self.cluster.device.score_s(self.compute_bytes, layer_type.head_dim)
        return backward / forward

    @property
    def long_backward_times(self) -> float:
        """Seconds of a backward without a window for one of its forward; where bundles are counted they say it."""
        device = self.cluster.device
        in_blocks = device.attention_backward_in_blocks if self.backward_queries else 0.0
        return in_blocks or device.attention_backward

    @property
    def has_bundles(self) -> bool:
        """Whether attention takes what the compiled bundles of the kernel for TPUs say."""
        return self.ring.kernel == "pallas" and self.cluster.device.has_bundles

    def ends_s(self, op: str, tokens: float) -> float:
        """Returns by how many seconds a tick of so many tokens is longer if it has ends."""
        token_s = self.token_transfer_s[op, True, False] - self.token_transfer_s[op, False, False]
        return token_s * tokens / self.mesh.seq + self.table_s[op]

    def ring_bytes(self, op: str, tokens: int, reach: int) -> float:
        """Returns the bytes that a device sends on the ring in one layer of a tick.

        Args:
            op: "F" or "B".
            tokens: of the tick on one device.
            reach: tokens of the sequence up to the end of the tick's furthest chunk.
        """
        ring = self.ring
        key = tokens, ring.bound(reach)
        if key not in self._ring_bytes:
            passes = ring.passes(tokens, reach)
            of_ops: tuple[float, float] = (
                ring.forward_bytes(passes.forward, tokens, passes.bound),
                ring.backward_bytes(passes.backward, tokens, passes.bound),
            )
            self._ring_bytes[key] = of_ops
        forward, backward = self._ring_bytes[key]
        if op == "F":
            return forward
        if self.recompute.attention and reach <= self.recompute.reach:
            return backward + forward
        if not self.recompute.whole:
            return backward
        passes = ring.passes(tokens, reach)
        return backward + ring.forward_bytes(passes.forward, tokens, passes.bound, windows=True)

    def step_overhead_s(self) -> float:
        """Returns the seconds of a step that belong to no tick.

        The devices of a stage, over `data` and `seq`, share its float32 parameters and moments. At the start they
        gather the weights in the compute dtype and zero the accumulators of the gradients; at the end these are summed
        in float32 and each device updates its share. The update is bound by device memory. Where weights are gathered
        group by group, `again` says how often that happens besides; the tables then belong to ticks.
        """
        members, (gathers, scatters) = self.mesh.data * self.mesh.seq, self.again
        layers = self.stage_layers * self.layer.params
        again = layers * (gathers * self.compute_bytes + scatters * 2 * _FLOAT32)
        once = self.params - self.num_tables * self.table_params
        sent = (members - 1) / members * (once * (self.compute_bytes + 2 * _FLOAT32) + again)
        cast = _FLOAT32 + self.compute_bytes if self.compute_bytes < _FLOAT32 else 0
        updated = self.params / members * (_OPTIMIZER_PASSES * _FLOAT32 + cast) + self.params * _FLOAT32
        return sent / self.stage_link_bytes_s + updated / self.cluster.device.hbm_bytes_s + self.host_update_s()

    def host_update_s(self) -> float:
        """Returns the seconds of copies of parameters, moments and gradients on the host with no compute beside them.

        The update fetches four arrays and writes three; a slice of an array is written while one of the next array
        comes. Of the copies in the ticks, only the first group's weights and the last group's gradients have nothing
        beside them (`copies.copy_seconds` has the others).
        """
        matrices, tables = self.host_params
        copied = (matrices + tables) * 4 + 2 * matrices * self.layers / self.stage_layers
        return copied * _FLOAT32 / self.cluster.host_link_bytes_s

    def of_chunks(self, chunk_lengths: tuple[int, ...]) -> Callable[[Unit, TickShape], float]:
        """Returns the costs that `simulate` asks for; a chunk's are the same on every stage and in every sequence."""
        starts, lengths, functions = chunk_starts(chunk_lengths), chunk_lengths, self.seconds_of
        known: dict[tuple, float] = {}
        alike: dict[int, tuple[int, bool]] = {}  # what seconds depend on, of how far a tick reaches

        def seconds(unit: Unit, tick: TickShape) -> float:
            (op, _, chunk, _), (tokens, reach, has_ends) = unit, tick
            if reach not in alike:
                alike[reach] = self.ring.bound(reach) if self.ring.members > 1 else 0, reach <= self.recompute.reach
            key = op, chunk, tokens, has_ends, alike[reach]
            found = known.get(key)
            if found is None:
                found = known[key] = functions[op](starts[chunk], lengths[chunk], tokens, reach, has_ends)
            return found

        return seconds

    @cached_property
    def _ring_bytes(self) -> dict[tuple[int, int], tuple[float, float]]:
        """What is known of `ring_bytes`: forward and backward, by tokens and by the keys that may travel."""
        return {}

    @cached_property
    def _token_rates(self) -> dict[str, float]:
        """Seconds of a token of a device over the layers of a virtual stage, attention aside."""
        linear_flops_s = self.cluster.device.linear_flops_s(self.compute_bytes)
        token_s = self.layers * self.layer.linear_flops / linear_flops_s
        # What a backward computes again of experts whatever the stash saves.
        experts_s = (self._experts_again - self.recompute.linear) * self.layers * self.layer.expert_flops
        experts_s /= linear_flops_s
        kv_flops = 2 * self.layer.input_elements * self.layer.kv_elements
        kv_s = self._kv_again * self.layers * kv_flops / linear_flops_s
        kv_s += self.recompute.rewrite_kv * self.recompute.layers * token_s
        head_s = self.head_flops / (linear_flops_s * self.mesh.pipe)
        seconds = {
            "F": token_s,
            "B": token_s * (LINEAR_BACKWARD + self.recompute.linear) + experts_s + kv_s,
            "H": head_s,
        }
        if self.states is not None:
            state_s = {op: self.layers * self.states.token_s(op, self.mesh.seq, linear_flops_s) for op in seconds}
            seconds = {op: seconds[op] + state_s[op] for op in seconds}
            seconds["B"] += self._states_again * state_s["F"]
        return seconds

    def _moved_bytes(self, op: str, again: bool) -> float:
        """Returns the bytes that a unit moves beside its products for one token of a device."""
        if op == "H":
            return elementwise.head_bytes(self.vocab_size, self.compute_bytes) / self.mesh.pipe
        size, linear = self.compute_bytes, self.recompute.linear
        return self.layers * elementwise.layer_bytes(self.layer, op, size, linear=linear, attention=again)

    @property
    def _with_tails(self) -> float:
        """The share of layers that have tails."""
        return sum(one.share for one in self.attention if one.window) if self.recompute.tails else 0

    @property
    def _kv_again(self) -> float:
        """How often keys and values are computed again, in the mean of all layers, besides the other linear parts."""
        own = self._with_tails * (self.recompute.linear == 0)
        return own + (1 - self._with_tails) * self.recompute.rewrite_kv * self.recompute.kv

    @property
    def _states_again(self) -> float:
        """How often mixers with a state run again besides what a backward needs: for later layers of their group."""
        return self.recompute.whole + self.recompute.rewrite_kv * self.recompute.layers

    @property
    def _experts_again(self) -> float:
        """How often a backward computes the products of experts again: of no stash it has gate and up."""
        return max(0, self.recompute.linear - 1) + 2 / 3

    def experts_s(self, op: str) -> Callable[[int], float] | None:
        """Returns the seconds of experts besides those of their tokens' FLOPs, by tokens of a tick; None without.

        They are those of rows that no token fills, and of what is moved in device memory.

        Args:
            op: "F" or "B".
        """
        work, seq = self.experts, self.mesh.seq
        if work is None:
            return None
        device, layers, size = self.cluster.device, self.layers, self.compute_bytes
        share = self.with_experts
        row_s = layers * self.layer.expert_flops / work.chosen / device.linear_flops_s(size)
        again = self._experts_again if op == "B" else 0
        row_s *= LINEAR_BACKWARD + again if op == "B" else 1

        def seconds(tokens: int) -> float:
            local = -(-tokens // seq)
            moved = work.moved_bytes(op, local, size)
            if again >= 1:
                moved += work.moved_bytes("F", local, size)
            return row_s * (work.rows(local) - local * work.chosen) + layers * share * moved / device.hbm_bytes_s

        return seconds

    def memory_bytes(self, op: str, again: bool) -> tuple[float, float]:
        """Returns the bytes that a unit moves in device memory whatever the length of its chunk.

        Attention takes keys and values of the prefix out of their buffer. Backward adds to dK and dV of the prefix and
        to the gradients of the weights: a part in the compute dtype is written and read, a sum in float32 read and
        written.

        Args:
            op: "F" or "B".
            again: whether the backward computes attention again.

        Returns:
            Bytes for each token up to the end of the chunk, and bytes besides.
        """
        copied, added = 2 * self.compute_bytes, 2 * self.compute_bytes + 2 * _FLOAT32
        prefix = self.layers / self.ring.members * 2 * self.kv_width / self.ulysses
        if op == "F":
            return prefix * copied, 0.0
        # The gradients of experts are sums in float32, which are read as part of the experts' work.
        of_experts = self.experts.sums_bytes(2 * _FLOAT32 - added) * self.with_experts if self.experts else 0
        return prefix * (again * copied + copied + added), self.layers * (self.layer.params * added + of_experts)

    @cached_property
    def table_s(self) -> dict[str, float]:
        """Seconds in which a tick with ends gathers a table, or writes, reads and scatters its whole gradient.

        Ticks of the last group of layers are charged for the embedding too, though they do without it.
        """
        members = self.mesh.data * self.mesh.seq
        sent = (members - 1) / members * self.table_params / self.stage_link_bytes_s
        gather_s = sent * self.compute_bytes
        scatter_s = sent * 2 * _FLOAT32 + self.table_params * 2 * _FLOAT32 / self.cluster.device.hbm_bytes_s
        return {"F": gather_s, "B": scatter_s, "H": gather_s + scatter_s}

    @property
    def stage_link_bytes_s(self) -> float:
        """Bytes a second of a sum over the devices of a stage, by the adapters of all its members on a host."""
        device, seq = self.cluster.device, self.mesh.seq
        span = seq if self.mesh.data == 1 else self.mesh.num_devices
        if span <= self.cluster.num_linked:
            return device.link_bytes_s
        return min(device.link_bytes_s, device.network_bytes_s * min(seq, self.cluster.num_linked))

    @cached_property
    def token_transfer_s(self) -> dict[tuple[str, bool, bool], float]:
        """Seconds in which a unit sends for one token of a device.

        By its op, whether its tick has ends, and whether its backward computes attention again.

        What depends on the prefix is not in it.
        """
        exchange_link = self.cluster.link_bytes_s(self.ulysses)
        pipe, hidden = self.mesh.pipe, self.layer.input_elements * self.compute_bytes
        pipe_link = self.cluster.link_bytes_s(self.mesh.seq * pipe)
        share = (pipe - 1) / pipe
        hop = hidden if pipe > 1 else 0
        # Embedding: a sum. Backward: the head's dX is gathered, the embedding's gradient summed. Head: x summed, dX in
        # float32 summed and scattered. A sum passes everything twice.
        seconds = {}
        exchanged = {again: self.exchange_bytes(again) for again in (False, True)}
        for has_ends, again in product((False, True), repeat=2):
            forward, backward = exchanged[again]
            ends = share * hidden if has_ends else 0
            seconds["F", has_ends, again] = self.layers * forward / exchange_link + (hop + 2 * ends) / pipe_link
            seconds["B", has_ends, again] = self.layers * backward / exchange_link + (hop + 3 * ends) / pipe_link
            if self.states is not None:
                link, sizes = self.cluster.link_bytes_s(self.mesh.seq), (self.compute_bytes, max(4, self.compute_bytes))
                for op, more in (("F", 0.0), ("B", self._states_again)):
                    sent = self.states.sent_bytes(op, self.mesh.seq, *sizes)
                    sent += more * self.states.sent_bytes("F", self.mesh.seq, *sizes)
                    seconds[op, has_ends, again] += self.layers * sent / link
            seconds["H", has_ends, again] = share * (2 * hidden + self.layer.input_elements * _FLOAT32) / pipe_link
        return seconds

    def exchange_bytes(self, again: bool) -> tuple[float, float]:
        """Returns the bytes that ulysses sends for a token of a device and a layer, forward and backward.

        Of all heads a device keeps one share. Forward: q, k, v and out in the compute dtype, LSE in the dtype of sums.
        Backward: q, dout and dq in the compute dtype, LSE, dk and dv in the dtype of sums; then the whole out for the
        fused kernel, or a row sum for the blockwise one. If attention is computed `again`: q, out and LSE once more. If
        keys and values are written again: k and v.
        """
        layer, size, sum_bytes = self.layer, self.compute_bytes, self.ring.shape.sum_bytes
        kv, rows = 2 * self.kv_width, sum_bytes * layer.lse_elements
        forward = (2 * layer.attention_elements + kv) * size + rows
        summary = layer.attention_elements * size if self.ring.kernel == "cudnn" else rows
        backward = 3 * layer.attention_elements * size + sum_bytes * kv + rows + summary
        windows = self._with_tails
        if again or self.recompute.whole:
            backward += (1 if again else windows) * (2 * layer.attention_elements * size + rows)
        rewritten = (windows + (1 - windows) * self.recompute.rewrite_kv) * kv * size
        away = (self.ulysses - 1) / self.ulysses
        return away * forward, away * (backward + rewritten)


def cost_model(
    model: ModelConfig, cluster: Cluster, stage: StageShape, recompute: Recompute, weights: WeightsPlace = _RESIDENT
) -> CostModel:
    """Returns the seconds of units of a model on a mesh.

    Args:
        model: the model shape.
        cluster: the devices and what joins them.
        stage: a stage, and how its devices share a sequence.
        recompute: how much of a forward its backward computes again.
        weights: where the weights of a stage are.

    Raises:
        ValueError: the factors do not make up the `seq` axis.
    """
    mesh, ulysses, ring = stage.mesh, stage.ulysses, stage.ring
    if ulysses * ring != mesh.seq:
        raise ValueError(f"ulysses * ring must be mesh.seq={mesh.seq}, got {ulysses} * {ring}; change a factor")
    stage_layers = -(-model.num_layers // mesh.pipe)
    params = stage_params(model, stage_layers, mesh.pipe, mesh.data, mesh.seq)
    layer_types = model.counts(model.num_layers)
    attends = [(layer_type, count) for layer_type, count in layer_types if state_counts(layer_type) is None]
    without = model.num_layers - sum(count for _, count in attends)
    with_experts = [(layer_type, count) for layer_type, count in layer_types if layer_type.experts.count]
    return CostModel(
        layer=layer_costs(model),
        layers=stage.layers,
        head_flops=3 * head_flops(model),
        vocab_size=model.vocab_size,
        params=params.whole,
        attention=tuple(_attention(layer_type, count / model.num_layers, stage) for layer_type, count in attends),
        mesh=mesh,
        ulysses=ulysses,
        ring=Ring(
            members=ring,
            ulysses=ulysses,
            length=stage.length,
            asked=stage.ring_pass,
            kernel=stage.kernel,
            shape=mixed_shape([(_heads(one, stage, recompute.tails), count) for one, count in attends], without),
        ),
        compute_bytes=stage.compute_bytes,
        recompute=recompute,
        cluster=cluster,
        again=weights.again,
        stage_layers=stage_layers,
        table_params=table_params(model, mesh.pipe) if weights.gathers_tables else 0,
        num_tables=num_tables(model),
        host_params=(params.matrices, params.tables) if weights.on_host else (0, 0),
        experts=expert_work(with_experts[0][0], cluster.device.platform) if with_experts else None,
        with_experts=sum(count for _, count in with_experts) / model.num_layers,
        states=state_work(model, mesh.seq),
        backward_queries=stage.backward_queries,
    )


def without_scores(costs: CostModel) -> CostModel:
    """Returns the seconds of units whose attention computes no pair of a query and a key."""
    return replace(costs, attention=tuple(one._replace(pair_flops=0.0) for one in costs.attention))


def _attention(model: ModelConfig, share: float, stage: StageShape) -> AttentionOfType:
    return AttentionOfType(
        share=share,
        pair_flops=layer_costs(model).pair_flops,
        num_heads=model.num_heads,
        head_dim=model.head_dim,
        kv_width=math.lcm(model.num_kv_heads, stage.ulysses) * model.head_dim,
        window=model.window_within(stage.length),
    )


def _heads(model: ModelConfig, stage: StageShape, tails: bool) -> AttentionShape:
    """Returns the attention of one device in a model whose layers are alike; `tails`: see `Recompute`."""
    return AttentionShape(
        num_heads=model.num_heads // stage.ulysses,
        num_kv_heads=math.lcm(model.num_kv_heads, stage.ulysses) // stage.ulysses,
        head_dim=model.head_dim,
        itemsize=stage.compute_bytes,
        window=model.window_within(stage.length) // stage.ring,
        is_tail=tails,
    )


def whole_seconds(costs: CostModel, op: str) -> UnitSeconds:
    """Returns the seconds of a unit of an op: its compute, what it sends, and what any tick takes."""
    compute_s, transfer_s = costs.compute_of[op], costs.transfer_of[op]
    overhead_s = costs.cluster.device.overhead_s

    def seconds(start: int, tokens: int, padded: int = 0, reach: int = 0, has_ends: bool = True) -> float:
        sent_s = transfer_s(start, tokens, padded, reach, has_ends)
        return compute_s(start, tokens, padded, reach, has_ends) + sent_s + overhead_s

    return seconds


def compute_seconds(costs: CostModel, op: str) -> UnitSeconds:
    """Returns the seconds in which a unit of an op computes."""
    device, seq = costs.cluster.device, costs.mesh.seq
    # A short matmul waits for its weights, as if it had some tokens more.
    extra_s = costs.products_s(op) * device.overhead_tokens
    token_s, token_again_s = (costs.token_s(op, again) / seq for again in (False, True))

    def head_seconds(start: int, tokens: int, padded: int = 0, reach: int = 0, has_ends: bool = True) -> float:
        return token_s * max(tokens, padded) + extra_s

    if op == "H":
        return head_seconds
    once, again = ([amount / device.hbm_bytes_s for amount in costs.memory_bytes(op, one)] for one in (False, True))
    runs_again = costs.recompute.whole and op == "B"
    windows_again = 1.0 + (costs.recompute.rewrite_kv if costs.recompute.layers else 0.0)
    recomputes, recompute_reach = costs.recompute.attention, costs.recompute.reach
    experts_s, width = costs.experts_s(op), costs.kv_width
    of_types = [
        (attention_seconds(costs, one, op), one.share * one.kv_width / width, one.window) for one in costs.attention
    ]
    # Each block of queries reads all keys before it.
    block, attended = costs.backward_queries * costs.ring.members if op == "B" else 0, costs.attended

    def seconds(start: int, tokens: int, padded: int = 0, reach: int = 0, has_ends: bool = True) -> float:
        end = start + tokens
        recomputed = recomputes and max(end, reach) <= recompute_reach
        prefix_s, fixed_s = again if recomputed else once
        attention_s = read = 0.0
        for kernel_s, share, window in of_types:
            attention_s += kernel_s(start, tokens, windows_again if window and runs_again else float(recomputed))
            # Of the prefix a window reads its own keys alone.
            keys = share * (tokens + window if window and window < start else end)
            if block and tokens > block and not window:
                # Before the chunk are the keys of its first document alone.
                left = attended.pairs(start, tokens) / chunk_pairs(start, tokens) if attended else 1.0
                attention_s += once[0] * share * (tokens / block - 1) * (left * start + tokens / 2)
            read += keys
            if runs_again and window and not recomputed:
                attention_s += (again[0] - once[0]) * keys
        longer = tokens if tokens > padded else padded
        besides = experts_s(longer) if experts_s is not None else 0.0
        tokens_s = (token_again_s if recomputed else token_s) * longer
        return tokens_s + besides + extra_s + prefix_s * read + fixed_s + attention_s

    return seconds


def transfer_seconds(costs: CostModel, op: str) -> UnitSeconds:
    """Returns the seconds in which a unit of an op sends to other devices.

    That is the all-to-all of ulysses and the hops of the ring in every layer, the hop to the next stage, and the
    sums over the stages: the head's, and where a tick has ends those of the embedding and of both gradients; and
    tables that are gathered and scattered. Copies to the host are not in it: they hide. Of the ring's hops with the
    kernel for TPUs only what takes longer than attention is in it: each runs beside a kernel, as compiled.
    """
    seq, layers, link = costs.mesh.seq, costs.layers, costs.cluster.link_bytes_s(costs.mesh.seq)
    recomputes, recompute_reach = costs.recompute.attention, costs.recompute.reach
    by_again = {ends: [costs.token_transfer_s[op, ends, again] for again in (False, True)] for ends in (False, True)}
    rates = {ends: [rate / seq for rate in of_again] for ends, of_again in by_again.items()}
    table_s, on_ring = costs.table_s[op], costs.ring.members > 1 and op != "H"
    beside = [attention_seconds(costs, one, op) for one in costs.attention] if on_ring and costs.has_bundles else []

    def seconds(start: int, tokens: int, padded: int = 0, reach: int = 0, has_ends: bool = True) -> float:
        reach = max(start + tokens, reach)
        longer = tokens if tokens > padded else padded
        recomputed = recomputes and reach <= recompute_reach
        sent_s = rates[has_ends][recomputed] * longer
        if has_ends or op == "H":
            sent_s += table_s
        if on_ring:
            ring_s = layers * costs.ring_bytes(op, math.ceil(longer / seq), reach) / link
            sent_s += max(0.0, ring_s - sum(kernel_s(start, tokens, float(recomputed)) for kernel_s in beside))
        return sent_s

    return seconds
