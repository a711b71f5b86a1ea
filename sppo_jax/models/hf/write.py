"""Export to a Hugging Face folder: tensors are written one by one, so that host memory holds one beside the model."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from sppo_jax.config.hf.families import CONFIG, read_config
from sppo_jax.config.model import ModelConfig
from sppo_jax.config.to_hf import shape_to_hf
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.files.paths import local_path
from sppo_jax.models.counts import num_params
from sppo_jax.models.decoder import Decoder
from sppo_jax.models.hf.copied import Copied, copied_from
from sppo_jax.models.hf.folder import DTYPES, form_like
from sppo_jax.models.hf.form import Form
from sppo_jax.models.hf.read import path_name, shapes_by_path
from sppo_jax.models.hf.sets import INDEX, WEIGHTS
from sppo_jax.models.hf.tensor_rules import to_tensor
from sppo_jax.models.hf.tensors import TensorSlot, parameter_shapes, places, sizes_of, tensor_shapes
from sppo_jax.models.hf.tokenizer import copy_tokenizer, set_length
from sppo_jax.processes.stopping import removed_if_stopped

# Bytes of tensors above which an export has several files and an index.
SHARD_BYTES = 5_000_000_000


def to_hf(
    model: Decoder | nnx.State,
    path: str | Path,
    *,
    config: ModelConfig | None = None,
    like: str | Path | None = None,
    dtype: str = "auto",
    length: int = 0,
    finish: Callable[[Path], None] | None = None,
    without: Collection[str] = (),
) -> None:
    """Writes a model as a folder that transformers loads; the folder appears whole or not at all.

    Args:
        model: a decoder, or its parameters in the tree of `nnx.state(model, nnx.Param)`, placed on any devices of this
            process.
        path: the folder; must not be there, or be empty.
        config: the model's shape, where only parameters are given.
        like: Hugging Face folder from which special tokens, family, tokenizer and the form of experts' tensors are
            taken, and the layers that draft tokens, unchanged; None: none are.
        dtype: of the tensors: float32, bfloat16, float16, or auto: that of the parameters.
        length: tokens of the longest sequence it was trained on, for `max_position_embeddings`; 0: not known.
        finish: adds further files to the folder before it appears; None: adds none.
        without: parts of `like` beside the language model that are not copied; "mtp" is the layers that draft tokens.

    Raises:
        ValueError: the folder holds something, the model has no counterpart in transformers, or a part of `like` is for
            another vocabulary.
    """
    params = nnx.state(model, nnx.Param) if isinstance(model, Decoder) else model
    config = model.config if isinstance(model, Decoder) and config is None else config
    if config is None:
        raise ValueError("to_hf must be given the config of the model with the parameters, got no config; pass config=")
    path, like = local_path(path, "the folder to write"), None if like is None else local_path(like, "like")
    origin = {} if like is None else read_config(like)
    # Refused by its settings first: what has no name there has no tensors either.
    family = shape_to_hf(config, like=origin, length=length, dtype=dtype)["model_type"]
    form = form_like(like, family)
    leaves = _check_params(params, config, form)
    name = str(leaves["embedding"].dtype) if dtype == "auto" else dtype
    if name not in DTYPES.values():
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES.values())}, got {dtype!r}; choose one")
    copied = copied_from(like, origin, config, family, without)
    content = shape_to_hf(config, like=origin, length=length, dtype=name) | copied.keys
    with new_folder(path, num_params(config) * np.dtype(_numpy_dtype(name)).itemsize) as folder:
        _write_tensors(folder, leaves, config, form, np.dtype(_numpy_dtype(name)), copied)
        (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if like is not None:
            copy_tokenizer(like, folder)
        if finish is not None:
            finish(folder)
        set_length(folder, content["max_position_embeddings"])


def check_new(path: Path, num_bytes: int) -> None:
    """Checks that a folder can be written without changing existing files, and that the disk has space for the folder.

    Args:
        path: the folder.
        num_bytes: what will be written, about.

    Raises:
        ValueError: there is something of that name, or too little room.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"the folder to write must be new or empty, got {path} with files in it; choose another folder"
        )
    above = next(folder for folder in path.absolute().parents if folder.exists())
    free = shutil.disk_usage(above).free
    if free < num_bytes:
        raise ValueError(
            f"the disk of {path} must have {format_bytes(num_bytes)} free, got {format_bytes(free)}; "
            "free space, or choose another folder"
        )


@contextmanager
def new_folder(path: Path, num_bytes: int) -> Iterator[Path]:
    """Gives a temporary folder to fill; the folder is renamed at the end, and removed after an error.

    Args:
        path: the folder.
        num_bytes: what will be written, about.

    Raises:
        ValueError: there is something of that name, or it cannot be written.
    """
    check_new(path, num_bytes)
    partial = path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        partial.chmod(0o755)
        with removed_if_stopped(partial):
            yield partial
            partial.replace(path)
    except OSError as error:
        raise ValueError(
            f"the folder to write must be writable, got {path} ({error.strerror}); choose another folder"
        ) from error
    finally:
        if partial != path:
            shutil.rmtree(partial, ignore_errors=True)


