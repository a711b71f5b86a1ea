"""The compiler's figures of a plan's train step: bytes, kernels, and host copies beside compute."""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any

from sppo_jax.config import Config
from sppo_jax.environment import add_xla_flag, warn_of_unknown_flags
from sppo_jax.fit.copies import HostCopies
from sppo_jax.fit.figures import Figures
from sppo_jax.hardware import Cluster
from sppo_jax.plan.plan import Plan
from sppo_jax.planner.evaluate import costs_of
from sppo_jax.planner.layouts import COMPUTE_BYTES
from sppo_jax.units import format_bytes

# XLA's error where it would have to try kernels on a GPU.
_NO_TRITON = ("No supported config found", "Failed to get configs")
# Largest share of the bytes of host copies without compute beside the copy before a warning.
MAX_EXPOSED = 0.01


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of one device: in its own memory, and its part of its host's memory."""

    hbm_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The compiler's figures beside the planner's and the machine's, all of one device.

    Args:
        compiler: the compiler's bytes: arguments + outputs + temporaries - aliases, and those on the host.
        predicted: the planner's bytes, of the largest stage.
        capacity: the memory of the machine.
        copies: bytes moved between device and host in a step.
        waiting_share: of the predicted seconds of a step, those by which host copies take longer than the compute
            beside them: matrix products, and the least attention of a tick.
        flash_calls: calls of a fused attention kernel in the program's text.
        num_bodies: bodies of ticks in the program.
        compile_s: seconds the compiler took.
        jax_version: the version of jax, whose compiler decides the bytes.
    """

    compiler: Sizes
    predicted: Sizes
    capacity: Sizes
    copies: HostCopies
    waiting_share: float
    flash_calls: int
    num_bodies: int
    compile_s: float
    jax_version: str

    @property
    def fits(self) -> bool:
        """Whether the step fits both memories, by the compiler's figures."""
        return (
            self.compiler.hbm_bytes <= self.capacity.hbm_bytes and self.compiler.host_bytes <= self.capacity.host_bytes
        )

    @property
    def exposed_share(self) -> float:
        """Share of the copied bytes without compute beside the copy."""
        moved = self.copies.overlapped_bytes + self.copies.exposed_bytes
        return self.copies.exposed_bytes / moved if moved else 0.0

    @property
    def exposed_activations_share(self) -> float:
        """The same without the copies of the optimizer, which are charged and hide behind nothing."""
        copies = self.copies
        moved = copies.overlapped_bytes + copies.exposed_bytes - copies.optimizer_bytes
        return max(0, copies.exposed_bytes - copies.optimizer_bytes) / moved if moved else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns what `sppo fit --json` prints."""
        return {
            "fits": self.fits,
            "compiler": asdict(self.compiler),
            "predicted": asdict(self.predicted),
            "capacity": asdict(self.capacity),
            "host_copies": {
                "overlapped_bytes": self.copies.overlapped_bytes,
                "exposed_bytes": self.copies.exposed_bytes,
                "kernel_bytes": self.copies.kernel_bytes,
                "optimizer_bytes": self.copies.optimizer_bytes,
                "waiting_share": round(self.waiting_share, 5),
            },
            "flash_calls": self.flash_calls,
            "num_bodies": self.num_bodies,
            "compile_s": round(self.compile_s, 1),
            "jax": self.jax_version,
        }

    def describe(self) -> str:
        """Returns the figures as a table, and a line on the copies."""
        rows = [("", "compiler", "predicted", "capacity", "compiler of capacity")]
        for name, key in (("HBM of a device", "hbm_bytes"), ("host, a device's part", "host_bytes")):
            values = [getattr(sizes, key) for sizes in (self.compiler, self.predicted, self.capacity)]
            rows.append((name, *map(format_bytes, values), f"{values[0] / values[2]:.1%}"))
        lines = [f"{row[0]:22}" + "".join(f"{cell:>13}" for cell in row[1:4]) + f"  {row[4]}" for row in rows]
        first, *others = self._describe_copies()
        lines += [f"{'host copies':22}  {first}", *(f"{'':22}  {line}" for line in others)]
        kernels = f"{self.flash_calls} calls of a fused kernel in the program" if self.flash_calls else "blockwise"
        lines.append(f"{'attention':22}  {kernels}")
        lines.append(f"{'program':22}  {self.num_bodies} bodies of ticks")
        return "\n".join([*lines, f"{'compiled in':22}  {self.compile_s:.0f} s by jax {self.jax_version}"])

    def _describe_copies(self) -> list[str]:
        copies = self.copies
        moved = copies.overlapped_bytes + copies.exposed_bytes
        if not moved:
            return ["none"]
        text = f"{format_bytes(moved)} a step"
        if copies.kernel_bytes is not None:
            share = copies.kernel_bytes / moved
            text += f", {share:.1%} of it by kernels on the compute units, the rest by DMA engines"
        of_optimizer = copies.optimizer_bytes / moved
        optimizer = f", the optimizer's {of_optimizer:.1%} among it" if of_optimizer else ""
        return [
            text,
            f"{self.exposed_share:.1%} of it with no compute beside it{optimizer}",
            f"longer than the compute beside it for {self.waiting_share:.1%} of a step",
        ]


def prepare_environment() -> None:
    """Sets the environment before jax looks for devices, so that jax looks for no accelerator."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    warn_of_unknown_flags()
    from sppo_jax.compat import deviceless_flags  # imports jax, which reads JAX_PLATFORMS

    for name, value in deviceless_flags().items():
        add_xla_flag(name, value)


