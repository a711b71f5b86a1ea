"""The tokenizer of a Hugging Face folder: copied as it is, and held against the vocabulary; imports no jax."""

from __future__ import annotations

import shutil
from pathlib import Path

from sppo_jax.files import parse_json

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
    """Copies the files of a tokenizer and returns their names."""
    names = [name for name in _FILES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Checks that a folder's tokenizer, if it has one, has no token beyond the vocabulary.

    Raises:
        ValueError: it has, or cannot be read.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        return
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        tokens = content["model"]["vocab"]
        ids = list(tokens.values()) if isinstance(tokens, dict) else list(range(len(tokens)))
        last = max([*ids, *(token["id"] for token in content.get("added_tokens") or [])], default=-1)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be a readable tokenizer, got {error!r}; download the file again") from None
    if last >= vocab_size:
        raise ValueError(
            f"vocab_size must be above {last}, the last token of {path}, got {vocab_size}; "
            "replace the tokenizer, which is of another model"
        )
