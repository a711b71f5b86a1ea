"""A run on GPUs or TPUs begins with a check of attention's kernel, on every device.

A kernel that passed is remembered in a file of the user, for the device, its driver and libraries, and the heads: the
next run with the same ones does not check again. The kernel for TPUs is our own, so its text counts too.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from sppo_jax.arrays.dtypes import compute_dtype
from sppo_jax.attention import check, intervals
from sppo_jax.attention.check import FUSED, CallHeads, CheckedKernel
from sppo_jax.attention.pallas_blocks import choose_blocks, target_of
from sppo_jax.attention.spreading import ulysses
from sppo_jax.attention.tpu import backward as pallas_backward
from sppo_jax.attention.tpu import forward as pallas_forward
from sppo_jax.attention.tpu import pallas
from sppo_jax.attention.tpu.check_calls import checked_kernel
from sppo_jax.compat import another_cudnn, cudnn_version, driver_version
from sppo_jax.config import Config
from sppo_jax.config.model import ModelConfig
from sppo_jax.files.whole import cache_directory, parse_json, write_whole
from sppo_jax.plan.plan import Plan
from sppo_jax.version import jaxlib_version, libtpu_version

# What a check comes to, if it does not refuse the kernel.
PASSED, NOT_CHECKED = "passed", "not checked"
# Rises when the check finds more than before.
_VERSION = 1
# The devices that run a kernel; blockwise is not checked.
_PLATFORMS = {"cudnn": ("gpu", "cuda"), "pallas": ("tpu",)}
# Key-value heads of a checked call of the kernel for TPUs: more of them are more of the same steps.
_MOST_KV_HEADS = 8


def check_kernels_once(config: Config, plan: Plan, *devices: jax.Device) -> str:
    """Checks on devices each call of the kernel that a plan makes there; returns the result in words.

    A kernel that needs no check is not checked.

    Args:
        config: `model.check_kernels` leaves the check out.
        plan: its kernel, and how its heads are spread.
        devices: of this process, all alike.

    Raises:
        ValueError: a call fails or differs from plain attention by more than rounding; says which, and what to do.
    """
    device = devices[0]
    if not config.model.check_kernels or device.platform not in _PLATFORMS.get(plan.kernel, ()):
        return NOT_CHECKED
    dtype, facts, calls = compute_dtype(config.model.compute_dtype), _facts(plan, device), calls_of(config.model, plan)
    kernel = FUSED
    if plan.kernel == "pallas":
        kernel, facts["blocks"] = kernel_for_tpus(plan, device, calls, dtype.itemsize)
    for heads, has_window in calls:
        passed = {
            **facts,
            "devices": len(devices),
            "heads": list(heads),
            "dtype": dtype.name,
            **({"window": True} if has_window else {}),
        }
        if _is_remembered(passed):
            continue
        found = _find(heads, dtype, has_window, kernel, devices)
        if found is not None:
            raise ValueError(_refusal(plan, found, device, facts))
        _remember(passed)
    return PASSED


def kernel_for_tpus(plan: Plan, device: jax.Device, calls, itemsize: int) -> tuple[CheckedKernel, list[int]]:
    """Returns the kernel with the blocks of the plan's longest chunk, and these blocks."""
    groups = max(heads.num_heads // heads.num_kv_heads for heads, _ in calls)
    longest = max(plan.chunk_lengths)
    num_queries, num_keys = longest // plan.ring, (plan.sequence_length + longest) // plan.ring
    blocks = choose_blocks(target_of(device.device_kind, groups, itemsize), num_queries, num_keys)
    return checked_kernel(blocks), [blocks.queries, blocks.keys, blocks.rows]


def _refusal(plan: Plan, found: str, device: jax.Device, facts: Mapping[str, object]) -> str:
    if plan.kernel == "cudnn":
        by, library, more = "cuDNN", f"cuDNN {facts['cudnn']}", f", or {another_cudnn()}"
    else:
        by, library, more = "the kernel for TPUs", f"libtpu {facts['libtpu']}", ""
    return (
        f"attention by {by} must agree with plain attention, got {found} on {device.device_kind} with {library}; plan "
        f"with model.kernel=blockwise{more} (model.check_kernels=false leaves the check out)"
    )


def calls_of(model: ModelConfig, plan: Plan) -> list[tuple[CallHeads, bool]]:
    """Returns the heads of the kernel's calls on one device, and whether they have windows, of types with attention."""
    calls = [(one, one.window_within(plan.sequence_length) > 0) for one in model.attention_types]
    return list(dict.fromkeys((_few(heads, plan), window) for one, window in calls for heads in heads_of(one, plan)))


def _few(heads: CallHeads, plan: Plan) -> CallHeads:
    """Returns heads with few key-value heads, and as many query heads of each, for the kernel for TPUs."""
    num_kv_heads = heads.num_kv_heads
    if plan.kernel != "pallas" or num_kv_heads <= _MOST_KV_HEADS:
        return heads
    few = _MOST_KV_HEADS - num_kv_heads % 2  # cores share an even number of heads in another way
    return heads._replace(num_heads=heads.num_heads // num_kv_heads * few, num_kv_heads=few)


def heads_of(model: ModelConfig, plan: Plan) -> list[CallHeads]:
    """Returns the heads of the kernel's calls on one device, after the heads are scattered, where layers are alike.

    With teams, members of a team attend with all heads of their tokens.
    """
    num_kv_heads = ulysses.replicated_heads(model.num_kv_heads, plan.ulysses) // plan.ulysses
    spread = CallHeads(model.num_heads // plan.ulysses, num_kv_heads, model.head_dim)
    alone = CallHeads(model.num_heads, model.num_kv_heads, model.head_dim)
    return [spread] if plan.groups == "static" or spread == alone else [spread, alone]


def _find(
    heads: CallHeads, dtype, has_window: bool, kernel: CheckedKernel, devices: Sequence[jax.Device]
) -> str | None:
    try:
        return check.find_difference(heads, dtype, has_window=has_window, kernel=kernel, devices=devices)
    except jax.errors.JaxRuntimeError as error:
        return f"a failure of a call ({heads}): {' '.join(str(error).split())[:200]}"


def _facts(plan: Plan, device: jax.Device) -> dict[str, object]:
    """Returns all that a result depends on, but for the calls."""
    facts: dict[str, object] = {"check": _VERSION, "device": device.device_kind, "jaxlib": list(jaxlib_version())}
    if plan.kernel == "cudnn":
        return {**facts, "driver": driver_version(), "cudnn": _dotted(cudnn_version() or ())}
    return {**facts, "libtpu": _dotted(libtpu_version()), "kernel": _text_hash()}


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _text_hash() -> str:
    """Returns what tells the kernel for TPUs from one with another text."""
    text = "".join(map(inspect.getsource, (intervals, pallas, pallas_backward, pallas_forward)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
