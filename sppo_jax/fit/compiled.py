"""The compiler's figures of a plan's train step: bytes, kernels, and the overlap of host copies."""

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sppo_jax.config import Config
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.fit.allocations import HostAllocations, host_allocations
from sppo_jax.fit.figures import Figures
from sppo_jax.fit.fingerprint import Lowering
from sppo_jax.fit.hlo.copies import HostCopies
from sppo_jax.fit.hlo.hops import RingHops
from sppo_jax.fit.hlo.slices import Slice
from sppo_jax.fit.thunks import graphed_loops
from sppo_jax.hardware import Cluster, pool_bytes
from sppo_jax.plan.plan import Plan
from sppo_jax.search.evaluate import costs_of
from sppo_jax.search.space.request import COMPUTE_BYTES

if TYPE_CHECKING:
    from sppo_jax.fit.lowering import TrainProgram

# XLA's error where it would have to try kernels on a GPU.
_NO_TRITON = ("No supported config found", "Failed to get configs")
# Largest share of the bytes of host copies that may be exposed before a warning.
MAX_EXPOSED = 0.01
# Names of the variants.
CUBLAS, GRAPHS = "products by cuBLAS", "loops in CUDA graphs"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of one device: in its own memory, and its part of its host's memory."""

    hbm_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The compiler's figures beside the planner's and the machine's, all of one device.

    Args:
        compiler: the compiler's bytes on the device and on the host; see `Figures`.
        predicted: the planner's bytes, of the largest stage.
        capacity: what a run gets of a device's memory (`hardware.pool_bytes`), and a device's part of its host's.
        copies: bytes moved between device and host in a step.
        waiting_share: of the predicted seconds of a step, those by which host copies take longer than the compute
            that overlaps them: matrix products, and the least attention of a tick.
        loops_share: of the predicted seconds of a step, those for which loops wait for writes on top of that.
        workspace_bytes: what the largest call of cuDNN's backward takes for itself, which `compiler` has in it.
        flash_calls: calls of a fused attention kernel in the program's text.
        hops: bytes sent round the ring in a step.
        compile_s: seconds the compiler took.
        jax_version: the version of jax, whose compiler decides the bytes.
        lowering: the digits of the program that was compiled, and its counts.
        wrong_slices: host copies that the compiler makes at other offsets than the plan's rows.
        allocations: the program's host allocations; None where no pool of pinned memory holds them.
        variants: the same step with other options of the compiler, by name.
    """

    compiler: Sizes
    predicted: Sizes
    capacity: Sizes
    copies: HostCopies
    waiting_share: float
    flash_calls: int
    lowering: Lowering
    compile_s: float
    jax_version: str
    loops_share: float = 0.0
    hops: RingHops = RingHops()
    workspace_bytes: int = 0
    wrong_slices: tuple[Slice, ...] = ()
    allocations: HostAllocations | None = None
    variants: dict[str, Fit] = field(default_factory=dict)

    @property
    def largest(self) -> Sizes:
        """The most bytes of the step and its variants."""
        sizes = [self.compiler, *(variant.compiler for variant in self.variants.values())]
        return Sizes(hbm_bytes=max(size.hbm_bytes for size in sizes), host_bytes=max(size.host_bytes for size in sizes))

    @property
    def fits(self) -> bool:
        """Whether the step, with each variant, fits both memories, by the compiler's figures."""
        largest, capacity = self.largest, self.capacity
        return (
            largest.hbm_bytes <= capacity.hbm_bytes
            and largest.host_bytes <= capacity.host_bytes
            and not self.pool_problem
            and not self.slice_problem
        )

    @property
    def pool_problem(self) -> str:
        """Why a run does not get the program's host allocations; empty where it does."""
        return self.allocations.problem if self.allocations is not None else ""

    @property
    def slice_problem(self) -> str:
        """Why a run would copy other rows than the plan's; empty where it would not."""
        if not self.wrong_slices:
            return ""
        return (
            f"host copies must be at the rows of the plan, got {len(self.wrong_slices)} elsewhere "
            f"({self.wrong_slices[0].describe()}): gradients would be wrong; use another version of jaxlib"
        )

    @property
    def exposed_share(self) -> float:
        """Share of the copied bytes that are exposed: no compute overlaps their copy."""
        moved = self.copies.overlapped_bytes + self.copies.exposed_bytes
        return self.copies.exposed_bytes / moved if moved else 0.0

    @property
    def exposed_activations_share(self) -> float:
        """The same without the copies of the optimizer, which are charged and always exposed."""
        copies = self.copies
        moved = copies.overlapped_bytes + copies.exposed_bytes - copies.optimizer_bytes
        return max(0, copies.exposed_bytes - copies.optimizer_bytes) / moved if moved else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns what `sppo fit --json` prints."""
        return {
            "fits": self.fits,
            "compiler": asdict(self.compiler),
            "largest": asdict(self.largest),
            "predicted": asdict(self.predicted),
            "capacity": asdict(self.capacity),
            "host_copies": {
                "overlapped_bytes": self.copies.overlapped_bytes,
                "exposed_bytes": self.copies.exposed_bytes,
                "kernel_bytes": self.copies.kernel_bytes,
                "optimizer_bytes": self.copies.optimizer_bytes,
                "waiting_share": round(self.waiting_share, 5),
                "loop_bytes": self.copies.loop_bytes,
                "loops_share": round(self.loops_share, 5),
            },
            "wrong_slices": [wrong.describe() for wrong in self.wrong_slices],
            "host_allocations": self.allocations.to_dict() if self.allocations is not None else None,
            "ring_hops": asdict(self.hops),
            "workspace_bytes": self.workspace_bytes,
            "variants": {name: variant.to_variant() for name, variant in self.variants.items()},
            "flash_calls": self.flash_calls,
            **self.lowering.to_dict(),
            "compile_s": round(self.compile_s, 1),
            "jax": self.jax_version,
        }

    def to_variant(self) -> dict[str, Any]:
        """Returns what `sppo fit --json` prints of a variant."""
        values = self.to_dict()
        return {name: values[name] for name in ("compiler", "host_copies", "compile_s")}

    def describe(self) -> str:
        """Returns the figures as a table, and lines on the copies."""
        rows = [("", "compiler", "predicted", "capacity", "compiler of capacity")]
        for name, key in (("HBM of a device", "hbm_bytes"), ("host, a device's part", "host_bytes")):
            values = [getattr(sizes, key) for sizes in (self.compiler, self.predicted, self.capacity)]
            rows.append((name, *map(format_bytes, values), f"{values[0] / values[2]:.1%}"))
        lines = [f"{row[0]:22}" + "".join(f"{cell:>13}" for cell in row[1:4]) + f"  {row[4]}" for row in rows]
        if self.allocations is not None:
            lines += _under("host allocations", [self.allocations.describe()])
        lines += _under("host copies", self._describe_copies())
        if self.hops.all_bytes:
            lines += _under("ring", [self._describe_hops()])
        lines += _under("attention", [self._describe_kernels()])
        program = self.lowering
        lines += _under("program", [f"{program.fingerprint}, {program.num_bodies} bodies of ticks"])
        for name, variant in self.variants.items():
            lines += _under(name, variant._describe_variant(self.capacity.hbm_bytes))
        return "\n".join([*lines, *_under("compiled in", [f"{self.compile_s:.0f} s by jax {self.jax_version}"])])

    def _describe_hops(self) -> str:
        hops = self.hops
        shares = [size / hops.all_bytes for size in (hops.attention_bytes, hops.products_bytes, hops.exposed_bytes)]
        return (
            f"{format_bytes(hops.all_bytes)} sent per step: {shares[0]:.1%} beside attention, {shares[1]:.1%} beside "
            f"other products, {shares[2]:.1%} exposed"
        )

    def _describe_kernels(self) -> str:
        if not self.flash_calls:
            return "blockwise"
        text = f"{self.flash_calls} calls of a fused kernel in the program"
        if not self.workspace_bytes:
            return text
        return f"{text}; its workspace in a backward is up to {format_bytes(self.workspace_bytes)}, by formula"

    def _describe_variant(self, capacity_bytes: int) -> list[str]:
        hbm_bytes = self.compiler.hbm_bytes
        share = f"{hbm_bytes / capacity_bytes:.1%} of the capacity, compiled in {self.compile_s:.0f} s"
        first = f"{format_bytes(hbm_bytes)} of HBM, {share}"
        return [first, self._describe_loops()] if self.copies.overlapped_bytes + self.copies.exposed_bytes else [first]

    def _describe_loops(self) -> str:
        loop_bytes = self.copies.loop_bytes
        if not loop_bytes:
            return "no loop waits for a write to the host"
        return (
            f"loops wait for the end of writes of {format_bytes(loop_bytes)} per step, which lengthens a step by at "
            f"most {self.loops_share:.1%}"
        )

    def _describe_copies(self) -> list[str]:
        copies = self.copies
        moved = copies.overlapped_bytes + copies.exposed_bytes
        if not moved:
            return ["none"]
        text = f"{format_bytes(moved)} per step"
        if copies.kernel_bytes is not None:
            share = copies.kernel_bytes / moved
            text += f", {share:.1%} of it by kernels on the compute units, the rest by DMA engines"
        of_optimizer = copies.optimizer_bytes / moved
        optimizer = f", the optimizer's {of_optimizer:.1%} included" if of_optimizer else ""
        return [
            text,
            f"{self.exposed_share:.1%} of it exposed{optimizer}",
            f"longer than the overlapped compute for {self.waiting_share:.1%} of a step",
            self._describe_loops(),
        ]


def _under(name: str, lines: list[str]) -> list[str]:
    return [f"{name if number == 0 else '':22}  {line}" for number, line in enumerate(lines)]


def compile_plan(config: Config, plan: Plan, cluster: Cluster, *, variants: bool = False) -> Fit:
    """Compiles the train step of a plan for a cluster that need not exist.

    Call `processes.environment.prepare_to_compile` before jax is first imported.

    Args:
        config: the model and the optimizer.
        plan: all other settings.
        cluster: devices to compile for; at least as many as the plan's mesh has.
        variants: whether to compile with other options of the compiler too; see `variants_of`.

    Raises:
        ValueError: plan and cluster do not fit together, or the compiler is not installed or is refused for runs.
    """
    from sppo_jax.compat import check_offload, warn_of_graphs

    check_offload(cluster.device.platform, max(plan.predicted.host_bytes) > 0)
    warn_of_graphs(cluster.device.platform, plan.mesh.num_devices)
    program, lowered, workspace_bytes = _lowered(config, plan, cluster)
    lowering = program.lowering(lowered.as_text(), cluster)

    def compiled(options: dict[str, Any] | None) -> Fit:
        figures, compile_s = _figures(program, lowered, options, plan, cluster)
        return _fit(figures, config, plan, cluster, compile_s, lowering, workspace_bytes)

    others = variants_of(cluster.device.platform, plan.mesh.num_devices) if variants else {}
    return replace(compiled(None), variants={name: compiled(options) for name, options in others.items()})


def lower_plan(config: Config, plan: Plan, cluster: Cluster) -> Lowering:
    """Returns the digits and the counts of the train step of a plan, which is lowered and not compiled.

    Args and errors: as for `compile_plan`.
    """
    program, lowered, _ = _lowered(config, plan, cluster)
    return program.lowering(lowered.as_text(), cluster)


def count_plan(config: Config, plan: Plan, cluster: Cluster) -> dict[str, int]:
    """Returns the counts of the train step of a plan by the names of `Lowering`, those that need no lowering.

    Args and errors: as for `compile_plan`.
    """
    from sppo_jax.fit.lowering import counts_before_lowering
    from sppo_jax.fit.targets import compile_only_devices

    return counts_before_lowering(config, plan, compile_only_devices(cluster), cluster.device.platform)


def _lowered(config: Config, plan: Plan, cluster: Cluster) -> tuple[TrainProgram, Any, int]:
    """Returns the train step, the same lowered with cuDNN's workspace, and the bytes of the largest workspace."""
    from sppo_jax.fit.lowering import train_program
    from sppo_jax.fit.targets import compile_only_devices
    from sppo_jax.fit.workspace import reserve_workspace

    program = train_program(config, plan, compile_only_devices(cluster), cluster.device.platform)
    lowered = program.lower()
    return program, lowered, reserve_workspace(lowered)


