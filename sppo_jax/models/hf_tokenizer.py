"""The tokenizer of a Hugging Face folder: copied as it is, and held against the vocabulary; imports no jax."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sppo_jax.files import parse_json

TOKENIZER, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
# What a tokenizer may consist of.
_FILES = (
    TOKENIZER,
    SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    TEMPLATE,
    "chat_template.json",
    GENERATION,
)


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copies the files of a tokenizer and returns their names."""
    names = [name for name in _FILES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    if (source / MORE_TEMPLATES).is_dir():
        shutil.copytree(source / MORE_TEMPLATES, target / MORE_TEMPLATES)
        names.append(MORE_TEMPLATES)
    return names


def set_length(folder: Path, length: int) -> None:
    """Writes the longest sequence of the model into the settings of a folder's tokenizer, if there is one."""
    if (folder / TOKENIZER).is_file():
        settings = _read(folder / SETTINGS) or {"tokenizer_class": "PreTrainedTokenizerFast"}
        _write(folder / SETTINGS, settings | {"model_max_length": length})


def set_template(folder: Path, text: str) -> None:
    """Makes a chat template that of a folder; other places that could hold one lose theirs."""
    (folder / TEMPLATE).write_text(text, encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)
    settings = _read(folder / SETTINGS)
    if "chat_template" in settings:
        _write(folder / SETTINGS, {key: value for key, value in settings.items() if key != "chat_template"})


def add_end_tokens(folder: Path, tokens: Sequence[int]) -> None:
    """Adds tokens to those that end what a folder's model writes; the base's stay the first."""
    generation = _read(folder / GENERATION)
    config = _read(folder / "config.json")
    given = generation.get("eos_token_id", config.get("eos_token_id"))
    found = list(
        dict.fromkeys([*(given if isinstance(given, list) else [given] if given is not None else []), *tokens])
    )
    if found and found != given:
        if not generation:  # transformers then takes these from config.json
            generation = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
        _write(folder / GENERATION, generation | {"eos_token_id": found})


def _read(path: Path) -> dict[str, Any]:
    return parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
