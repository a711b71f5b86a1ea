"""Tensors that an import leaves out and an export of the same base has again, unchanged: layers that draft tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo_jax.config.hf.delta import LEFT_OUT_KEYS
from sppo_jax.config.model import ModelConfig
from sppo_jax.models.hf.folder import DTYPES, TensorFolder
from sppo_jax.models.hf.sets import weights_file

# What is copied; what sees is not, because an export is a language model.
DRAFTS = "mtp"


@dataclass(frozen=True, kw_only=True)
class Copied:
    """What an export copies from the folder of its base.

    Args:
        folder: the base.
        dtypes: of each tensor, as files of tensors write it.
        shapes: of each tensor.
        keys: of config.json that speak of these tensors.
    """

    folder: TensorFolder | None = None
    dtypes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    keys: Mapping[str, Any]

    def bytes_of(self, name: str) -> memoryview:
        """Returns a tensor as its file has it."""
        assert self.folder is not None
        return self.folder.bytes_left_out(name)


NOTHING = Copied(dtypes={}, shapes={}, keys={})


def copied_from(
    base: Path | None, origin: Mapping[str, Any], model: ModelConfig, family: str, without: Collection[str]
) -> Copied:
    """Returns what an export copies.

    Args:
        base: the folder; None: there is none.
        origin: content of its config.json.
        model: the shape that is written.
        family: its `model_type`.
        without: parts that are not copied.

    Raises:
        ValueError: the vocabulary is not that of the base, or a tensor has a dtype that is not read.
    """
    if base is None or DRAFTS in without or origin.get("model_type") != family:
        return NOTHING
    try:
        weights_file(base)
    except ValueError:  # a folder without weights
        return NOTHING
    folder = TensorFolder(base)
    found = folder.left_out(DRAFTS)
    if not found:
        return NOTHING
    if (model.vocab_size, model.hidden_size) != (origin.get("vocab_size"), origin.get("hidden_size")):
        raise ValueError(
            f"the tensors {DRAFTS}.* of {base} must be for the vocabulary of the model, got {model.vocab_size} tokens "
            f"and {origin.get('vocab_size')} in {base}; add --without {DRAFTS}"
        )
    wrong = next((name for name, (dtype, _) in found.items() if dtype not in DTYPES), None)
    if wrong is not None:
        raise ValueError(
            f"a tensor that is copied must be one of {', '.join(DTYPES.values())}, got {found[wrong][0]} for {wrong} "
            f"in {base}; add --without {DRAFTS}"
        )
    return Copied(
        folder=folder,
        dtypes={name: dtype for name, (dtype, _) in found.items()},
        shapes={name: shape for name, (_, shape) in found.items()},
        keys={key: origin[key] for key in LEFT_OUT_KEYS if key in origin},
    )
