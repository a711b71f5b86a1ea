"""The tables of docs/sft.md: keys that say something about the loss, and fields that bound the documents of a row."""

from __future__ import annotations

from sppo_jax.data.content.loss_keys import KEYS
from sppo_jax.data.content.row_documents import (
    BOUNDS,
    LENGTHS,
    MASK,
    PACKED,
    PACKED_BOUNDS,
    POSITIONS,
    SEGMENTS,
    STARTS,
)

_WHERE = {
    "message": "a message",
    "row": "any row",
    "conversation": "the row of a conversation",
    "tokens": "a row of tokens",
}
_FIELDS = (
    ((MASK,), "0 is padding; the other values number the documents"),
    (POSITIONS, "a document begins where positions start again, at any number; lists of three positions are refused"),
    (LENGTHS, "lengths of the documents, which add up to the tokens of the row, with its padding or without"),
    (SEGMENTS, "the number of a token's document; below 0, or 0 where the first is above 0: padding"),
    (STARTS, "the first token of each document"),
    (BOUNDS, "the first token of each document, and one past the last"),
    ((f"{PACKED}.{PACKED_BOUNDS}",), "as above, where the last document may be the padding"),
)


def key_table() -> str:
    """Returns the table of the keys that say something about the loss."""
    lines = ["| in | keys | are | what they do | of |", "|---|---|---|---|---|"]
    for key in KEYS:
        lines.append(f"| {_WHERE[key.where]} | {_named(key.names)} | {key.treatment} | {key.meaning} | {key.of} |")
    return "\n".join(lines)


def field_table() -> str:
    """Returns the table of the fields that say where the documents of a row begin."""
    lines = ["| keys | what they say |", "|---|---|"]
    return "\n".join([*lines, *(f"| {_named(names)} | {meaning} |" for names, meaning in _FIELDS)])


def _named(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