def _check_params(params: nnx.State, config: ModelConfig, form: Form) -> dict[str, jax.Array]:
    """Returns the parameters by their paths.

    Raises:
        ValueError: they are not those of `config`, or lie on devices of other processes.
    """
    got, wanted = shapes_by_path(params), parameter_shapes(config, form)
    for name in sorted(set(got) | set(wanted)):
        if got.get(name) != wanted.get(name):
            raise ValueError(
                f"a Hugging Face model must be this project's decoder: {name} must be {wanted.get(name)}, got "
                f"{got.get(name)}; export only models of DecoderLayer"
            )
    leaves = {path_name(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(params)}
    if not all(leaf.is_fully_addressable for leaf in leaves.values()):
        raise ValueError(
            "to_hf must be given parameters on devices of this process, got parameters on other processes; save a "
            "checkpoint, "
            "then run sppo convert to-hf"
        )
    return leaves


def _numpy_dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else name


def _write_tensors(
    folder: Path, leaves: Mapping[str, jax.Array], config: ModelConfig, form: Form, dtype: np.dtype, copied: Copied
) -> None:
    """Writes all tensors, in one file or in several with an index."""
    own, code = tensor_shapes(config, form), next(code for code, name in DTYPES.items() if name == dtype.name)
    shapes, dtypes = {**own, **copied.shapes}, {**dict.fromkeys(own, code), **copied.dtypes}
    num_bytes = {name: _num_bytes(shape, dtypes[name]) for name, shape in shapes.items()}
    shards = _shards(num_bytes, SHARD_BYTES)
    of = {place.name: place for place in places(config, form)}
    sizes = {stack: sizes_of(config, stack) for stack in {place.rules[0].of_stack for place in of.values()}}
    file_of = {}
    for number, names in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        file_of |= dict.fromkeys(names, file)
        with (folder / file).open("wb") as out:
            _write_header(out, {name: shapes[name] for name in names}, dtypes)
            for name in names:
                if name in copied.shapes:
                    out.write(copied.bytes_of(name))
                    continue
                values = _cast(_tensor(of[name], leaves, sizes[of[name].rules[0].of_stack]), dtype, name)
                out.write(values.reshape(-1).view(np.uint8).data)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(num_bytes.values())}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tensor(place: TensorSlot, leaves: Mapping[str, jax.Array], sizes: Mapping[str, int]) -> np.ndarray:
    return to_tensor(place.rules, [_fetch(leaves[rule.ours], place.index) for rule in place.rules], sizes)


def _shards(num_bytes: Mapping[str, int], most: int) -> list[list[str]]:
    """Assigns tensors to files in order; each file has at most `most` bytes, or one tensor."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in num_bytes.items():
        if shards[-1] and held + size > most:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _num_bytes(shape: tuple[int, ...], code: str) -> int:
    return math.prod(shape) * np.dtype(_numpy_dtype(DTYPES[code])).itemsize


def _write_header(out: IO[bytes], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> None:
    """Writes the header of a file, because the writer of the library needs all tensors of a file in memory at once."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        stop = start + _num_bytes(shape, dtypes[name])
        header[name] = {"dtype": dtypes[name], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)


def _cast(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Returns the values in `dtype`, contiguous in memory.

    Raises:
        ValueError: float16 cannot hold one.
    """
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(values.astype(dtype))
    if dtype == np.float16 and np.isinf(cast).any() and not np.isinf(values).any():
        raise ValueError(f"float16 must hold every value, got larger values in {name}; use dtype bfloat16 or float32")
    return cast


def _fetch(leaf: jax.Array, index: tuple[int, ...]) -> np.ndarray:
    """Copies a parameter, or what stands at an index of its first dims, to the host from the devices that hold it."""
    if not index and leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_shards[0].data)
    depth = len(index)
    out = np.empty(leaf.shape[depth:], leaf.dtype)
    for shard in leaf.addressable_shards:
        if shard.replica_id:
            continue
        spans = [part.indices(size)[:2] for part, size in zip(shard.index[:depth], leaf.shape[:depth], strict=True)]
        if all(start <= number < stop for number, (start, stop) in zip(index, spans, strict=True)):
            first = [number - start for number, (start, _) in zip(index, spans, strict=True)]
            out[shard.index[depth:]] = np.asarray(_row(shard.data, first))
    return out


def _row(values: jax.Array, index: Sequence[int]) -> jax.Array:
    """Returns what stands at an index of the first dims; another index compiles nothing new."""
    if not index:
        return values
    inner = values.shape[len(index) :]
    start = (*index, *[0] * len(inner))
    return jax.lax.dynamic_slice(values, start, (*[1] * len(index), *inner)).reshape(inner)
