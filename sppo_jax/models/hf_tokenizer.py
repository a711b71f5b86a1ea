"""The tokenizer of a Hugging Face folder: copied as it is, and held against the vocabulary; imports no jax."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

TOKENIZER = "tokenizer.json"
# What a tokenizer may consist of.
_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy what a tokenizer consists of; returns the names of the files."""
    names = [name for name in _FILES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Check that a folder's tokenizer, if it has one, has no token beyond the vocabulary.

    Raises:
        ValueError: it has, or cannot be read.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tokens = content["model"]["vocab"]
        ids = list(tokens.values()) if isinstance(tokens, dict) else list(range(len(tokens)))
        last = max([*ids, *(token["id"] for token in content.get("added_tokens") or [])], default=-1)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be a tokenizer, got {error!r} in reading it; download it again") from None
    if last >= vocab_size:
        raise ValueError(
            f"the vocabulary must hold every token of {path}, whose last is {last}, got vocab_size = {vocab_size}; "
            "the tokenizer is of another model, put the right one there"
        )
