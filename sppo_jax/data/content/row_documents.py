"""Where the documents of a pre-tokenized row begin, by whatever field of the row says so, and which tokens are padding.

Fields that speak of the same boundaries must agree: each gives one number a token, which changes from document to
document, or is silent.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sppo_jax.data.content.loss_keys import way_out

MASK = "attention_mask"
POSITIONS = ("position_ids", "inputs_position")
LENGTHS = ("seq_lengths", "seq_lens", "seqlens", "sequence_lengths", "document_lengths", "doc_lengths", "lengths")
SEGMENTS = (
    "segment_ids",
    "sequence_ids",
    "sequence_id",
    "document_ids",
    "doc_ids",
    "seq_idx",
    "inputs_segmentation",
)
STARTS = ("seq_start_id",)
BOUNDS = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_q", "cu_seqlens_k")
# LLaMA-Factory's object, whose bounds include the padding.
PACKED, PACKED_BOUNDS = "packing_params", "sequence_boundaries"
FIELDS = (*POSITIONS, *LENGTHS, *SEGMENTS, *STARTS, *BOUNDS, PACKED)
_FIELDS = frozenset(FIELDS)


def documents_of(row: dict[str, Any], length: int, where: str) -> tuple[np.ndarray | None, np.ndarray]:
    """Returns which tokens of a row are no padding, and at which of these a document begins.

    Args:
        row: the row.
        length: number of its tokens.
        where: its place, for messages.

    Returns:
        Whether a token is kept, bool [num_tokens] (None: all are), and the first token of each document among those,
        int64 [num_documents].

    Raises:
        ValueError: a field is wrong, or two of them contradict each other.
    """
    mask = _mask(row, length, where)
    if not _bounding(tuple(row)) and (mask is None or not len(mask) or mask.max() <= 1):
        return None if mask is None or mask.all() else mask > 0, np.zeros(1, np.int64)
    kept = np.ones(length, bool) if mask is None else mask > 0
    said: dict[str, np.ndarray] = {}
    for key in SEGMENTS:
        if _is_numbers(row.get(key)):
            said[key], padding = _segments(row, key, length, where)
            if mask is None:
                kept &= ~padding
            elif (padding & kept).any():
                raise _contradiction(MASK, key, int(np.flatnonzero(padding & kept)[0]), where)
    if mask is not None and len(mask) and mask.max() > 1:
        said[MASK] = _contiguous(mask, kept, MASK, where)
    for key in LENGTHS:
        if isinstance(row.get(key), list | np.ndarray):
            said[key] = _lengths(row, key, kept, where)
    for key in (*STARTS, *BOUNDS):
        if key in row:
            said[key] = _bounds(numbers(row[key], key, where), key, kept, where, has_end=key not in STARTS)
    if isinstance(row.get(PACKED), dict) and PACKED_BOUNDS in row[PACKED]:
        bounds = numbers(row[PACKED][PACKED_BOUNDS], PACKED_BOUNDS, where)
        said[PACKED] = _bounds(bounds, f"{PACKED}.{PACKED_BOUNDS}", kept, where, has_end=True)
    begins = {key: _begins(found[kept]) for key, found in said.items()}
    for key in POSITIONS:
        if key in row:
            begins[key] = _restarts(row, key, kept, begins, where)
    _check_agreed(begins, kept, where)
    found = next(iter(begins.values())) if begins else _begins(np.zeros(int(kept.sum()), np.int64))
    return kept, np.flatnonzero(found)


def numbers(value: Any, key: str, where: str, length: int | None = None, numpy_kinds: str = "iub") -> np.ndarray:
    """Returns a list of whole numbers, int64 [num_numbers]; with floats among them, they stay floats.

    Args:
        value: the list.
        key: its name, for messages.
        where: its place, for messages.
        length: how many there must be, of the row's tokens; None: any number.
        numpy_kinds: what numbers there may be, by numpy's letters.

    Raises:
        ValueError: it is no such list.
    """
    try:
        found = np.array(value)
        whole = found.ndim == 1 and (not len(found) or found.dtype.kind in numpy_kinds)
    except ValueError:
        whole = False
    if not whole:
        raise ValueError(f"{key} must be a list of whole numbers, got another value in {where}; correct the row")
    if length is not None and len(found) != length:
        raise ValueError(
            f"{key} must be as long as the ids, got {len(found):,} and {length:,} in {where}; correct the row"
        )
    return found if found.dtype.kind == "f" and len(found) else found.astype(np.int64)


@functools.lru_cache(1 << 12)
def _bounding(keys: tuple[str, ...]) -> bool:
    return not _FIELDS.isdisjoint(keys)


def _is_numbers(value: Any) -> bool:
    """Returns whether a value is a list that does not begin with text, as names of documents do."""
    return isinstance(value, list | np.ndarray) and np.ndim(value) > 0 and not isinstance(next(iter(value), 0), str)


def _mask(row: dict[str, Any], length: int, where: str) -> np.ndarray | None:
    if MASK not in row:
        return None
    mask = numbers(row[MASK], MASK, where, length)
    if len(mask) and mask.min() < 0:
        raise ValueError(
            f"{MASK} must be 0 for padding and 1, 2, ... for documents, got {mask.min()} in {where}; {way_out(MASK)}"
        )
    return mask


def _segments(row: dict[str, Any], key: str, length: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the segment of each token, and which are padding: negative ones, and 0 if segments begin above 0."""
    segments = numbers(row[key], key, where, length)
    padding = segments < 0
    real = segments[~padding]
    if len(real) and real[0] > 0:
        padding |= segments == 0
    return _contiguous(segments, ~padding, key, where), padding


