"""Part `peer`: the same models and lengths in PyTorch, and in plain JAX, as people train them today."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.gpu_parts import peer_jax
from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.program import Program, Target
from bench.gpu_parts.step import FEW_LAYERS, ONE_BILLION, TINY
from sppo_jax.config import ModelConfig, config_from_dict
from sppo_jax.hardware import DEVICES
from sppo_jax.models.counts import flops_per_token

_K = 1024
_SHAPE = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_size")


def cases(*, tiny: bool) -> list[Case]:
    """List the cases: each framework at the lengths of part `step`, and its longest."""
    if tiny:
        settings = {"model": TINY, "lengths": [64], "timed_steps": 1, "warm_up_steps": 1}
        return [_case(framework, "tiny", settings, 15) for framework in ("torch", "jax")]
    few = ONE_BILLION | {"num_layers": FEW_LAYERS}
    found = []
    for framework in ("torch", "jax"):
        for name, model, length, expected_s in (
            ("1B at 32K", ONE_BILLION, 32, 45),
            ("1B at 128K", ONE_BILLION, 128, 95),
            (f"1B's widths, {FEW_LAYERS} layers, at 512K", few, 512, 125),
        ):
            settings = {"model": model, "lengths": [length * _K], "timed_steps": 3, "warm_up_steps": 1}
            found.append(_case(framework, name, settings, expected_s))
    # On Hopper PyTorch's own choice is cuDNN's kernel, the faster of the two.
    settings = {"model": ONE_BILLION, "lengths": [128 * _K], "timed_steps": 3, "warm_up_steps": 1, "attention": "cudnn"}
    found.append(_case("torch", "1B at 128K, cudnn attention", settings, 80))
    # Without a warm-up, and only once: what counts is whether it fits.
    longest = {"model": few, "lengths": [768 * _K, 1024 * _K], "timed_steps": 1, "warm_up_steps": 0}
    compiled = {"model": few, "lengths": [2**20, 2**21], "compile_only": True}
    return [*found, _case("torch", "longest", longest, 150), _case("jax", "longest", compiled, 55)]


def _case(framework: str, name: str, settings: dict, expected_s: float) -> Case:
    return Case(
        part="peer",
        name=f"{framework}, {name}",
        settings=settings | {"framework": framework},
        expected_s=expected_s,
        limit_s=3 * expected_s + 60,
        packages=("torch", "transformers") if framework == "torch" else (),
        hbm_gib=70.0 if expected_s > 15 else 0.0,
        host_gib=64.0 if expected_s > 15 else 0.0,
    )


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List the programs that jax compiles."""
    if settings["framework"] == "jax":
        yield from peer_jax.programs(settings, target, model_of(settings, target.platform))


def run(settings: dict, device: str, emit: Emit) -> None:
    """Measure; a row a length, with its MFU by this project's own count."""
    model = model_of(settings, DEVICES[device].platform)
    layers = {"num_layers": model.num_layers}

    def emit_with_mfu(row: dict[str, Any]) -> None:
        if row.get("tokens_per_s"):
            flops_s = flops_per_token(model, row["length"]) * row["tokens_per_s"]
            row["mfu"] = flops_s / DEVICES[device].matmul_flops_s
        kernel = f", {settings['attention']} attention" if "attention" in settings else ""
        emit({"what": f"{settings['framework']}, {model.num_layers} layers{kernel}", **layers, **row})

    if settings["framework"] == "jax":
        peer_jax.run(settings, device, model, emit_with_mfu)
        return
    from bench.gpu_parts import peer_torch

    shape = {name: getattr(model, name) for name in _SHAPE}
    told = shape | {"tied_embeddings": model.tied_embeddings, "rope_theta": model.rope.theta}
    peer_torch.run(settings | {"model": told}, device, emit_with_mfu)


def model_of(settings: dict, platform: str) -> ModelConfig:
    """Return the model's shape, presets resolved."""
    dtype = "float32" if platform == "cpu" else "bfloat16"
    values = {"model": settings["model"] | {"compute_dtype": dtype}, "sequence": {"length": 64}, "train": {"steps": 1}}
    return config_from_dict(values).model
