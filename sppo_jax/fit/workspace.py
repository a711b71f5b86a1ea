"""Gives the calls of cuDNN's backward in a lowered program the workspace that they will have on a GPU."""

from __future__ import annotations

from typing import Any

from sppo_jax.predict.workspace import backward_bytes

_BACKWARD = "__cudnn$fmha"


def reserve_workspace(lowered: Any) -> int:
    """Sets the workspace of each backward call in the program itself; returns the bytes of the largest.

    jax writes a workspace of 0 bytes, which XLA replaces where a GPU is at hand. A program that is compiled without one
    then takes as much less memory. XLA puts the bytes that are set here where it puts any other result of a call.

    Args:
        lowered: a `jax.stages.Lowered`, which is changed.
    """
    from jax.interpreters import mlir

    ir, sizes = mlir.ir, [0]

    def visit(operation: Any) -> Any:
        call = operation.operation
        if call.name == "stablehlo.custom_call" and _is_backward(call):
            size = _workspace_of(call)
            result = call.results[len(call.results) - 1]
            result.set_type(ir.RankedTensorType.get((size,), ir.RankedTensorType(result.type).element_type))
            sizes.append(size)
        return ir.WalkResult.ADVANCE

    module = lowered.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown(module.context):
        module.operation.walk(visit)
    return max(sizes)


def _is_backward(call: Any) -> bool:
    target = call.attributes["call_target_name"].value
    return target.startswith(_BACKWARD) and target.endswith("Backward")


def _workspace_of(call: Any) -> int:
    """Returns the bytes by the formula; the operands begin with q [1, N, T, H], k [1, K, S, H]."""
    from jax.interpreters import mlir

    queries, keys = (mlir.ir.RankedTensorType(call.operands[index].type) for index in (0, 1))
    batch, num_heads, rows, head_dim = queries.shape
    return batch * backward_bytes(
        num_heads=num_heads,
        num_kv_heads=keys.shape[1],
        head_dim=head_dim,
        queries=rows,
        keys=keys.shape[2],
        compute_bytes=queries.element_type.width // 8,
    )
