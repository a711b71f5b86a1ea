"""What the compiler says of a plan's train step: bytes, kernels, and host copies behind compute."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from sppo_jax.config import Config
from sppo_jax.fit.copies import HostCopies, host_copies
from sppo_jax.hardware import Cluster
from sppo_jax.planner.plan import Plan
from sppo_jax.units import format_bytes

# Share of the bytes of host copies that may run with no compute beside them.
MAX_EXPOSED = 0.01


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of one device: its own memory, and its part of its host's."""

    hbm_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The compiler's figures beside the planner's and the machine's, all of one device.

    Args:
        compiler: arguments + outputs + temporaries - aliases, and what lies on the host.
        predicted: the plan's, of its largest stage.
        capacity: what there is.
        copies: bytes moved between device and host in a step.
        flash_calls: calls of a fused attention kernel in the program's text.
        compile_s: seconds the compiler took.
    """

    compiler: Sizes
    predicted: Sizes
    capacity: Sizes
    copies: HostCopies
    flash_calls: int
    compile_s: float

    @property
    def fits(self) -> bool:
        """Whether both memories hold it, by the compiler's figures."""
        return (
            self.compiler.hbm_bytes <= self.capacity.hbm_bytes and self.compiler.host_bytes <= self.capacity.host_bytes
        )

    @property
    def exposed_share(self) -> float:
        """Share of the copied bytes with no compute beside them."""
        moved = self.copies.overlapped_bytes + self.copies.exposed_bytes
        return self.copies.exposed_bytes / moved if moved else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return what `sppo fit --json` prints."""
        return {
            "fits": self.fits,
            "compiler": asdict(self.compiler),
            "predicted": asdict(self.predicted),
            "capacity": asdict(self.capacity),
            "host_copies": {
                "overlapped_bytes": self.copies.overlapped_bytes,
                "exposed_bytes": self.copies.exposed_bytes,
            },
            "flash_calls": self.flash_calls,
            "compile_s": round(self.compile_s, 1),
        }

    def describe(self) -> str:
        """Return the figures as a table, and a line on the copies."""
        rows = [("", "compiler", "predicted", "capacity", "compiler of capacity")]
        for name, key in (("HBM of a device", "hbm_bytes"), ("host, a device's part", "host_bytes")):
            values = [getattr(sizes, key) for sizes in (self.compiler, self.predicted, self.capacity)]
            rows.append((name, *map(format_bytes, values), f"{values[0] / values[2]:.1%}"))
        lines = [f"{row[0]:22}" + "".join(f"{cell:>13}" for cell in row[1:4]) + f"  {row[4]}" for row in rows]
        moved = self.copies.overlapped_bytes + self.copies.exposed_bytes
        copies = f"{format_bytes(moved)} a step, {self.exposed_share:.1%} of it with no compute beside it"
        lines.append(f"{'host copies':22}  {copies if moved else 'none'}")
        kernels = f"{self.flash_calls} calls of a fused kernel in the program" if self.flash_calls else "blockwise"
        lines.append(f"{'attention':22}  {kernels}")
        return "\n".join([*lines, f"{'compiled in':22}  {self.compile_s:.0f} s"])


def prepare_environment() -> None:
    """Set what must be set before jax is imported: no accelerator is looked for, and none is needed."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    flag = "--xla_gpu_autotune_level=0"  # there is no GPU to try kernels on
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def compile_plan(config: Config, plan: Plan, cluster: Cluster) -> Fit:
    """Compile the train step of a plan for a cluster that need not exist.

    Call `prepare_environment` before jax is first imported.

    Args:
        config: the model and the optimizer.
        plan: all else.
        cluster: devices to compile for; at least as many as the plan's mesh has.

    Raises:
        ValueError: plan and cluster do not fit together, or the compiler is not installed.
    """
    from sppo_jax.fit.lowering import lower_train_step
    from sppo_jax.fit.targets import compile_only_devices

    lowered = lower_train_step(config, plan, compile_only_devices(cluster), cluster.device.platform)
    start = time.perf_counter()
    compiled = lowered.compile()
    compile_s = time.perf_counter() - start
    sizes, text = compiled.memory_analysis(), compiled.as_text()
    return Fit(
        compiler=_compiled_sizes(sizes),
        predicted=Sizes(hbm_bytes=max(plan.predicted.hbm_bytes), host_bytes=max(plan.predicted.host_bytes)),
        capacity=Sizes(hbm_bytes=cluster.device.hbm_bytes, host_bytes=cluster.device_host_bytes),
        copies=host_copies(text),
        flash_calls=text.count('custom_call_target="__cudnn$fmha'),
        compile_s=compile_s,
    )


def _compiled_sizes(sizes: Any) -> Sizes:
    def total(prefix: str) -> int:
        parts = {name: getattr(sizes, f"{prefix}{name}_size_in_bytes") for name in ("argument", "output", "temp")}
        return sum(parts.values()) - getattr(sizes, f"{prefix}alias_size_in_bytes")

    return Sizes(hbm_bytes=total(""), host_bytes=total("host_"))
