"""The compiler's bytes of an evaluation, for devices that need not exist, beside the planner's."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from sppo_jax.config import Config
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.fit.compiled import Sizes, compile_lowered
from sppo_jax.fit.figures import Figures
from sppo_jax.hardware import Cluster, pool_bytes
from sppo_jax.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class EvaluationFit:
    """The compiler's bytes of one device in an evaluation, beside the planner's and the machine's.

    Args:
        compiler: the compiler's bytes on the device and on the host.
        predicted: the planner's bytes.
        capacity: what a run gets of a device's memory (`hardware.pool_bytes`), and a device's part of its host's.
        flash_calls: calls of a fused attention kernel in the program's text.
        compile_s: seconds the compiler took.
        jax_version: the version of jax, whose compiler decides the bytes.
    """

    compiler: Sizes
    predicted: Sizes
    capacity: Sizes
    flash_calls: int
    compile_s: float
    jax_version: str

    @property
    def fits(self) -> bool:
        """Whether the evaluation fits both memories, by the compiler's figures."""
        return (
            self.compiler.hbm_bytes <= self.capacity.hbm_bytes and self.compiler.host_bytes <= self.capacity.host_bytes
        )

    @property
    def problem(self) -> str:
        """By how much it does not fit, and what to change; empty if it fits."""
        if self.fits:
            return ""
        over = format_bytes(max(0, self.compiler.hbm_bytes - self.capacity.hbm_bytes))
        return f"does not fit: {over} of HBM per device too much; use more devices (--cluster) or a shorter --length"

    def to_dict(self) -> dict[str, Any]:
        """Returns what `sppo fit --eval --json` prints."""
        sizes = {name: asdict(getattr(self, name)) for name in ("compiler", "predicted", "capacity")}
        figures = {"flash_calls": self.flash_calls, "compile_s": round(self.compile_s, 1), "jax": self.jax_version}
        return {"fits": self.fits, **sizes, **figures}

    def describe(self) -> str:
        """Returns the figures as a table."""
        sizes = [self.compiler.hbm_bytes, self.predicted.hbm_bytes, self.capacity.hbm_bytes]
        rows = [
            ("", "compiler", "predicted", "capacity", "compiler of capacity"),
            ("HBM of a device", *map(format_bytes, sizes), f"{sizes[0] / sizes[2]:.1%}"),
        ]
        lines = [f"{row[0]:22}" + "".join(f"{cell:>13}" for cell in row[1:4]) + f"  {row[4]}" for row in rows]
        return "\n".join([*lines, f"{'compiled in':22}  {self.compile_s:.0f} s by jax {self.jax_version}"])


def compile_evaluation(config: Config, plan: Plan, cluster: Cluster) -> EvaluationFit:
    """Compiles the evaluation of a plan for a cluster that need not exist.

    Call `processes.environment.prepare_to_compile` before jax is first imported.

    Args:
        config: the model.
        plan: from `search.evaluation.plan_evaluation`, or that of a run.
        cluster: devices to compile for; at least as many as the plan's mesh has.

    Raises:
        ValueError: plan and cluster do not fit together, or the compiler is not installed.
    """
    import jax

    platform = cluster.device.platform
    lowered = _lowered(config, plan, cluster)
    begin_s = time.perf_counter()
    figures = Figures.of(compile_lowered(lowered), platform=platform)
    return EvaluationFit(
        compiler=Sizes(hbm_bytes=figures.hbm_bytes, host_bytes=figures.host_bytes),
        predicted=Sizes(hbm_bytes=max(plan.predicted.hbm_bytes), host_bytes=max(plan.predicted.host_bytes)),
        capacity=Sizes(hbm_bytes=pool_bytes(cluster), host_bytes=cluster.device_host_bytes),
        flash_calls=figures.flash_calls,
        compile_s=time.perf_counter() - begin_s,
        jax_version=jax.__version__,
    )


def _lowered(config: Config, plan: Plan, cluster: Cluster) -> Any:
    """Returns the evaluation lowered for the cluster's devices: the same program as `sppo eval` runs."""
    import jax
    from flax import nnx

    from sppo_jax.evaluation.placement import batch_shapes
    from sppo_jax.fit.targets import compile_only_devices
    from sppo_jax.models import build_model
    from sppo_jax.pipeline.api import Step
    from sppo_jax.pipeline.params import layout, storage

    dtype = config.model.compute_dtype
    if dtype == "auto":
        dtype = "float32" if cluster.device.platform == "cpu" else "bfloat16"
    model = build_model(replace(config, model=replace(config.model, compute_dtype=dtype)), abstract=True)
    mesh = layout.make_mesh(plan, compile_only_devices(cluster))
    step = Step(plan, model, mesh, train=False)
    params = storage.stored_shapes(plan, nnx.state(model, nnx.Param), mesh)
    return jax.jit(step.__call__, compiler_options=step.compiler_options).lower(params, batch_shapes(plan, mesh))
