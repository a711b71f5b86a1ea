"""Runs one case in a process of its own: a crash, a hang or a lack of memory costs that case alone. No jax."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from bench.gpu_parts.case import DONE, FAILED, NOT_RUN, SKIPPED, Case, Outcome
from bench.gpu_parts.machine import Machine
from sppo_jax.hardware.gpu_health import read_gpus

ROOT = Path(__file__).resolve().parents[2]
_GIB = 2**30
# What a process writes where device memory, or memory that the host can pin, is short.
_SHORT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "OutOfMemoryError", "out of memory", "MemoryError")
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
_MOST_WORDS = 300
_MOST_PRINTED = 40_000  # characters of a failed case that are kept


def why_not(case: Case, machine: Machine) -> str:
    """Return why a case cannot run on a machine, in one line; empty where it can."""
    missing = [name for name in case.packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs the package {missing[0]}, which is not installed"
    found = 1 + len(machine.others)
    if machine.platform != "cpu" and case.devices > found:
        return f"needs {case.devices} devices, this machine has {found} idle"
    for what, needed_gib, got in (
        ("device memory", case.hbm_gib, machine.hbm_bytes),
        ("host memory", case.host_gib, machine.host_bytes),
    ):
        if needed_gib * _GIB > got:
            return f"needs {needed_gib:.0f} GiB of {what}, this machine has {got / _GIB:.1f}"
    return ""


def command(spec: Path) -> list[str]:
    """Return the command that runs what a file describes."""
    return [sys.executable, "-m", "bench.gpu_parts.child", str(spec)]


def run_case(case: Case, machine: Machine, mode: str, *, limit_s: float | None = None, make_command=command) -> Outcome:
    """Run a case to its end, or to that of its time.

    Args:
        case: what to run.
        machine: on what.
        mode: "run", or "compile" to compile its programs for the machine's device without running them.
        limit_s: seconds that are left, where less than the limit of the case; a case that they end is "not run".
        make_command: makes the command from the path of the file that describes the case.
    """
    is_cut = limit_s is not None and limit_s < case.limit_s
    limit_s = limit_s if is_cut else case.limit_s
    with tempfile.TemporaryDirectory(prefix="gpu-case-") as folder:
        spec, rows, log = (Path(folder) / name for name in ("case.json", "rows.jsonl", "log.txt"))
        device = machine.topology if mode == "compile" and machine.topology else machine.device
        told = {"folder": case.folder, "part": case.part, "settings": case.settings, "mode": mode, "device": device}
        spec.write_text(json.dumps(told | {"rows": str(rows)}), encoding="utf-8")
        before = clocks(machine) if mode == "run" else []
        start_s = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(
                make_command(spec),
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(case, machine, mode),
                start_new_session=True,  # so that all it started ends with it
            )
            code = _wait(process, limit_s)
        wall_s = time.monotonic() - start_s
        text = log.read_text(encoding="utf-8", errors="replace")
        status = DONE if code == 0 else NOT_RUN if code is None and is_cut else FAILED
        return Outcome(
            key=case.key,
            status=status,
            reason="" if code == 0 else _reason(code, text, limit_s),
            wall_s=round(wall_s, 1),
            rows=_read_rows(rows),
            settings=case.settings,
            clocks=[*before, *(clocks(machine) if mode == "run" else [])],
            printed="" if code == 0 else text[-_MOST_PRINTED:],
        )


def clocks(machine: Machine) -> list[dict]:
    """Return clock, power, heat and reasons of a low clock of the GPU that is measured; nothing for other devices."""
    gpus = read_gpus() if machine.platform == "gpu" else None
    if not gpus or not machine.index.isdecimal() or int(machine.index) >= len(gpus):
        return []
    found = gpus[int(machine.index)].to_dict()
    return [{name: found[name] for name in ("sm_mhz", "most_sm_mhz", "power_w", "temperature_c", "slowed_by")}]


def skipped(case: Case, reason: str) -> Outcome:
    """Return the outcome of a case that is not run."""
    return Outcome(key=case.key, status=SKIPPED, reason=reason, settings=case.settings)


def not_run(case: Case, remaining_s: float) -> Outcome:
    """Return the outcome of a case for which there is no time."""
    reason = f"takes about {case.expected_s:.0f} s, {max(0.0, remaining_s):.0f} s were left"
    return Outcome(key=case.key, status=NOT_RUN, reason=reason, settings=case.settings)


def environment(case: Case, machine: Machine, mode: str) -> dict[str, str]:
    """Return the environment of a case's process."""
    own: Mapping[str, str] = os.environ
    # On a CPU it counts that the parts work, not how fast: compiling is most of the time.
    fast = "--xla_backend_optimization_level=0" if machine.platform == "cpu" else ""
    on_cpu = machine.platform == "cpu" and case.devices > 1
    simulated = f"--xla_force_host_platform_device_count={case.devices}" if on_cpu else ""
    flags = " ".join(filter(None, (own.get("XLA_FLAGS"), case.flags, fast, simulated)))
    paths = [str(ROOT), own.get("PYTHONPATH", "")]
    on_cpu_alone = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    by_platform = {"gpu": {"CUDA_VISIBLE_DEVICES": machine.indices(case.devices)}, "tpu": {}}
    return {
        **own,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "XLA_FLAGS": flags,
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_TRACEBACK_FILTERING": "off",  # so that the last line is the error
        **(by_platform.get(machine.platform, on_cpu_alone) if mode == "run" else on_cpu_alone),
    }


def _wait(process: subprocess.Popen, limit_s: float) -> int | None:
    """Wait for a process; return its exit code, or None where its time was up. No process of its group is left."""
    try:
        return process.wait(timeout=max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_rows(path: Path) -> list[dict]:
    """Read the rows that a process wrote before its end; a line that was cut is dropped."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def _reason(code: int | None, text: str, limit_s: float) -> str:
    """Say in one line why a process did not end well."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    short = next((line for line in lines if any(word in line for word in _SHORT_OF_MEMORY)), "")
    if code is None:
        return f"took longer than {limit_s:.0f} s and was killed"
    if short:
        return f"out of memory: {short}"[:_MOST_WORDS]
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; perhaps the host's memory ran out" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    errors = [line for line in lines if _ERROR.match(line)]  # the lines behind one belong to its message
    return next(iter(errors[-1:] or lines[-1:]), f"exit code {code} without a word")[:_MOST_WORDS]
