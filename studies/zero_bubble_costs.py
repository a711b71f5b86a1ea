"""Seconds of F, B and W units of llama2-7b by the planner's cost model, and the bytes that they keep, from shapes."""

from dataclasses import dataclass
from functools import cache, cached_property

from sppo_jax.config import ModelConfig, config_from_dict
from sppo_jax.hardware import DEVICES, make_cluster
from sppo_jax.models.counts import layer_costs
from sppo_jax.plan.parts import MeshShape
from sppo_jax.plan.table import Unit
from sppo_jax.planner.costs import CostModel, cost_model
from studies.zero_bubble_orders import Costs, Orders

MODEL, SEQ, DEVICE = "llama2-7b", 8, DEVICES["a100-80g"]
# A part of the weights' gradients is written and read in bfloat16, a sum in float32 read and written.
_ADDED_BYTES = 2 * 2 + 2 * 4


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sequences of one length on pipelines of llama2-7b, a stage being eight A100 of a host that divide each sequence.

    Args:
        length: tokens of a sequence.
        stages: pipeline stages.
        chunks: chunks of a sequence where the schedule cuts them.
        sequences: sequences of a step.
    """

    length: int
    stages: int
    chunks: int
    sequences: int

    @cached_property
    def seconds(self) -> dict[int, dict[tuple[str, int], float]]:
        """Seconds of a whole stage's F, B (inputs' gradients) and W by chunk, for 1 and for `chunks` chunks."""
        return {count: unit_seconds(self.length, count, self.stages) for count in {1, self.chunks}}

    @property
    def work_s(self) -> float:
        return self.sequences * sum(self.seconds[1].values())

    def costs(self, orders: Orders) -> Costs:
        """Returns the costs of units of an order."""
        groups, splits, known = orders.num_groups, orders.splits, self.seconds[orders.num_chunks]

        def seconds(unit: Unit) -> float:
            whole = known[unit.kind, unit.chunk] + (known["W", unit.chunk] if unit.kind == "B" and not splits else 0.0)
            return whole / groups

        return seconds


def unit_seconds(length: int, chunks: int, stages: int) -> dict[tuple[str, int], float]:
    """Returns the seconds of F, B and W of each chunk on a stage, by kind and chunk, from the planner's cost model.

    W is the linear layers' second product of backward, which takes as long as forward's, and the addition to the
    gradients of the weights. B is the rest of backward: attention, and the linear layers' other product.
    """
    kept, again = _stage_model(length, stages, 0), _stage_model(length, stages, 1)
    tokens = length // chunks
    found = {}
    for chunk in range(chunks):
        forward, backward, with_again = (
            model.compute_s(kind, chunk * tokens, tokens) + model.transfer_s(kind, chunk * tokens, tokens)
            for kind, model in (("F", kept), ("B", kept), ("B", again))
        )
        added_s = kept.layers * kept.layer.params * _ADDED_BYTES / kept.cluster.device.hbm_bytes_s
        weights = with_again - backward + added_s
        found |= {("F", chunk): forward, ("B", chunk): backward - weights, ("W", chunk): weights}
    return found


def _stage_model(length: int, stages: int, again: int) -> CostModel:
    model = shape_of(length)
    return cost_model(
        model,
        cluster=make_cluster(DEVICE, SEQ),
        mesh=MeshShape(data=1, pipe=1, seq=SEQ),
        ulysses=SEQ,
        ring=1,
        layers=model.num_layers // stages,
        compute_bytes=2,
        recompute_linear=again,
        recompute_attention=False,
        kernel="cudnn",
        length=length,
    )


@cache
def shape_of(length: int) -> ModelConfig:
    return config_from_dict({"model": {"preset": MODEL}, "train": {"steps": 1}, "sequence": {"length": length}}).model


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes that a token of a layer keeps.

    Args:
        all: between F and B, if nothing is computed again.
        stash: between F and B, of the layer's input, and attention's output with its LSE.
        weights: between B and W: the inputs of the seven matrices and the gradients of their outputs.
    """

    all: int
    stash: int
    weights: int


def token_bytes() -> Bytes:
    """Counts what a token of a layer keeps, in bfloat16 but for the LSE."""
    model = shape_of(2**12)
    layer, mlp, kv = layer_costs(model), model.mlp_size, layer_costs(model).kv_elements
    stash = 2 * (layer.input_elements + layer.attention_elements) + 4 * layer.lse_elements
    # Inputs: of q, k and v; of attention's output; of gate and up; of down.
    inputs = 2 * model.hidden_size + layer.attention_elements + mlp
    # Gradients: of q, k and v; of attention's output; of gate and up; of down.
    gradients = layer.attention_elements + kv + model.hidden_size + 2 * mlp + model.hidden_size
    return Bytes(all=stash + 2 * (layer.rest_elements + kv), stash=stash, weights=2 * (inputs + gradients))
