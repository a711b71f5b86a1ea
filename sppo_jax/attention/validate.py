"""The batch contract, checked on the host before anything runs."""

from collections.abc import Mapping

import numpy as np

KEYS = ("tokens", "targets", "positions", "document_ids")


def _require(ok: bool, rule: str, got: str, change: str) -> None:
    if not ok:
        raise ValueError(f"batch: {rule}, got {got}; {change}")


def _check_order(documents: np.ndarray, positions: np.ndarray, contiguous: bool, consecutive: bool) -> None:
    for row in range(documents.shape[0]):
        real = documents[row] >= 0
        if contiguous:
            _check_contiguous(documents[row], row)
        doc, pos = documents[row][real], positions[row][real]
        step = np.diff(doc)
        _require(
            not (step < 0).any(),
            "document_ids must not decrease along a sequence (-1 is padding)",
            f"a step down in sequence {row}",
            "number the documents in the order in which they lie",
        )
        _require(
            not ((step == 0) & (np.diff(pos) <= 0)).any(),
            "positions must increase within a document",
            f"a repeated or smaller position in sequence {row}",
            "restart positions only where document_ids change",
        )
        _require(
            not (consecutive and ((step == 0) & (np.diff(pos) > 1)).any()),
            "positions must rise by one within a document for the fused attention kernel and a sliding window",
            f"a larger step in sequence {row}",
            "number the tokens of a document one by one, or use model.kernel=blockwise",
        )


def _check_padding(documents_BS: np.ndarray) -> None:
    rows = np.flatnonzero(((documents_BS[:, :-1] < 0) & (documents_BS[:, 1:] >= 0)).any(1))
    _require(
        not rows.size,
        "padding must lie behind all documents for layers with a state",
        f"padding before a document's token in sequence {rows[0] if rows.size else 0}",
        "move padding to the end of the sequence",
    )


def check_one_document(documents_BS: np.ndarray) -> None:
    """Refuses a second document in a sequence.

    Args:
        documents_BS: document of each token, -1 for padding.

    Raises:
        ValueError: a sequence holds two or more; the message gives the rule, the value and the change to make.
    """
    high = documents_BS.max(1)
    low = np.where(documents_BS < 0, high[:, None], documents_BS).min(1)
    rows = np.flatnonzero(low < high)
    row = rows[0] if rows.size else 0
    _require(
        not rows.size,
        "a sequence must hold one document at most where sequence_documents of the plan is one",
        f"documents {low[row]} and {high[row]} in sequence {row}",
        "give each document a sequence of its own, or plan with data.pack=whole",
    )


def _check_contiguous(documents: np.ndarray, row: int) -> None:
    begins = np.flatnonzero(np.diff(documents, prepend=-1) * (documents >= 0))
    numbers = documents[begins]
    _require(
        len(set(numbers.tolist())) == len(numbers),
        "a document must be contiguous for the fused attention kernel and a sliding window",
        f"padding within a document of sequence {row}",
        "move padding between documents, or use model.kernel=blockwise and no window",
    )


def check_arrays(batch: Mapping, *shapes: tuple[int, ...], keys: tuple[str, ...] = KEYS) -> None:
    """Checks the parts of a batch contract that need no values; works on traced arrays too.

    Args:
        batch: the arrays to check.
        shapes: shapes that the arrays may have; the first is the contract's.
        keys: of the arrays.

    Raises:
        ValueError: the batch breaks a rule; the message gives the rule, the value and the change to make.
    """
    _require(
        isinstance(batch, Mapping), "must be a dict of arrays", f"a {type(batch).__name__}", "make a dict of the arrays"
    )
    for key in keys:
        _require(key in batch, f"must have the keys {', '.join(KEYS)}", f"no '{key}'", f"add '{key}'")
        got, is_array = batch[key], hasattr(batch[key], "shape") and hasattr(batch[key], "dtype")
        _require(is_array, f"'{key}' must be an array", f"a {type(got).__name__}", "use numpy.asarray(x, numpy.int32)")
        rule = f"'{key}' must have the plan's shape {shapes[0]}"
        _require(tuple(got.shape) in shapes, rule, f"{tuple(got.shape)}", "change the batch or the plan")
        _require(
            np.issubdtype(got.dtype, np.integer), f"'{key}' must be int32", f"{got.dtype}", "cast the array to int32"
        )


def validate_batch(
    batch: Mapping,
    *,
    vocab_size: int,
    num_sequences: int,
    sequence_length: int,
    contiguous: bool = False,
    consecutive: bool = False,
    natural: bool = True,
    padded_behind: bool = False,
) -> None:
    """Checks shapes, ranges and the order of documents and positions, on which causal attention to a prefix depends.

    Args:
        batch: int32 arrays [num_sequences, sequence_length] under `tokens`, `targets` (-1 = no loss), `positions`,
            `document_ids` (-1 = padding, which has no target).
        vocab_size: tokens lie in 0..vocab_size-1.
        num_sequences: expected rows.
        sequence_length: expected columns, in tokens.
        contiguous: whether to refuse padding within a document.
        consecutive: whether to refuse positions that are left out within a document.
        natural: whether documents must lie in natural order; with teams they have rules of their own.
        padded_behind: whether to refuse padding before a document's token.

    Raises:
        ValueError: the batch breaks a rule; the message gives the rule, the value and the change to make.
    """
    check_arrays(batch, (num_sequences, sequence_length))
    host = {key: np.asarray(batch[key]) for key in KEYS}
    for key, low in (("tokens", 0), ("targets", -1)):
        small, large = int(host[key].min()), int(host[key].max())
        _require(
            low <= small and large < vocab_size,
            f"'{key}' must lie in {low}..{vocab_size - 1} (model.vocab_size {vocab_size})",
            f"{small}..{large}",
            "use the matching tokenizer or raise model.vocab_size",
        )
    padded = np.argwhere((host["document_ids"] < 0) & (host["targets"] >= 0))
    _require(
        not padded.size,
        "padding (document_ids of -1) must have no target",
        f"one at token {padded[0][1]} of sequence {padded[0][0]}" if padded.size else "",
        "set its target to -1, or give the token the number of its document",
    )
    low = int(host["positions"].min())
    _require(low >= 0, "'positions' must not be negative", f"{low}", "count from 0")
    if padded_behind:
        _check_padding(host["document_ids"])
    if natural:
        _check_order(host["document_ids"], host["positions"], contiguous, consecutive)
