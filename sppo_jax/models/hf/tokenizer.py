"""The tokenizer of a Hugging Face folder: copied as it is, and held against the vocabulary; imports no jax."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sppo_jax.config.hf.families import CONFIG
from sppo_jax.files.whole import parse_json

TOKENIZER, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
PROCESSOR_TEMPLATE = "chat_template.json"
# Names of templates: the one that transformers takes, and the one that it takes for conversations with tools.
DEFAULT, FOR_TOOLS = "default", "tool_use"
_STOPS = "eos_token_id"
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
    PROCESSOR_TEMPLATE,
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
        settings = read_object(folder / SETTINGS) or {"tokenizer_class": "PreTrainedTokenizerFast"}
        _write(folder / SETTINGS, settings | {"model_max_length": length})


def set_template(folder: Path, text: str, for_tools: str | None = None) -> None:
    """Makes a chat template that of a folder; other places that could hold one lose theirs.

    Args:
        folder: with the files of a tokenizer.
        text: the template.
        for_tools: the template of conversations with tools; None: they have the same.
    """
    (folder / TEMPLATE).write_text(text, encoding="utf-8")
    (folder / PROCESSOR_TEMPLATE).unlink(missing_ok=True)
    more = folder / MORE_TEMPLATES
    for name in (DEFAULT, FOR_TOOLS):
        (more / f"{name}.jinja").unlink(missing_ok=True)
    if for_tools is not None:
        more.mkdir(exist_ok=True)
        (more / f"{FOR_TOOLS}.jinja").write_text(for_tools, encoding="utf-8")
    settings = read_object(folder / SETTINGS)
    if "chat_template" in settings:
        _write(folder / SETTINGS, {key: value for key, value in settings.items() if key != "chat_template"})


def add_end_tokens(folder: Path, tokens: Sequence[int]) -> None:
    """Adds tokens to those that end what a folder's model writes; the base's stay the first."""
    generation = read_object(folder / GENERATION)
    given = end_tokens_of(folder)
    found = list(dict.fromkeys([*given, *tokens]))
    if found and found != given:
        if not generation:  # transformers then takes these from config.json
            config = read_object(folder / "config.json")
            generation = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
        _write(folder / GENERATION, generation | {_STOPS: found})


def end_tokens_of(folder: Path) -> list[int]:
    """Returns the tokens at which a folder's model stops generating.

    As in transformers, `config.json` counts only where there is no `generation_config.json`.

    Raises:
        ValueError: a file is broken.
    """
    config = read_object(folder / CONFIG)
    inner = config.get("text_config")
    inner = inner.get(_STOPS) if isinstance(inner, dict) else None
    of_config = _ids(config.get(_STOPS) if config.get(_STOPS) is not None else inner, folder / CONFIG)
    if not (folder / GENERATION).is_file():
        return of_config
    found = _ids(read_object(folder / GENERATION).get(_STOPS), folder / GENERATION)
    unread = [token for token in of_config if token not in found]
    if unread:
        warnings.warn(
            f"{folder} has two lists of tokens that stop generation, and that of {GENERATION} is read, as in "
            f"transformers, {found or 'none'} without {unread} of {CONFIG}; correct one of them",
            stacklevel=3,
        )
    return found


def _ids(given: Any, where: Path) -> list[int]:
    """Returns the ids of `eos_token_id`, which is a number, a list or null."""
    found = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(token, int) for token in found):
        raise ValueError(f"{_STOPS} must be a token or a list of tokens, got {given!r} in {where}; correct the file")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object of a JSON file; of a file that is not there, an empty one.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    if not path.is_file():
        return {}
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be readable JSON, got {error!r}; download the file again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}; download the file again")
    return found


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
