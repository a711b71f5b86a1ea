"""Import of a Hugging Face model: each device's part of each parameter is read from the files' slices.

Host memory holds one device's part of one parameter at a time, beside what has been placed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from sppo_jax.arrays.dtypes import compute_dtype
from sppo_jax.config.model import ModelConfig
from sppo_jax.config.section import build_section
from sppo_jax.files.paths import local_path
from sppo_jax.models.decoder import Decoder
from sppo_jax.models.hf.folder import TensorFolder
from sppo_jax.models.hf.tensor_rules import read_parameter
from sppo_jax.models.hf.tensors import parameter_shapes, rules_for, sizes_of


def from_hf(
    path: str | Path,
    *,
    shardings: nnx.State | jax.sharding.Sharding | None = None,
    dtype: str = "auto",
    **settings: Any,
) -> Decoder:
    """Imports a Llama, Qwen2, Qwen3, Qwen3-MoE, Qwen3.5, Qwen3-Next, Mistral, SmolLM3, Gemma 3, OLMo 3 or gpt-oss
    model with its weights.

    Args:
        path: folder with config.json and safetensors.
        shardings: of the parameters, one for all or a tree of them (`sppo_jax.param_shardings`); None: the default
            device.
        dtype: compute dtype: float32, bfloat16, float64, or auto; parameters are at least float32.
        settings: further fields of a config's section `model`, e.g. `rope={"scaling": "yarn", "factor": 4}`.

    Returns:
        The decoder; `model(tokens)` gives logits.

    Raises:
        ValueError: the folder is no such model, is incomplete, or cannot be represented.
    """
    config = _model_config({**settings, "hf": str(path), "compute_dtype": dtype})
    if config.compute_dtype == "float64" and not jax.config.jax_enable_x64:
        raise ValueError(
            "dtype float64 must have jax's 64-bit mode, got the mode off; set JAX_ENABLE_X64=1, or use float32"
        )
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0)))
    shapes = nnx.state(model, nnx.Param)
    if shardings is not None:
        one = isinstance(shardings, jax.sharding.Sharding)
        tree = jax.tree.map(lambda _: shardings, shapes) if one else shardings
        shapes = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, tree
        )
    nnx.update(model, load_hf_params(path, shapes))
    return model


def load_hf_params(path: str | Path, shapes: nnx.State, stored: nnx.State | None = None) -> nnx.State:
    """Reads the parameters of a Hugging Face model, each straight onto its devices.

    Args:
        path: folder with config.json and safetensors.
        shapes: the tree of `nnx.state(model, nnx.Param)` with `jax.ShapeDtypeStruct`s; where a leaf has a sharding it
            is read so, else onto the default device. A process reads the parts of its own devices alone.
        stored: the same tree in the shapes in which it is wanted, which may have zeros at the ends of dims; None: in
            `shapes`.

    Returns:
        The parameters in that tree, in the dtypes of `shapes`.

    Raises:
        ValueError: the folder has moved, is incomplete, or is of another model.
    """
    # Of the shape alone: whoever trains the model has said whether its experts are balanced.
    config = _model_config({"hf": str(path), "experts": {"balance": 0.0}})
    folder = TensorFolder(local_path(path, "the folder"))
    got, wanted = shapes_by_path(shapes), parameter_shapes(config, folder.form)
    for name in sorted(set(got) | set(wanted)):
        if got.get(name) != wanted.get(name):
            raise ValueError(
                f"the model must have the shape of the weights in {path}: {name} must be {wanted.get(name)}, got "
                f"{got.get(name)}; set model: hf:{path} to take the shape from the folder"
            )
    folder.check(config)
    rules = rules_for(config, folder.form)
    sizes = {rule.of_stack: sizes_of(config, rule.of_stack) for rule in rules.values()}

    def load(key: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        rule = rules[path_name(key)]
        read = partial(read_parameter, rule, folder.read, sizes=sizes[rule.of_stack], dtype=leaf.dtype)
        return _place(wanted, partial(_read_padded, read, leaf))

    return jax.tree_util.tree_map_with_path(load, shapes, shapes if stored is None else stored)


def path_name(key: tuple[Any, ...]) -> str:
    """Returns the path of a parameter within its tree, as rules name it."""
    return "/".join(str(part.key) for part in key if isinstance(part, jax.tree_util.DictKey))


def shapes_by_path(params: nnx.State) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter by its path."""
    return {path_name(key): tuple(leaf.shape) for key, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _model_config(settings: dict[str, Any]) -> ModelConfig:
    config = build_section(ModelConfig, settings, "model")
    assert isinstance(config, ModelConfig)
    return dataclasses.replace(config, compute_dtype=compute_dtype(config.compute_dtype).name)


def _read_padded(read: Callable[..., np.ndarray], leaf: jax.ShapeDtypeStruct, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a part of a parameter; the part holds zeros where it goes beyond the parameter."""
    there = tuple(
        slice(min(part.start, size), min(part.stop, size)) for part, size in zip(index, leaf.shape, strict=True)
    )
    if there == index:
        return read(index=index)
    found = np.zeros([part.stop - part.start for part in index], leaf.dtype)
    if all(part.stop > part.start for part in there):
        found[tuple(slice(0, part.stop - part.start) for part in there)] = read(index=there)
    return found


def _place(leaf: jax.ShapeDtypeStruct, read: Callable[..., np.ndarray]) -> jax.Array:
    """Reads an array part by part; every part goes to its devices before the next is read."""
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    parts = []
    for index, devices in _parts(sharding, leaf.shape):
        values = read(index=index)
        places = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        parts += [jax.block_until_ready(jax.device_put(values, place)) for place in places]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def _parts(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[slice, ...], list[jax.Device]]]:
    """Yields the parts of an array that this process holds, each with the devices that hold it."""
    by_span: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        span = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        by_span.setdefault(span, []).append(device)
    for span, devices in by_span.items():
        yield tuple(slice(*ends) for ends in span), devices
