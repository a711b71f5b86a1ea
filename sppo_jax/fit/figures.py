"""The compiler's figures of a compiled program: bytes, calls of fused kernels, and the overlap of host copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sppo_jax.fit.allocations import HostAllocations
from sppo_jax.fit.hlo.copies import HostCopies, host_copies
from sppo_jax.fit.hlo.hops import RingHops, ring_hops
from sppo_jax.fit.hlo.slices import Slice, slices_of, wrong_slices


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The compiler's figures of one device.

    Args:
        hbm_bytes: arguments + outputs + temporaries - aliases in device memory; on TPUs what XLA allocates.
        host_bytes: arguments + outputs + temporaries - aliases in host memory.
        copies: bytes moved between device and host in one run of the program.
        flash_calls: calls of a fused attention kernel in the program's text.
        hops: bytes sent round the ring in one run of the program.
        allocations: those in pinned host memory; None where they were not looked at.
        wrong_slices: host copies at other offsets than the plan's rows.
    """

    hbm_bytes: int
    host_bytes: int
    copies: HostCopies
    flash_calls: int
    hops: RingHops = RingHops()
    allocations: HostAllocations | None = None
    wrong_slices: tuple[Slice, ...] = ()

    @classmethod
    def of(
        cls,
        compiled: Any,
        turn_shares: Mapping[str, float] | None = None,
        graphed: frozenset[str] | None = None,
        *,
        platform: str = "gpu",
        planned: Sequence[Slice] = (),
    ) -> Figures:
        """Returns the figures of a program that `jax.stages.Lowered.compile` returned.

        Args:
            compiled: the program.
            turn_shares, graphed: see `host_copies`.
            platform: of its devices.
            planned: host copies of the plan.
        """
        from sppo_jax.compat import allocated_bytes  # imports jax

        sizes, text = compiled.memory_analysis(), compiled.as_text()
        return cls(
            hbm_bytes=(allocated_bytes(sizes) if platform == "tpu" else None) or _total(sizes, ""),
            host_bytes=_total(sizes, "host_"),
            copies=host_copies(text, turn_shares, graphed),
            flash_calls=sum(text.count(f'custom_call_target="{name}') for name in ("__cudnn$fmha", "tpu_custom_call")),
            hops=ring_hops(text, turn_shares),
            wrong_slices=wrong_slices(slices_of(text), planned) if planned else (),
        )

    def to_dict(self) -> dict[str, int | None]:
        """Returns the figures as JSON values."""
        return {
            "hbm_bytes": self.hbm_bytes,
            "host_bytes": self.host_bytes,
            "copied_bytes": self.copies.overlapped_bytes + self.copies.exposed_bytes,
            "exposed_bytes": self.copies.exposed_bytes,
            "loop_bytes": self.copies.loop_bytes,
            "kernel_bytes": self.copies.kernel_bytes,
            "flash_calls": self.flash_calls,
            "ring_bytes": self.hops.all_bytes,
            "ring_exposed_bytes": self.hops.exposed_bytes,
        }


def _total(sizes: Any, prefix: str) -> int:
    parts = {name: getattr(sizes, f"{prefix}{name}_size_in_bytes") for name in ("argument", "output", "temp")}
    return sum(parts.values()) - getattr(sizes, f"{prefix}alias_size_in_bytes")
