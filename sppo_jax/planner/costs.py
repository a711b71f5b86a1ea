"""FLOPs, bytes and seconds of the units of a schedule, for a causal decoder."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from sppo_jax.config import ModelConfig
from sppo_jax.hardware import Cluster
from sppo_jax.planner.plan import MeshShape
from sppo_jax.schedule.table import Unit

# Attention has two matmuls forward and five backward; a linear layer has one and two.
ATTENTION_BACKWARD = 2.5
LINEAR_BACKWARD = 2.0


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Work and size of one decoder layer, forward.

    Args:
        params: parameters of the layer.
        linear_flops: FLOPs of a token in the linear parts.
        pair_flops: FLOPs of a query and a key that it attends to, over all heads.
        input_elements: activation elements of a token's layer input.
        attention_elements: activation elements of a token's attention output.
        lse_elements: float32 elements of a token's log-sum-exp.
        rest_elements: activation elements of a token that saves recomputing the linear parts.
        kv_elements: elements of a token's keys and values together, all heads.
    """

    params: int
    linear_flops: float
    pair_flops: float
    input_elements: int
    attention_elements: int
    lse_elements: int
    rest_elements: int
    kv_elements: int


def layer_costs(model: ModelConfig) -> LayerCosts:
    """Counts one decoder layer of a model shape."""
    hidden, query = model.hidden_size, model.num_heads * model.head_dim
    kv = 2 * model.num_kv_heads * model.head_dim
    matrices = 3 if model.mlp == "swiglu" else 2
    weights = hidden * (query + kv) + query * hidden + matrices * hidden * model.mlp_size
    norms = 2 * hidden + (2 * model.head_dim if model.qk_norm else 0) + (query + kv if model.qkv_bias else 0)
    return LayerCosts(
        params=weights + norms,
        linear_flops=2.0 * weights,
        pair_flops=4.0 * query,
        input_elements=hidden,
        attention_elements=query,
        lse_elements=model.num_heads,
        # Queries, both normed inputs, the residual in the middle, and what the MLP computes before its last matmul.
        rest_elements=query + 3 * hidden + matrices * model.mlp_size,
        kv_elements=kv,
    )


def vocabulary_params(model: ModelConfig) -> int:
    """Returns the parameters of embedding, head and final norm, over all stages."""
    tables = 1 if model.tied_embeddings else 2
    return tables * model.vocab_size * model.hidden_size + model.hidden_size