def _contiguous(values: np.ndarray, kept: np.ndarray, key: str, where: str) -> np.ndarray:
    """Returns values of which each stands in one run of the tokens that are kept."""
    found = values[kept]
    runs = found[_begins(found)]
    if len(runs) != len(np.unique(runs)):
        again = next(value for at, value in enumerate(runs) if value in runs[:at])
        raise ValueError(
            f"{key} must have the tokens of a document together, got {again} again behind another document in {where}; "
            f"{way_out(key)}"
        )
    return values


def _lengths(row: dict[str, Any], key: str, kept: np.ndarray, where: str) -> np.ndarray:
    lengths = numbers(row[key], key, where)
    total, num_kept = int(lengths.sum()), int(kept.sum())
    if (len(lengths) and lengths.min() < 0) or total not in (len(kept), num_kept):
        wanted = f"{len(kept):,}" + (f" (or {num_kept:,} without padding)" if num_kept < len(kept) else "")
        raise ValueError(f"{key} must add up to the row's tokens, {wanted}, got {total:,} in {where}; {way_out(key)}")
    return _spread(np.repeat(np.arange(len(lengths)), lengths), kept)


def _bounds(bounds: np.ndarray, key: str, kept: np.ndarray, where: str, *, has_end: bool) -> np.ndarray:
    """Returns the document of each token by the places where documents begin, and one past the last if has_end."""
    num_kept = int(kept.sum())
    total = num_kept if has_end and len(bounds) and bounds[-1] == num_kept else len(kept)
    ends = bounds[-1] == total if has_end and len(bounds) else True
    if not len(bounds) or bounds[0] != 0 or (np.diff(bounds) < 0).any() or bounds[-1] > total or not ends:
        what = "rise from 0 to the number of the row's tokens" if has_end else "rise from 0 within the row's tokens"
        raise ValueError(
            f"{key} must {what}, {total:,}, got {bounds.tolist()[:8]}{'...' if len(bounds) > 8 else ''} in {where}; "
            f"{way_out(key.partition('.')[0])}"
        )
    return _spread(np.searchsorted(bounds, np.arange(total), side="right"), kept)


def _spread(found: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns values of all tokens, given those of all tokens or of the kept ones."""
    if len(found) == len(kept):
        return found
    spread = np.zeros(len(kept), np.int64)
    spread[kept] = found
    return spread


def _begins(values: np.ndarray) -> np.ndarray:
    """Returns where a run of equal values begins, bool [num_values]."""
    begins = np.ones(len(values), bool)
    begins[1:] = values[1:] != values[:-1]
    return begins


def _restarts(row: dict[str, Any], key: str, kept: np.ndarray, others: dict[str, np.ndarray], where: str) -> np.ndarray:
    """Returns where positions start again; one that skips some must begin a document of another field."""
    if len(np.shape(row[key])) != 1:
        raise ValueError(
            f"{key} must be a list with one position a token, got lists in a list (three positions a token, of images "
            f"or video) in {where}; {way_out(key)}"
        )
    positions = numbers(row[key], key, where, len(kept))[kept]
    steps = np.diff(positions)
    begins = np.ones(len(positions), bool)
    begins[1:] = steps != 1
    known = next(iter(others.values()), np.zeros(len(positions), bool))
    skips = np.flatnonzero((steps > 1) & ~known[1:])
    if len(skips):
        at = int(skips[0]) + 1
        raise ValueError(
            f"{key} must rise by 1 or start again, got {positions[at]} after {positions[at - 1]} in {where}; give the "
            f"documents by {LENGTHS[0]}, or set data.ignore_keys=[{key}]"
        )
    return begins


def _check_agreed(begins: dict[str, np.ndarray], kept: np.ndarray, where: str) -> None:
    """Refuses a row whose fields cut it in different places."""
    if len(begins) < 2:
        return
    (first, wanted), *others = begins.items()
    for key, found in others:
        if (found != wanted).any():
            at = int(np.flatnonzero(kept)[np.flatnonzero(found != wanted)[0]])
            raise _contradiction(first, key, at, where)


def _contradiction(first: str, second: str, at: int, where: str) -> ValueError:
    return ValueError(
        f"the fields that bound the documents of a row must agree, got {first} and {second} that differ at token {at} "
        f"in {where}; correct one, or set data.ignore_keys to the wrong one"
    )