def compile_plan(config: Config, plan: Plan, cluster: Cluster) -> Fit:
    """Compiles the train step of a plan for a cluster that need not exist.

    Call `prepare_environment` before jax is first imported.

    Args:
        config: the model and the optimizer.
        plan: all other settings.
        cluster: devices to compile for; at least as many as the plan's mesh has.

    Raises:
        ValueError: plan and cluster do not fit together, or the compiler is not installed or is refused for runs.
    """
    import jax

    from sppo_jax.compat import check_offload
    from sppo_jax.fit.lowering import train_program
    from sppo_jax.fit.targets import compile_only_devices

    check_offload(cluster.device.platform, max(plan.predicted.host_bytes) > 0)
    program = train_program(config, plan, compile_only_devices(cluster), cluster.device.platform)
    lowered = program.lower()
    start = time.perf_counter()
    compiled = compile_lowered(lowered)
    compile_s = time.perf_counter() - start
    figures = Figures.of(compiled, program.turn_shares)
    return Fit(
        compiler=Sizes(hbm_bytes=figures.hbm_bytes, host_bytes=figures.host_bytes),
        predicted=Sizes(hbm_bytes=max(plan.predicted.hbm_bytes), host_bytes=max(plan.predicted.host_bytes)),
        capacity=Sizes(hbm_bytes=cluster.device.hbm_bytes, host_bytes=cluster.device_host_bytes),
        copies=figures.copies,
        waiting_share=_waiting_s(figures.copies, config, plan, cluster) / plan.predicted.step_s,
        flash_calls=figures.flash_calls,
        num_bodies=program.num_bodies,
        compile_s=compile_s,
        jax_version=jax.__version__,
    )


def _waiting_s(copies: HostCopies, config: Config, plan: Plan, cluster: Cluster) -> float:
    costs, table = costs_of(plan, config), plan.outline()
    without = replace(costs, layer=replace(costs.layer, pair_flops=0.0))
    attention_s = {
        kind: min(
            costs.compute_s(kind, start, length) - without.compute_s(kind, start, length)
            for start, length in zip(table.chunk_starts, table.chunk_lengths, strict=False)
        )
        for kind in "FB"
    }
    size = COMPUTE_BYTES.get(config.model.compute_dtype, cluster.device.compute_bytes)
    return copies.waiting_s(cluster.host_link_bytes_s, cluster.device.linear_flops_s(size), attention_s)


def compile_lowered(lowered: Any) -> Any:
    """Compiles a lowered program for a device that is not here.

    Some versions of XLA refuse single Triton products where no GPU is at hand. The program is then compiled again with
    all products by cuBLAS, which can change its memory by a few percent; a warning says so.

    Args:
        lowered: a `jax.stages.Lowered`.
    """
    from jax.errors import JaxRuntimeError

    try:
        return lowered.compile()
    except JaxRuntimeError as error:
        if not any(words in str(error) for words in _NO_TRITON):
            raise
    warnings.warn(
        "without a GPU this version of XLA finds no kernel for a Triton product: compiled with all products by cuBLAS, "
        "which can change the memory by a few percent; jax 0.12 needs no such change",
        stacklevel=2,
    )
    return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
