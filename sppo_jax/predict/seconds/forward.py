"""Seconds of an evaluation: forwards and heads without gradients, and the weights that are gathered before them."""

from collections.abc import Callable

from sppo_jax.predict.seconds import elementwise
from sppo_jax.predict.seconds.costs import CostModel
from sppo_jax.schedule.table import TickShape, Unit

# Of a head's three products an evaluation has one.
_HEAD_SHARE = 1 / 3
_FLOAT32 = 4


def forward_seconds(costs: CostModel, chunk_lengths: tuple[int, ...]) -> Callable[[Unit, TickShape], float]:
    """Returns the costs that `simulate` asks for, of an evaluation: its backwards take nothing.

    Args:
        costs: of a training step of the same plan.
        chunk_lengths: tokens of each chunk.
    """
    of_step = costs.of_chunks(chunk_lengths)

    def seconds(unit: Unit, tick: TickShape) -> float:
        if unit.op == "F":
            return of_step(unit, tick)
        return head_s(costs, max(chunk_lengths[unit.chunk], tick.tokens)) if unit.op == "H" else 0.0

    return seconds


def head_s(costs: CostModel, tokens: int) -> float:
    """Returns the seconds of a head that gives losses alone.

    Args:
        costs: of a training step of the same plan.
        tokens: of the tick, over all devices of a stage.
    """
    device, mesh = costs.cluster.device, costs.mesh
    product_s = _HEAD_SHARE * costs.products_s("H")
    moved = elementwise.logit_bytes(costs.vocab_size) / mesh.pipe
    # The last stage's output is summed over the stages, which passes it twice.
    summed = 2 * (mesh.pipe - 1) / mesh.pipe * costs.layer.input_elements * costs.compute_bytes
    token_s = product_s + moved / device.elementwise_bytes_s + summed / costs.cluster.link_bytes_s(mesh.seq * mesh.pipe)
    table_s = costs.table_s["F"]  # where tables are gathered
    return token_s * tokens / mesh.seq + product_s * device.overhead_tokens + table_s + device.overhead_s


def gather_s(costs: CostModel) -> float:
    """Returns the seconds in which an evaluation casts its parameters, and gathers the weights of all layers once.

    Args:
        costs: of a training step of the same plan.
    """
    members = costs.mesh.data * costs.mesh.seq
    gathered = costs.params - costs.num_tables * costs.table_params
    sent = (members - 1) / members * gathered * costs.compute_bytes
    cast = _FLOAT32 + costs.compute_bytes if costs.compute_bytes < _FLOAT32 else 0
    return sent / costs.stage_link_bytes_s + costs.params / members * cast / costs.cluster.device.hbm_bytes_s
