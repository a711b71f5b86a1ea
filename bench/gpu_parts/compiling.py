"""Compiles the programs of a case for a device that is not here, and reads the compiler's figures."""

from __future__ import annotations

import importlib
import time
from contextlib import ExitStack
from unittest import mock

from bench.gpu_parts.case import Emit
from sppo_jax.fit.compiled import compile_lowered
from sppo_jax.fit.figures import Figures
from sppo_jax.fit.workspace import reserve_workspace
from sppo_jax.hardware import DEVICES, make_cluster, parse_cluster
from sppo_jax.processes.environment import prepare_to_compile


def compile_case(module: str, settings: dict, device: str, emit: Emit) -> None:
    """Compile every program of a case; each makes a row.

    Args:
        module: that has the programs.
        settings: of the case.
        device: a GPU's name in `sppo_jax.hardware.DEVICES`, or a topology of TPUs.
        emit: takes a row with bytes, calls of fused kernels, and host copies with no compute beside them.
    """
    prepare_to_compile()
    from bench.gpu_parts.program import Target
    from sppo_jax.fit.targets import compile_only_devices

    count = settings.get("devices", 1)
    cluster = parse_cluster(device) if ":" in device else make_cluster(DEVICES[device], count)
    target = Target(cluster.device, tuple(compile_only_devices(cluster)[:count]))
    with _gpu_pretended():
        for program in importlib.import_module(module).programs(settings, target):
            start_s = time.perf_counter()
            lowered = program.lower()
            reserve_workspace(lowered)
            compiled = compile_lowered(lowered)
            seconds = round(time.perf_counter() - start_s, 1)
            figures = Figures.of(compiled, program.turn_shares, platform=cluster.device.platform)
            emit({"program": program.name, **figures.to_dict(), "compile_s": seconds})


def _gpu_pretended() -> ExitStack:
    """Answer the questions that jax's public attention function asks of a GPU at hand; our own kernel asks none."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    answers = {
        "check_cudnn_version": lambda: 91000,
        "check_compute_capability": lambda capability: True,
        "is_cuda_compute_capability_equal": lambda capability: False,
    }
    stack = ExitStack()
    for name, answer in answers.items():
        stack.enter_context(mock.patch.object(cudnn, name, answer))
    return stack
