"""A run on GPUs begins with a check of attention's fused kernel, on one device of each process.

A kernel that passed is remembered in a file of the user, for the device, its driver and libraries, and the heads: the
next run with the same ones does not check again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import jax

from sppo_jax.attention import check, ulysses
from sppo_jax.attention.check import FUSED, Heads, Kernel
from sppo_jax.compat import another_cudnn, cudnn_version, driver_version
from sppo_jax.config import Config
from sppo_jax.config.model import ModelConfig
from sppo_jax.dtypes import compute_dtype
from sppo_jax.files import cache_directory, parse_json, write_whole
from sppo_jax.plan.plan import Plan
from sppo_jax.version import jaxlib_version

# Rises when the check finds more than before.
_VERSION = 1


def check_kernels(config: Config, plan: Plan, device: jax.Device, kernel: Kernel = FUSED) -> None:
    """Checks on a device each call of the fused kernel that a plan makes there; does nothing if there are none.

    Args:
        config: `model.check_kernels` leaves the check out.
        plan: its kernel, and how its heads are spread.
        device: of this process.
        kernel: what is checked.

    Raises:
        ValueError: a call fails or differs from plain attention by more than rounding; says which, and what to do.
    """
    if not config.model.check_kernels or plan.kernel != "cudnn" or device.platform not in ("gpu", "cuda"):
        return
    dtype, facts = compute_dtype(config.model.compute_dtype), _facts(device)
    for heads, has_window in calls_of(config.model, plan):
        passed = {**facts, "heads": list(heads), "dtype": dtype.name, **({"window": True} if has_window else {})}
        if _is_remembered(passed):
            continue
        found = _find(heads, dtype, has_window, kernel, device)
        if found is not None:
            raise ValueError(
                f"attention by cuDNN must agree with plain attention, got {found} on {device.device_kind} with cuDNN "
                f"{facts['cudnn']}; plan with model.kernel=blockwise, or {another_cudnn()} (model.check_kernels=false "
                "leaves the check out)"
            )
        _remember(passed)


def calls_of(model: ModelConfig, plan: Plan) -> list[tuple[Heads, bool]]:
    """Returns the heads of the kernel's calls on one device, and whether they have windows, of kinds with attention."""
    kinds = [(kind, kind.window_within(plan.sequence_length) > 0) for kind in model.attention_kinds]
    return list(dict.fromkeys((heads, window) for kind, window in kinds for heads in heads_of(kind, plan)))


def heads_of(model: ModelConfig, plan: Plan) -> list[Heads]:
    """Returns the heads of the kernel's calls on one device, after the heads are scattered, where layers are alike.

    With teams, members of a team attend with all heads of their tokens.
    """
    num_kv_heads = ulysses.replicated_heads(model.num_kv_heads, plan.ulysses) // plan.ulysses
    spread = Heads(model.num_heads // plan.ulysses, num_kv_heads, model.head_dim)
    alone = Heads(model.num_heads, model.num_kv_heads, model.head_dim)
    return [spread] if plan.groups == "static" or spread == alone else [spread, alone]


def _find(heads: Heads, dtype, has_window: bool, kernel: Kernel, device: jax.Device) -> str | None:
    try:
        return check.find_difference(heads, dtype, has_window=has_window, kernel=kernel, device=device)
    except jax.errors.JaxRuntimeError as error:
        return f"a failure of a call ({heads}): {' '.join(str(error).split())[:200]}"


def _facts(device: jax.Device) -> dict[str, object]:
    """Returns all that a result depends on, but for the calls."""
    return {
        "check": _VERSION,
        "device": device.device_kind,
        "driver": driver_version(),
        "cudnn": ".".join(map(str, cudnn_version() or ())),
        "jaxlib": list(jaxlib_version()),
    }


def _note(passed: Mapping[str, object]) -> Path:
    name = hashlib.sha256(json.dumps(passed, sort_keys=True).encode()).hexdigest()[:16]
    return cache_directory("kernels") / f"{name}.json"


def _is_remembered(passed: Mapping[str, object]) -> bool:
    try:
        return parse_json(_note(passed).read_text(encoding="utf-8")) == passed
    except (OSError, ValueError):
        return False


def _remember(passed: Mapping[str, object]) -> None:
    """Writes a file of what was passed; the next run checks again where no file can be written."""
    note = _note(passed)
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_whole(note, json.dumps(passed, indent=2) + "\n")
