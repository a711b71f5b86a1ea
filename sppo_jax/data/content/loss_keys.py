"""Keys of rows and of messages that say something about the loss: each is read, passed over or refused.

`KEYS` has every key that is known by its name. Of the other keys, those whose words speak of a mask, a weight or a loss
are refused, unless their value can be no such thing or `data.ignore_keys` names them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sppo_jax.config.data import DataConfig
from sppo_jax.data.chat.roles import TRAIN, Message

Where = Literal["message", "row", "conversation", "tokens"]
ValueForm = Literal["flag", "flags", "role", "labels", "mask", "padding", "none", "refused"]

_WORDS = frozenset({"mask", "masks", "weight", "weights", "loss", "losses"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_YES, _NO = ("true", "1", "1.0"), ("false", "0", "0.0")
_SHOWN_CHARS = 40


@dataclass(frozen=True, kw_only=True)
class LossKey:
    """Keys with one meaning.

    Args:
        where: where they stand: in a message, in any row, in the row of a conversation, or in a row of tokens.
        names: the keys.
        form: the form of their values, which decides what is done with them.
        meaning: what is done with them, for the user.
        of: whose keys they are.
    """

    where: Where
    names: tuple[str, ...]
    form: ValueForm
    meaning: str
    of: str

    @property
    def treatment(self) -> str:
        return {"none": "passed over", "refused": "refused"}.get(self.form, "read")


KEYS = (
    LossKey(
        where="message",
        names=(
            "train",
            "training",
            "trainable",
            "train_on_turn",
            "weight",
            "loss_weight",
            "loss_scale",
            "loss",
            "loss_mask",
        ),
        form="flag",
        meaning="0 or false excludes the message from the loss; 1 or true changes nothing",
        of="OpenAI, axolotl, ShareGPT, mistral-finetune, ms-swift",
    ),  # fmt: skip
    LossKey(
        where="message",
        names=("train_detail", "training_detail"),
        form="refused",
        meaning="parts of a message cannot be chosen by their characters; use the template's {% generation %} regions",
        of="axolotl",
    ),
    LossKey(
        where="row",
        names=("train", "training", "weight", "loss_weight", "sample_weight"),
        form="flag",
        meaning="0 or false leaves the row out; 1 or true changes nothing",
        of="Fireworks, exports of several tools",
    ),
    LossKey(
        where="conversation",
        names=("loss_mask",),
        form="flags",
        meaning="a list with a 0 or a 1 for each message, with or without the system message",
        of="LLaMA-Factory",
    ),
    LossKey(
        where="conversation",
        names=("mask",),
        form="role",
        meaning="the role that is not trained: a user's is read, another is refused",
        of="NeMo",
    ),
    LossKey(
        where="tokens",
        names=("labels",),
        form="labels",
        meaning="the token itself where it is trained, -100 where it is not; not shifted",
        of="transformers, TRL, axolotl, LLaMA-Factory",
    ),
    LossKey(
        where="tokens",
        names=("loss_mask", "labels_mask", "assistant_masks", "assistant_mask", "completion_mask"),
        form="mask",
        meaning="1 where the token is trained; beside `seq_start_id`, `loss_mask` is about the token after its place",
        of="TRL, transformers, NeMo",
    ),
    LossKey(
        where="tokens",
        names=("weights", "weight", "loss_weights", "loss_weight", "token_weights"),
        form="mask",
        meaning="a list of 0 and 1 is a mask; other weights are refused",
        of="exports of several tools",
    ),
    LossKey(
        where="tokens",
        names=("attention_mask",),
        form="padding",
        meaning="0 is padding; where other values differ, another document begins",
        of="transformers, axolotl, LLaMA-Factory",
    ),
    LossKey(
        where="tokens",
        names=("special_tokens_mask",),
        form="none",
        meaning="says nothing about the loss",
        of="transformers",
    ),
    LossKey(
        where="tokens",
        names=("answer_start_idx",),
        form="refused",
        meaning="the place from which tokens are trained; write it as `loss_mask`",
        of="NeMo",
    ),
)


@functools.cache
def names_of(where: Where, form: ValueForm) -> tuple[str, ...]:
    """Returns the known keys whose values have a form."""
    return tuple(name for key in KEYS if key.where == where and key.form == form for name in key.names)


@functools.lru_cache(1 << 12)
def concerning(keys: tuple[str, ...], *where: Where) -> tuple[str, ...]:
    """Returns those of some keys that are known or whose words speak of the loss."""
    known = {name for key in KEYS if key.where in where for name in key.names}
    return tuple(key for key in keys if key in known or speaks_of_loss(key))


def speaks_of_loss(key: str) -> bool:
    """Returns whether a mask, a weight or a loss is among the words of a key."""
    return isinstance(key, str) and not _WORDS.isdisjoint(word.lower() for word in _WORD.findall(key))


def is_one(value: Any, key: str, where: str) -> bool:
    """Returns whether a value is 1 or true, in any of the forms in which it is written.

    Raises:
        ValueError: it is neither that nor 0 or false.
    """
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    text = str(value).strip().lower() if isinstance(value, bool | int | float | str | np.generic) else ""
    if text not in _YES + _NO:
        raise ValueError(
            f"{key} must be 0 or 1 (a weight of its own for each token or message is not supported), got "
            f"{_shown(value)} in {where}; {way_out(key)}"
        )
    return text in _YES


def with_train(message: Message, where: str) -> Message:
    """Returns a message that has `train` as a bool where any of its keys says whether it is trained, and only this key.

    Raises:
        ValueError: a key has another value than 0 or 1, or is none that is obeyed.
    """
    flags, others = _told_apart(tuple(message), ("message",))
    if others:
        _refuse(message, others, where, ("message",), None)
    if not flags:
        return message
    trains = [is_one(message[key], key, where) for key in flags]
    return {key: value for key, value in message.items() if key not in flags} | {TRAIN: all(trains)}


def row_trains(row: Mapping[str, Any], where: str, *places: Where, length: int | None = None) -> bool:
    """Returns whether a row may be trained, by what it says as a whole.

    Args:
        row: the row, without nulls.
        where: its place, for messages.
        places: whose keys are read elsewhere: "conversation" or "tokens", if the row is one.
        length: the number of ids of a row of tokens: lists of another length say nothing about its tokens.

    Raises:
        ValueError: a key has another value than 0 or 1, or is none that is obeyed.
    """
    flags, others = _told_apart(tuple(row), ("row", *places))
    if others:
        _refuse(row, others, where, places, length)
    # A list of a row of tokens is a mask.
    flags = tuple(key for key in flags if row[key] is not None and (length is None or not is_list(row[key])))
    return all([is_one(row[key], key, where) for key in flags])


def per_message(row: Mapping[str, Any], roles: list[str], where: str) -> list[bool]:
    """Returns which messages of a conversation its row lets train.

    Raises:
        ValueError: the row names another role than the user's, or does not have a flag for each message.
    """
    trains = [True] * len(roles)
    for key in names_of("conversation", "role"):
        role = row.get(key)
        if role is not None and not (isinstance(role, str) and role.lower() in ("user", "human", "")):
            raise ValueError(f"{key} must name the user, got {_shown(role)} in {where}; {way_out(key)}")
    for key in names_of("conversation", "flags"):
        if key not in row:
            continue
        flags = row[key]
        turns = [at for at, role in enumerate(roles) if role != "system"]
        if not is_list(flags) or len(flags) not in (len(roles), len(turns)):
            got = f"{len(flags)} values" if is_list(flags) else _shown(flags)
            raise ValueError(
                f"{key} must be a list with a 0 or a 1 for each of {len(roles)} messages, got {got} in {where}; "
                f"{way_out(key)}"
            )
        for at, flag in zip(range(len(roles)) if len(flags) == len(roles) else turns, flags, strict=True):
            trains[at] = trains[at] and is_one(flag, key, where)
    return trains


def is_list(value: Any) -> bool:
    """Returns whether a value is a list; an array of one value is none, as records of numbers hold no single ones."""
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.size != 1)


def without(row: dict[str, Any], ignored: Iterable[str]) -> dict[str, Any]:
    """Returns a row or a message without the keys that the user wants ignored."""
    return {key: value for key, value in row.items() if key not in ignored} if ignored else row


def ignored_key(config: DataConfig) -> dict[str, list[str]]:
    """Returns what the keys that are ignored add to the key of a cache entry: nothing where there are none."""
    return {"ignore_keys": sorted(config.ignore_keys)} if config.ignore_keys else {}


def way_out(key: str) -> str:
    """Returns what a user can do about a key that is refused."""
    return f"leave the key out of the rows, or set data.ignore_keys=[{key}]"


@functools.lru_cache(1 << 12)
def _told_apart(keys: tuple[str, ...], places: tuple[Where, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns those of some keys that are a flag of the whole, and those that are read by nobody."""
    flags = {name for key in KEYS if key.where in places and key.form == "flag" for name in key.names}
    read = {name for key in KEYS if key.where in places and key.treatment != "refused" for name in key.names}
    found = concerning(keys, *places)
    return tuple(key for key in found if key in flags), tuple(key for key in found if key not in read)


def _refuse(
    values: Mapping[str, Any], keys: Iterable[str], where: str, places: tuple[Where, ...], length: int | None
) -> None:
    """Refuses the first key whose value may say something about the loss, of those that nobody reads."""
    known = {name: key.meaning for key in KEYS if key.where in places and key.form == "refused" for name in key.names}
    for key in keys:
        value = values[key]
        if value is None or (is_list(value) and not len(value)) or not (key in known or _may_weigh(value, length)):
            continue
        why = known.get(key, "what a row says about the loss is never ignored")
        raise ValueError(f"{key} must be a key that is obeyed, got {_shown(value)} in {where} ({why}); {way_out(key)}")


def _may_weigh(value: Any, length: int | None) -> bool:
    """Returns whether a value can be a weight or a mask: a number, or a list (of tokens: as long as the ids)."""
    if is_list(value):
        return length is None or len(value) == length
    return isinstance(value, bool | int | float | np.generic | np.ndarray)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
