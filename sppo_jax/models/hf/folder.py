"""A Hugging Face folder's safetensors: opened lazily, checked by their headers, read by the slice."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sppo_jax.config.hf.experts import DEQUANTIZE
from sppo_jax.config.hf.families import FAMILIES, read_config
from sppo_jax.files.whole import parse_json
from sppo_jax.models.hf.experts import QUANTIZED
from sppo_jax.models.hf.form import Form, folder_form
from sppo_jax.models.hf.sets import INDEX, INDEX_SUFFIX, tell_of_other_sets, weights_file
from sppo_jax.models.hf.tensors import NO_PARAMETERS, tensor_shapes

if TYPE_CHECKING:
    import numpy as np

    from sppo_jax.config.model import ModelConfig

# Prefixes of the language model's tensors in a multimodal folder, and the prefix in a folder of text alone.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
# What a folder has beside the language model: what sees, and what predicts more tokens than the next.
_LEFT_OUT = re.compile(r"(?:model\.)?(vision_tower|multi_modal_projector|visual|mtp)\.")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Elements of two tensors that are compared at a time.
_BLOCK_ELEMENTS = 1 << 24
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def import_safetensors() -> Any:
    """Imports the library that reads safetensors.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import safetensors
    except ImportError:
        raise ValueError(
            "Hugging Face models need the package safetensors, which is not installed; run pip install safetensors"
        ) from None
    return safetensors


