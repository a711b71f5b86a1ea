"""The special tokens of a Hugging Face folder, from every place that transformers reads beside tokenizer.json.

The order is that of transformers 5. `tokenizer_config.json` comes first. Where it has no `added_tokens_decoder`,
`special_tokens_map.json` overrides its names, and `added_tokens.json` lists more tokens. What tokenizer.json lacks is
added behind its tokens: the listed tokens in the order of their ids, then the named ones, then the extra ones.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo_jax.models.hf.tokenizer import SETTINGS, TOKENIZER, read_object

MAP, LISTED = "special_tokens_map.json", "added_tokens.json"
# The names that every tokenizer of transformers has, in the order in which it adds their tokens.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA, _OLD_EXTRA, _OWN = "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"
_VERSIONED = re.compile(r"tokenizer\.(.+)\.json")
# Names that a tokenizer has by its class where no file gives them.
_END = "<|endoftext|>"
_OF_CLASS: Mapping[str, Mapping[str, str]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": {"unk_token": _END, "eos_token": _END, "pad_token": _END},
    "Qwen3_5Tokenizer": {"unk_token": _END, "eos_token": _END, "pad_token": _END},
    "GPT2Tokenizer": {"unk_token": _END, "bos_token": _END, "eos_token": _END},
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}


@dataclass(frozen=True, kw_only=True)
class Token:
    """An added token, with the flags of the tokenizers library."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool
    special: bool

    @classmethod
    def of(cls, given: Any) -> Token:
        """Returns the token that an AddedToken of the library describes."""
        return cls(**{field.name: getattr(given, field.name) for field in dataclasses.fields(cls)})


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """What a folder says about special tokens.

    Args:
        named: tokens by name, such as eos_token; those of `NAMES` first.
        extra: further special tokens.
        listed: added tokens by the id that a file gives.
        overridden: whether tokens of tokenizer.json replace listed tokens of the same id.
        split: whether special tokens in a text are cut into pieces.
    """

    named: Mapping[str, str | Token]
    extra: tuple[str | Token, ...]
    listed: Mapping[int, Token]
    overridden: bool
    split: bool

    @functools.cached_property
    def texts(self) -> dict[str, str]:
        """Texts of the named tokens, as templates read them."""
        return {name: _text(token) for name, token in self.named.items()}

    def missing(self, present: Mapping[int, Token]) -> list[Token]:
        """Returns the tokens that transformers adds to a tokenizer, in order.

        Args:
            present: the added tokens of tokenizer.json, by id.
        """
        listed = {**self.listed, **(present if self.overridden else {})}
        by_text = {token.content: token for token in listed.values()}
        has = set(present.values())
        found = [listed[number] for number in sorted(listed) if listed[number] not in has]
        known = {token.content for token in (*has, *found)}
        named = [by_text.get(_text(token), token) if name in NAMES else token for name, token in self.named.items()]
        for token in (*named, *self.extra):
            if _text(token) not in known:
                known.add(_text(token))
                found.append(_special(token) if isinstance(token, str) else token)
        names = set(self.texts.values())
        return [dataclasses.replace(token, special=True) if token.content in names else token for token in found]


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Reads what the files of a folder beside tokenizer.json say about special tokens.

    Raises:
        ValueError: a file is broken, or asks for what is not done here.
    """
    settings = read_object(folder / SETTINGS)
    values, where = dict(settings), folder / SETTINGS
    _check_one_tokenizer(settings, folder)
    if _OLD_EXTRA in values and not values.get(_EXTRA):
        values[_EXTRA] = values.pop(_OLD_EXTRA)
    own = {name: values.pop(name) for name in settings if _is_own_name(name) and isinstance(values[name], str)}
    if isinstance(values.get(_EXTRA), dict):
        own |= values.pop(_EXTRA)
    own = own or values.get(_OWN) or {}
    listed, overridden = {}, "added_tokens_decoder" not in settings
    if overridden:
        where = folder / (MAP if (folder / MAP).is_file() else SETTINGS)
        _override(values, own, read_object(folder / MAP), where)
        listed = _listed(folder / LISTED, values, where)
    else:
        listed = _decoder(settings["added_tokens_decoder"], where)
    if _EXTRA not in values and _OLD_EXTRA in values:
        values[_EXTRA] = values[_OLD_EXTRA]
    values = {**_of_class(settings, folder), **values}
    also = {name: value for name, value in values.items() if _is_own_name(name) and _is_token(value)}
    named = {name: values[name] for name in NAMES if values.get(name) is not None} | also | own
    return SpecialTokens(
        named={name: _token(value, name, where) for name, value in named.items()},
        extra=tuple(_token(value, _EXTRA, where) for value in _list(values.get(_EXTRA) or [], _EXTRA, where)),
        listed=listed,
        overridden=overridden,
        split=bool(settings.get("split_special_tokens")),
    )


def _of_class(settings: Mapping[str, Any], folder: Path) -> Mapping[str, str]:
    """Returns the names that the tokenizer's class gives."""
    class_name = str(settings.get("tokenizer_class")).removesuffix("Fast")
    found = _OF_CLASS.get(class_name, {})
    # Llama 3 names the class of Llama 2 and is of another, which has no names of its own.
    if class_name == "LlamaTokenizer" and not set(found) <= set(settings) and _has_byte_level(folder / TOKENIZER):
        return {}
    return found