def variants_of(platform: str, num_devices: int) -> dict[str, dict[str, Any]]:
    """Returns by name the options of the compiler that change what a run takes or how long it waits.

    A run tries kernels and takes cuBLAS where that is faster than Triton; without a GPU all products are Triton's. A
    program of several devices has no CUDA graphs.
    """
    from sppo_jax.compat import graph_loops

    if platform != "gpu":
        return {}
    return {CUBLAS: {"xla_gpu_enable_triton_gemm": False}, **({GRAPHS: graph_loops()} if num_devices == 1 else {})}


def _figures(
    program: TrainProgram, lowered: Any, options: dict[str, Any] | None, plan: Plan, cluster: Cluster
) -> tuple[Figures, float]:
    """Compiles a lowered program; returns its figures, and the seconds that took."""
    start = time.perf_counter()
    if cluster.device.platform != "gpu":
        compiled = compile_lowered(lowered, options)
        figures = Figures.of(compiled, program.turn_shares, platform=cluster.device.platform)
        return figures, time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_lowered(lowered, {**(options or {}), "xla_dump_to": folder})
        compile_s = time.perf_counter() - start
        figures = Figures.of(compiled, program.turn_shares, graphed_loops(Path(folder)), planned=program.slices)
        return replace(figures, allocations=host_allocations(Path(folder), plan, cluster)), compile_s


