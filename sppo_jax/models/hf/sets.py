"""Which of the sets of weights in a folder is read: the one that transformers reads, and a line about the others."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from pathlib import Path

from sppo_jax.config.hf.families import CONFIG
from sppo_jax.models.hf.tokenizer import read_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
INDEX_SUFFIX = ".safetensors.index.json"
# A key of config.json that names the weights, and the names of files that are weights or say which ones are.
_KEY = "transformers_weights"
_SETS = re.compile(
    r".*\.safetensors(\.index\.json)?|pytorch_model.*\.bin(\.index\.json)?|consolidated\..*|params\.json|.*\.gguf"
    r"|tf_model.*\.h5|flax_model.*\.msgpack|model.*\.ckpt.*"
)
_SHARD = re.compile(r".*-\d+-of-\d+\.safetensors")
_MOST_NAMES = 4


def weights_file(folder: Path) -> Path:
    """Returns the file or the index of the weights that transformers reads: one file comes before shards.

    Raises:
        ValueError: there is none that can be read here.
    """
    named = read_object(folder / CONFIG).get(_KEY)
    if named is not None:
        return _named(folder, named)
    for name in (WEIGHTS, INDEX):
        if (folder / name).is_file():
            return folder / name
    torch_files = sorted(path.name for path in folder.glob("*.bin"))
    if torch_files:
        raise ValueError(
            f"weights must be safetensors, got {torch_files[0]} in {folder}; load the model with transformers and save "
            "the model with save_pretrained, or download safetensors of the model"
        )
    shards = sorted(path.name for path in folder.glob("*.safetensors") if _SHARD.fullmatch(path.name))
    got = f"{shards[0]} in {folder} without its index" if shards else f"{folder} with neither"
    raise ValueError(
        f"a Hugging Face model must have {WEIGHTS} or {INDEX}, got {got}; download the "
        f"{'index' if shards else 'weights'}"
    )


def _named(folder: Path, named: object) -> Path:
    """Returns the file that config.json names."""
    path = folder / str(named)
    if not str(named).endswith((".safetensors", INDEX_SUFFIX)) or path.resolve().parent != folder.resolve():
        raise ValueError(
            f"{_KEY} must name safetensors or their index in the folder, got {named!r} in {folder / CONFIG}; correct it"
        )
    if not path.is_file():
        raise ValueError(f"{_KEY} must name a file of the folder, got no {path.name} in {folder}; download {path.name}")
    return path


def tell_of_other_sets(folder: Path, read: Path, files: Collection[Path]) -> None:
    """Warns of weights in a folder that are not read.

    Args:
        folder: of the model.
        read: from `weights_file`.
        files: the files with the tensors that are read.
    """
    known = {read.name, *(file.name for file in files)}
    others = sorted(path.name for path in folder.iterdir() if _SETS.fullmatch(path.name) and path.name not in known)
    if INDEX in others and _names_only(folder / INDEX, known):
        others.remove(INDEX)
    if others:
        more = f" and {len(others) - _MOST_NAMES} more" if len(others) > _MOST_NAMES else ""
        warnings.warn(
            f"a folder should have one set of weights, got {', '.join(others[:_MOST_NAMES])}{more} beside {read.name} "
            f"in {folder}: {read.name} is read, as in transformers, and the others are not; delete what is old",
            stacklevel=3,
        )


def _names_only(index: Path, names: Collection[str]) -> bool:
    """Returns whether an index names no other files."""
    found = read_object(index).get("weight_map")
    return isinstance(found, dict) and set(found.values()) <= set(names)