class TensorFolder:
    """The tensors of a folder, in one file or in shards; nothing is read until it is asked for."""

    def __init__(self, folder: Path):
        """Finds the files.

        Args:
            folder: with model.safetensors, or shards and their index.

        Raises:
            ValueError: there are none, one is missing or torn, or the package that reads them is.
        """
        self._library = import_safetensors()
        self._folder = folder
        self._files: dict[Path, Any] = {}
        self._weights = weights_file(folder)
        found = self._find()
        self._paths = set(found.values())
        left_out = {name: match.group(1) for name in found if (match := _LEFT_OUT.match(name))}
        self._left_out, self._parts = Counter(left_out.values()), left_out
        self._file_of_others = {name: found[name] for name in left_out}
        self._stored = {_text_name(name): name for name in found if name not in left_out}
        self._file_of = {name: found[stored] for name, stored in self._stored.items()}

    def _find(self) -> dict[str, Path]:
        """Returns the file of each tensor."""
        if self._weights.name.endswith(INDEX_SUFFIX):
            return {name: self._folder / file for name, file in _read_index(self._weights).items()}
        return dict.fromkeys(self._open(self._weights).keys(), self._weights)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = self._library.safe_open(path, framework="numpy")
            except FileNotFoundError:
                raise ValueError(
                    f"every file that {INDEX} names must exist, got no {path.name} in {path.parent}; download "
                    f"{path.name}"
                ) from None
            except (OSError, self._library.SafetensorError) as error:
                raise ValueError(
                    f"{path} must be whole safetensors, got a torn file ({error}); download the file again"
                ) from None
        return self._files[path]

    def _slice(self, name: str) -> Any:
        path = self._file_of[name]
        try:
            return self._open(path).get_slice(self._stored[name])
        except self._library.SafetensorError:
            raise ValueError(
                f"{path.name} must hold the tensor {name}, as {INDEX} says, got no such tensor; download both files "
                "again"
            ) from None

    @property
    def form(self) -> Form:
        """Form of the tensors, by their names and by the family of config.json."""
        family = FAMILIES.get(str(read_config(self._folder).get("model_type")))
        return folder_form(self._file_of, (family and family.fused_experts) or "separate")

    def check(self, model: ModelConfig) -> None:
        """Checks names, shapes and dtypes of all tensors against the headers of the files.

        Args:
            model: the shape that they must have.

        Raises:
            ValueError: a tensor is missing, has another shape or dtype, or has no place in the model.
        """
        quantized = next((name for name in self._file_of if QUANTIZED.match(name)), None)
        if quantized is not None:
            fix = DEQUANTIZE if quantized.endswith(("_blocks", "_scales")) else "convert the unquantized model"
            raise ValueError(f"tensors must be unquantized, got {quantized} in {self._folder}; {fix}")
        wanted = tensor_shapes(model, self.form)
        missing = [name for name in wanted if name not in self._file_of]
        if missing:
            raise ValueError(
                f"{self._folder} must have the tensor {missing[0]}, got none "
                f"({len(missing)} of {len(wanted)} are missing); download the folder again, or correct config.json"
            )
        for name, shape in wanted.items():
            part = self._slice(name)
            got, dtype = tuple(part.get_shape()), part.get_dtype()
            if dtype not in DTYPES:
                raise ValueError(
                    f"the dtype of a tensor must be one of {', '.join(DTYPES.values())}, got {dtype} for {name}; "
                    "convert the "
                    "unquantized model"
                )
            if got != shape:
                raise ValueError(
                    f"the tensor {name} must have the shape {list(shape)} by config.json, got {list(got)} in "
                    f"{self._folder}; correct config.json, or download the folder again"
                )
        unused = [name for name in self._file_of if name not in wanted and not NO_PARAMETERS.match(name)]
        if model.tied_embeddings and HEAD in unused:
            self._check_tied()
            unused.remove(HEAD)
        if unused:
            raise ValueError(
                f"every tensor of {self._folder} must have a place in the model, got {unused[0]} without a place "
                f"({len(unused)} in all); choose a model of this family without such tensors"
            )
        tell_of_other_sets(self._folder, self._weights, self._paths)
        if self._left_out:
            parts = " and ".join(f"{part} ({count} tensors)" for part, count in sorted(self._left_out.items()))
            warnings.warn(f"{self._folder} has {parts}, left out here: the language model is imported", stacklevel=2)

    def _check_tied(self) -> None:
        """Refuses a head that is stored beside tied embeddings with other values: versions of transformers differ."""
        head, embedding = self._slice(HEAD), self._slice(EMBEDDING)
        shape = embedding.get_shape()
        rows = max(1, _BLOCK_ELEMENTS // math.prod(shape[1:]))
        blocks = (slice(first, min(first + rows, shape[0])) for first in range(0, shape[0], rows))
        alike = head.get_shape() == shape and head.get_dtype() in DTYPES
        if not alike or not all(_equal(head[block], embedding[block]) for block in blocks):
            raise ValueError(
                f"{HEAD} must be {EMBEDDING} where tie_word_embeddings is true, got another tensor in {self._folder} "
                "(transformers 5 uses it, earlier versions ignore it); set tie_word_embeddings to false in config.json "
                f"to use it, or save the model again without {HEAD}"
            )

    def left_out(self, part: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns the dtype and the shape of each tensor of a part that is not imported, by the tensor's own name.

        Args:
            part: such as "mtp".
        """
        names = [name for name, of in self._parts.items() if of == part]
        slices = ((name, self._open(self._file_of_others[name]).get_slice(name)) for name in names)
        return {name: (found.get_dtype(), tuple(found.get_shape())) for name, found in slices}

    def bytes_left_out(self, name: str) -> memoryview:
        """Returns the bytes of a tensor that is not imported."""
        import numpy as np

        values = np.ascontiguousarray(self._open(self._file_of_others[name]).get_tensor(name))
        return values.reshape(-1).view(np.uint8).data

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of a tensor, one slice for each dim; returns a copy in the dtype of the file."""
        return self._slice(name)[part]


def _text_name(name: str) -> str:
    """Returns the name of a language model's tensor as a folder of text alone has it."""
    for prefix, text in _PREFIXES.items():
        if name.startswith(prefix):
            return text + name.removeprefix(prefix)
    return name


def form_like(folder: Path | None, family: str) -> Form:
    """Returns the form of a family's tensors: that of a folder of the family, or one tensor an expert if it may be so.

    Args:
        folder: of the model that the weights come from; None: there is none.
        family: `model_type` that is written.
    """
    own = FAMILIES[family]
    plain = Form("interleaved" if own.fused_experts == "interleaved" else "separate", own.delta or "apart")
    if plain.experts == "interleaved" or not (own.fused_experts or own.delta) or folder is None:
        return plain
    try:
        weights_file(folder)
    except ValueError:  # a folder without weights
        return plain
    return TensorFolder(folder).form if read_config(folder).get("model_type") == family else plain


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Returns whether two arrays hold the same values, whatever their dtypes."""
    same_dtype = first.dtype == second.dtype
    return first.tobytes() == second.tobytes() if same_dtype else bool((first == second).all())


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        return dict(parse_json(path.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be JSON with a weight_map, got {error!r}; download the file again") from None