def _fit(
    figures: Figures,
    config: Config,
    plan: Plan,
    cluster: Cluster,
    compile_s: float,
    lowering: Lowering,
    workspace_bytes: int,
) -> Fit:
    import jax

    beside = beside_copies(config, plan, cluster)
    return Fit(
        compiler=Sizes(hbm_bytes=figures.hbm_bytes, host_bytes=figures.host_bytes),
        predicted=Sizes(hbm_bytes=max(plan.predicted.hbm_bytes), host_bytes=max(plan.predicted.host_bytes)),
        capacity=Sizes(hbm_bytes=pool_bytes(cluster), host_bytes=cluster.device_host_bytes),
        copies=figures.copies,
        waiting_share=figures.copies.waiting_s(*beside) / plan.predicted.step_s,
        loops_share=figures.copies.loops_s(*beside) / plan.predicted.step_s,
        hops=figures.hops,
        workspace_bytes=workspace_bytes,
        wrong_slices=figures.wrong_slices,
        allocations=figures.allocations,
        flash_calls=figures.flash_calls,
        lowering=lowering,
        compile_s=compile_s,
        jax_version=jax.__version__,
    )


def beside_copies(config: Config, plan: Plan, cluster: Cluster) -> tuple[float, float, dict[str, tuple[float, ...]]]:
    """Returns what `HostCopies.waiting_s` asks for.

    That is the bytes a second of the link to the host, the FLOP/s of products, and the planner's seconds of each
    chunk's tick besides products: attention, elementwise work, what is sent to other devices.
    """
    costs, table = costs_of(plan, config, cluster), plan.outline()

    def besides_s(op: str, start: int, length: int) -> float:
        return costs.seconds(op, start, length) - costs.products_s(op) * length / plan.mesh.seq

    chunks = list(zip(table.chunk_starts, table.chunk_lengths, strict=False))
    of_chunks = {op: tuple(besides_s(op, *chunk) for chunk in chunks) for op in "FB"}
    size = COMPUTE_BYTES.get(config.model.compute_dtype, cluster.device.compute_bytes)
    return cluster.host_link_bytes_s, cluster.device.linear_flops_s(size), of_chunks


def compile_lowered(lowered: Any, options: dict[str, Any] | None = None) -> Any:
    """Compiles a lowered program for a device that is not here.

    Some versions of XLA refuse single Triton products where no GPU is at hand. The program is then compiled again with
    all products by cuBLAS, which can change its memory by a few percent; a warning says so.

    Args:
        lowered: a `jax.stages.Lowered`.
        options: of the compiler, by name.
    """
    from jax.errors import JaxRuntimeError

    try:
        return lowered.compile(compiler_options=options) if options else lowered.compile()
    except JaxRuntimeError as error:
        if not any(words in str(error) for words in _NO_TRITON):
            raise
    warnings.warn(
        "without a GPU this version of XLA finds no kernel for a Triton product: compiled with all products by cuBLAS, "
        "which can change the memory by a few percent; jax 0.12 needs no such change",
        stacklevel=2,
    )
    return lowered.compile(compiler_options={**(options or {}), "xla_gpu_enable_triton_gemm": False})
