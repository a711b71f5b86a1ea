"""The section `hardware`: figures of the machines that a plan is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from sppo_jax.config.section import Section


@dataclass(frozen=True, kw_only=True)
class HardwareConfig(Section):
    """Figures of the machines that the planner assumes; a key given here replaces the measured and datasheet figures.

    Args:
        cluster: devices to plan for, as NAME:HOSTSxDEVICES, e.g. a100-80g:16x8, or a TPU slice such as v5p:4x4x4;
            null: the simulated devices of `train.devices`, else the devices present.
        measured: path of a file that `sppo profile` or `sppo check` wrote; its figures replace the datasheet's; null:
            the datasheet.
        hbm_bytes: bytes of memory of one device; at least 1, or "auto": that of the devices present, or, where
            `hardware.cluster` is given, the datasheet's figure.
        hbm_spare: share of the memory available to a run on one device that plans leave free; at least 0, below 1, or
            "auto": 0.03 on a GPU, 0.1 on the GPUs of this machine with jax 0.10 or 0.11, whose compiler takes up to 11%
            more than predicted, 0.06 elsewhere.
        host_bytes: bytes of memory of one host, shared by its devices; at least 1, or "auto": the memory that processes
            of this machine may use, if the plan is for the devices present, else that of a typical host.
        host_link_bytes_s: bytes per second between a device and its host, one way; at least 1, or "auto": the measured
            figure, else the datasheet's.
        link_bytes_s: bytes per second between two devices of a host, one way; at least 1, or "auto": the measured
            figure, else the datasheet's.
        network_bytes_s: bytes per second between devices of different hosts, one way; at least 1, or "auto": the
            measured figure, else the datasheet's.
        matmul_flops_s: FLOP/s that a device reaches in matrix products; at least 1, or "auto": the measured figure,
            else an estimate from the datasheet's peak.
    """

    section: ClassVar[str] = "hardware"
    cluster: str | None = None
    measured: str | None = None
    hbm_bytes: Literal["auto"] | int = "auto"
    hbm_spare: Literal["auto"] | float = "auto"
    host_bytes: Literal["auto"] | int = "auto"
    host_link_bytes_s: Literal["auto"] | float = "auto"
    link_bytes_s: Literal["auto"] | float = "auto"
    network_bytes_s: Literal["auto"] | float = "auto"
    matmul_flops_s: Literal["auto"] | float = "auto"

    def _check(self) -> None:
        self._at_least(1, "hbm_bytes", "host_bytes", "host_link_bytes_s", "link_bytes_s", "network_bytes_s")
        self._at_least(1, "matmul_flops_s")
        if self.hbm_spare != "auto":
            self._fraction("hbm_spare")