def _has_byte_level(path: Path) -> bool:
    return path.is_file() and b'"ByteLevel"' in path.read_bytes()


def _check_one_tokenizer(settings: Mapping[str, Any], folder: Path) -> None:
    """Refuses a folder that has another tokenizer.json for newer versions of transformers."""
    names = settings.get("fast_tokenizer_files") or []
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and _VERSIONED.fullmatch(name) and (folder / name).is_file():
            raise ValueError(
                f"a folder must have one tokenizer, got tokenizer.json and {name}, which fast_tokenizer_files of "
                f"{folder / SETTINGS} gives to newer versions of transformers; keep one, as tokenizer.json"
            )


def _is_own_name(name: str) -> bool:
    return name.endswith("_token") and name not in NAMES


def _is_token(value: Any) -> bool:
    """Returns whether transformers takes a value under a name of the model's own for a token."""
    return isinstance(value, str) or (isinstance(value, dict) and value.get("__type") == "AddedToken")


def _override(values: dict[str, Any], own: dict[str, Any], found: Mapping[str, Any], where: Path) -> None:
    """Writes special_tokens_map.json over the settings."""
    for name, value in found.items():
        if name == _EXTRA and isinstance(value, list):
            before = list(values.get(_EXTRA) or [])
            value = before + [one for one in value if one not in before]
        elif isinstance(value, dict) and name != _EXTRA:
            value = {**value, "special": True, "__type": "AddedToken"}
        values[name] = value
    if isinstance(values.get(_EXTRA), dict):
        own |= values.pop(_EXTRA)


def _listed(path: Path, values: Mapping[str, Any], where: Path) -> dict[int, Token]:
    """Returns the tokens of added_tokens.json by id; those that the settings name are special."""
    special = {_text(_token(values[name], name, where)) for name in NAMES if values.get(name)}
    special |= {_text(_token(value, _EXTRA, where)) for value in _list(values.get(_EXTRA) or [], _EXTRA, where)}
    found = {}
    for text, number in read_object(path).items():
        if not isinstance(number, int):
            raise ValueError(f"a token must have a number as its id, got {number!r} for {text!r} in {path}; correct it")
        found[number] = Token(content=text, normalized=text not in special, special=text in special)
    return found


def _decoder(found: Any, where: Path) -> dict[int, Token]:
    """Returns the tokens of `added_tokens_decoder` by id."""
    try:
        return {int(number): _described(token) for number, token in found.items()}
    except (AttributeError, TypeError, ValueError, KeyError):
        raise ValueError(
            f"added_tokens_decoder must give tokens with content by id, got others in {where}; download the file again"
        ) from None


def _described(token: Mapping[str, Any]) -> Token:
    """Returns the token that an object describes."""
    special = bool(token.get("special", False))
    flags = {name: bool(token.get(name, False)) for name in ("single_word", "lstrip", "rstrip")}
    return Token(
        content=str(token["content"]), normalized=bool(token.get("normalized", not special)), special=special, **flags
    )


def _token(value: Any, name: str, where: Path) -> str | Token:
    """Returns a token that is given as text, or as an object with flags."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return _described(value)
    raise ValueError(f"{name} must be text or an object with content, got {value!r} in {where}; correct the file")


def _list(value: Any, name: str, where: Path) -> Iterable[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list of tokens, got {value!r} in {where}; correct the file")
    return value


def _text(token: str | Token) -> str:
    return token if isinstance(token, str) else token.content


def _special(text: str) -> Token:
    return Token(content=text, normalized=False, special=True)
