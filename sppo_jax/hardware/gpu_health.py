"""What `nvidia-smi -q -x` says of the GPUs of this machine: errors, limits, clocks, and who else uses them; no jax.

A field that this driver does not have, or shows as N/A, is None: nobody knows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from xml.etree import ElementTree

_WAIT_S = 30.0
_ABSENT = ("", "n/a", "[n/a]", "not supported", "unknown error", "insufficient permissions")
# Since driver 550 the first names; before, the second ones.
_REASONS = ("clocks_event_reasons", "clocks_throttle_reasons")
_REASON = ("clocks_event_reason_", "clocks_throttle_reason_")
_POWER = ("gpu_power_readings", "power_readings")
# Reasons for which a clock is low while nothing is wrong.
_HARMLESS = ("gpu_idle", "applications_clocks_setting", "sync_boost", "display_clock_setting", "display_clocks_setting")


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """One GPU.

    Args:
        name: its own name.
        uuid: its own.
        driver: version of the driver.
        is_divided: whether it is divided into slices (MIG).
        uncorrected: errors of its memories, since the driver was loaded, that were not corrected.
        remap_pending: whether a row of its memory waits to be replaced at a reset.
        remap_failed: whether a row could not be replaced.
        sm_mhz: clock now.
        most_sm_mhz: the fastest clock.
        power_w: power drawn now.
        power_limit_w: the limit in force.
        default_power_limit_w: the limit that the card comes with.
        temperature_c: now.
        slowed_by: why the clock is held down now, without what is harmless.
        process_ids: of the programs that compute on it; None where they cannot be seen.
        used_bytes: memory that is in use.
        free_bytes: memory that is free.
    """

    name: str
    uuid: str
    driver: str
    is_divided: bool
    uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    sm_mhz: float | None = None
    most_sm_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    temperature_c: float | None = None
    slowed_by: tuple[str, ...] | None = None
    process_ids: tuple[int, ...] | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GpuHealth:
        """Returns a GPU from what `to_dict` made of it."""
        given: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
        return cls(**given)


def read_gpus(environ: Mapping[str, str] = os.environ) -> tuple[GpuHealth, ...] | None:
    """Returns all GPUs of the machine; None without nvidia-smi, or where it fails.

    Args:
        environ: PATH is read.
    """
    program = shutil.which("nvidia-smi", path=environ.get("PATH", ""))
    if program is None:
        return None
    try:
        done = subprocess.run([program, "-q", "-x"], capture_output=True, text=True, timeout=_WAIT_S, check=True)
        return parse_gpus(done.stdout)
    except (OSError, subprocess.SubprocessError, ElementTree.ParseError):
        return None


def parse_gpus(text: str) -> tuple[GpuHealth, ...]:
    """Returns the GPUs of what `nvidia-smi -q -x` prints.

    Args:
        text: XML.

    Raises:
        ElementTree.ParseError: the text is something else.
    """
    log = ElementTree.fromstring(text)
    driver = _text(log, "driver_version") or ""
    return tuple(_gpu(gpu, driver) for gpu in log.iter("gpu"))


def _gpu(gpu: ElementTree.Element, driver: str) -> GpuHealth:
    return GpuHealth(
        name=_text(gpu, "product_name") or "",
        uuid=_text(gpu, "uuid") or "",
        driver=driver,
        is_divided=_text(gpu, "mig_mode/current_mig") == "Enabled",
        uncorrected=_uncorrected(gpu),
        remap_pending=_truth(gpu, "remapped_rows/remapped_row_pending"),
        remap_failed=_truth(gpu, "remapped_rows/remapped_row_failure"),
        sm_mhz=_number(gpu, "clocks/sm_clock"),
        most_sm_mhz=_number(gpu, "max_clocks/sm_clock"),
        power_w=_power(gpu, "instant_power_draw", "power_draw", "average_power_draw"),
        power_limit_w=_power(gpu, "current_power_limit", "power_limit"),
        default_power_limit_w=_power(gpu, "default_power_limit"),
        temperature_c=_number(gpu, "temperature/gpu_temp"),
        slowed_by=_slowed_by(gpu),
        process_ids=_process_ids(gpu),
        used_bytes=_bytes(gpu, "fb_memory_usage/used"),
        free_bytes=_bytes(gpu, "fb_memory_usage/free"),
    )


def _text(within: ElementTree.Element, path: str) -> str | None:
    text = (within.findtext(path) or "").strip()
    return None if text.lower() in _ABSENT else text


def _number(within: ElementTree.Element, path: str) -> float | None:
    text = _text(within, path)
    try:
        return None if text is None else float(text.split()[0])
    except ValueError:
        return None


def _bytes(within: ElementTree.Element, path: str) -> int | None:
    mib = _number(within, path)
    return None if mib is None else int(mib) * 2**20


def _truth(within: ElementTree.Element, path: str) -> bool | None:
    text = _text(within, path)
    return None if text is None else text == "Yes"


def _power(gpu: ElementTree.Element, *names: str) -> float | None:
    found = (_number(gpu, f"{section}/{name}") for section in _POWER for name in names)
    return next((x for x in found if x is not None), None)


def _uncorrected(gpu: ElementTree.Element) -> int | None:
    """Returns the errors since the driver was loaded; None where the card does not count them."""
    section = gpu.find("ecc_errors/volatile")
    fields = [] if section is None else [one for one in section.iter() if "uncorrectable" in one.tag]
    # Drivers before 450: by the number of bits.
    fields += [] if section is None else section.findall("double_bit/total")
    found = [int(text) for one in fields if (text := (one.text or "").strip()).isdecimal()]
    return sum(found) if found else None


def _slowed_by(gpu: ElementTree.Element) -> tuple[str, ...] | None:
    section = next((found for name in _REASONS if (found := gpu.find(name)) is not None), None)
    if section is None:
        return None
    active = [one.tag for one in section if (one.text or "").strip() == "Active"]
    names = [tag.removeprefix(_REASON[0]).removeprefix(_REASON[1]) for tag in active]
    return tuple(name.replace("_", " ") for name in names if name not in _HARMLESS)


def _process_ids(gpu: ElementTree.Element) -> tuple[int, ...] | None:
    section = gpu.find("processes")
    if section is None or (section.text or "").strip().lower() in _ABSENT[1:]:
        return None
    computing = [one for one in section.iter("process_info") if "C" in (one.findtext("type") or "C")]
    return tuple(int(pid) for one in computing if (pid := (one.findtext("pid") or "").strip()).isdecimal())