def chunk_pairs(start: int, tokens: float) -> float:
    """Returns the number of (query, key) pairs of a causal chunk that begins at token `start`."""
    return tokens * start + tokens * tokens / 2


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of the units of a schedule on one kind of device.

    Args:
        layer: costs of a layer.
        layers: layers of a virtual stage.
        head_flops: FLOPs of a token in the whole head, forward and backward.
        carry_bytes: bytes of a token that go on to the next stage.
        exchange_bytes: bytes of a token that attention exchanges in a stage, a layer.
        pipe: pipeline stages.
        seq: devices of a stage.
        recompute_linear: whether backward computes the linear parts anew.
        recompute_attention: whether backward computes attention anew.
        cluster: the devices and what joins them.
    """

    layer: LayerCosts
    layers: int
    head_flops: float
    carry_bytes: int
    exchange_bytes: int
    pipe: int
    seq: int
    recompute_linear: bool
    recompute_attention: bool
    cluster: Cluster

    def seconds(self, kind: str, start: int, tokens: int, padded: int = 0) -> float:
        """Returns the seconds of a unit.

        Args:
            kind: "F", "B" or "H".
            start: tokens of the sequence before the chunk.
            tokens: tokens of the chunk.
            padded: tokens of the tick, if more. Linear layers compute padding, attention skips it.
        """
        device = self.cluster.device
        matmul_s = 1 / (device.matmul_flops_s * device.matmul_efficiency)
        attention_s = 1 / (device.matmul_flops_s * device.attention_efficiency)
        computed = max(tokens, padded) / self.seq
        # A short matmul waits for its weights, as if it had some tokens more.
        local = computed + device.overhead_tokens
        if kind == "H":
            # The head is spread over all stages.
            return self.head_flops * local * matmul_s / self.pipe + device.overhead_s
        backward = kind == "B"
        linear = self.layer.linear_flops * (LINEAR_BACKWARD + self.recompute_linear if backward else 1)
        attention = self.layer.pair_flops * (ATTENTION_BACKWARD + self.recompute_attention if backward else 1)
        compute_s = self.layers * (
            linear * local * matmul_s + attention * chunk_pairs(start, tokens) / self.seq * attention_s
        )
        exchange = (1 + backward) * self.layers * self.exchange_bytes / self.cluster.link_bytes_s(self.seq)
        hop = self.carry_bytes / self.cluster.link_bytes_s(self.seq * self.pipe)
        return compute_s + computed * (exchange + hop) + device.overhead_s

    def step_overhead_s(self) -> float:
        """Returns the seconds of a step that belong to no tick: the sums of gradients and the optimizer's update."""
        return 0.0

    def chunk_seconds(self, start: int, tokens: int) -> float:
        """Returns the seconds of a chunk's F and B on one virtual stage together."""
        return self.seconds("F", start, tokens) + self.seconds("B", start, tokens)

    def of_table(self, chunk_lengths: tuple[int, ...]) -> Callable[[Unit, int], float]:
        """Returns the costs that `simulate` asks for."""
        starts = list(accumulate(chunk_lengths, initial=0))

        def seconds(unit: Unit, padded: int) -> float:
            return self.seconds(unit.kind, starts[unit.chunk], chunk_lengths[unit.chunk], padded)

        return seconds


def cost_model(
    model: ModelConfig,
    *,
    cluster: Cluster,
    mesh: MeshShape,
    ulysses: int,
    ring: int,
    layers: int,
    compute_bytes: int,
    recompute_linear: bool,
    recompute_attention: bool,
) -> CostModel:
    """Returns the seconds of units of a model on a mesh.

    Args:
        model: the model shape.
        cluster: the devices and what joins them.
        mesh: devices along each axis.
        ulysses: devices over which heads are spread.
        ring: devices round which keys and values, or queries, travel; `ulysses * ring == mesh.seq`.
        layers: layers of a virtual stage.
        compute_bytes: bytes of an activation.
        recompute_linear: whether backward computes the linear parts anew.
        recompute_attention: whether backward computes attention anew.

    Raises:
        ValueError: the factors do not make up the `seq` axis.
    """
    if ulysses * ring != mesh.seq:
        raise ValueError(f"ulysses * ring must be mesh.seq={mesh.seq}, got {ulysses} * {ring}: change a factor")
    layer = layer_costs(model)
    # Queries, keys and values go to where they are needed and outputs come back; one device exchanges nothing.
    exchanged = 2 * layer.attention_elements + layer.kv_elements
    return CostModel(
        layer=layer,
        layers=layers,
        head_flops=3 * 2.0 * model.vocab_size * model.hidden_size,
        carry_bytes=model.hidden_size * compute_bytes if mesh.pipe > 1 else 0,
        exchange_bytes=exchanged * compute_bytes if mesh.seq > 1 else 0,
        pipe=mesh.pipe,
        seq=mesh.seq,
        recompute_linear=recompute_linear,
        recompute_attention=recompute_attention,
        cluster=cluster,
    )


def balance_weights(model: ModelConfig) -> tuple[float, float]:
    """Returns FLOPs a (query, key) pair and FLOPs a token of a layer, forward and backward with recomputed linears."""
    layer = layer_costs(model)
    return layer.pair_flops * (1 + ATTENTION_BACKWARD), layer.linear_flops * (2 + LINEAR_BACKWARD)
