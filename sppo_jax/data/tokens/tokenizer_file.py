"""A tokenizer of the tokenizers library: of a tokenizer.json alone, or of a whole Hugging Face folder."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo_jax.data.tokens.tokenizer_places import SpecialTokens, Token, read_special_tokens
from sppo_jax.files.paths import file_error
from sppo_jax.models.hf.tokenizer import TOKENIZER, end_tokens_of, read_object

_VOCABULARY = "vocab.json"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A tokenizer that neither truncates nor pads.

    Args:
        path: of its tokenizer.json.
        tokenizer: of the tokenizers library.
        digest: of tokenizer.json.
        additions: what the folder's other files change, as text; "" where they change nothing.
        eos: the token that the folder names as `eos_token`; None: it names none.
        stops: tokens at which transformers stops generating.
    """

    path: Path
    tokenizer: Any
    digest: str
    additions: str
    eos: int | None
    stops: frozenset[int]


def open_tokenizer(path: Path, num_rows: int | None = None) -> Opened:
    """Opens a tokenizer.

    Args:
        path: a tokenizer.json, which alone is read; or a folder, of which all is read that transformers reads.
        num_rows: rows of the model's embedding; tokens of a folder's other files that have no row are left out.

    Raises:
        ValueError: a file is missing or broken, or the tokenizers library is not installed.
    """
    folder, path = (path, path / TOKENIZER) if path.is_dir() else (None, path)
    text = _read(path)
    tokenizer = _parse(text, path)
    present = _added(tokenizer)
    additions, eos, stops = "", None, set(end_tokens_of(folder)) if folder else set()
    if folder:
        special = read_special_tokens(folder)
        missing = special.missing(present)
        if missing:
            tokenizer, missing = _with_tokens(tokenizer, missing, num_rows, text, path)
        tokenizer.encode_special_tokens = special.split
        changes = [dataclasses.astuple(token) for token in missing]
        additions = f" {changes} {special.split}" if missing or special.split else ""
        _tell_of_other(tokenizer, folder)
        _tell_of_moved(tokenizer, special, path, {token.content for token in missing})
        eos = tokenizer.token_to_id(special.texts.get("eos_token", ""))
        stops |= set() if eos is None else {eos}
    else:
        _tell_of_unread(path, present)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    digest = hashlib.sha256(text).hexdigest()
    return Opened(path=path, tokenizer=tokenizer, digest=digest, additions=additions, eos=eos, stops=frozenset(stops))


def _added(tokenizer: Any) -> dict[int, Token]:
    """Returns the added tokens of a tokenizer by id."""
    return {number: Token.of(token) for number, token in tokenizer.get_added_tokens_decoder().items()}


def _with_tokens(
    tokenizer: Any, tokens: Sequence[Token], num_rows: int | None, text: bytes, path: Path
) -> tuple[Any, list[Token]]:
    """Returns the tokenizer with more tokens, and these; a token without a row of the embedding is left out."""
    _add(tokenizer, tokens)
    ids = {token: tokenizer.token_to_id(token.content) for token in tokens}
    kept = [token for token in tokens if num_rows is None or ids[token] is None or ids[token] < num_rows]
    if len(kept) == len(tokens):
        return tokenizer, kept
    first = next(token for token in tokens if token not in kept)
    warnings.warn(
        f"every token that the files beside {path} add must have a row of the model, got {first.content!r} as token "
        f"{ids[first]} where model.vocab_size is {num_rows}, left out here: text that holds it becomes other tokens; "
        "use the tokenizer of the same model, leave such text out, or train a new model with more rows",
        stacklevel=5,
    )
    tokenizer = _parse(text, path)
    _add(tokenizer, kept)
    return tokenizer, kept


def _add(tokenizer: Any, tokens: Sequence[Token]) -> None:
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken(**dataclasses.asdict(token)) for token in tokens])


def _tell_of_moved(tokenizer: Any, special: SpecialTokens, path: Path, added: set[str]) -> None:
    """Warns of a token that a file lists with another id than transformers gives it."""
    ids: Mapping[int, Any] = {number: tokenizer.token_to_id(token.content) for number, token in special.listed.items()}
    moved = [number for number, found in ids.items() if found not in (number, None)]
    if moved:
        first = moved[0]
        warnings.warn(
            f"the files beside {path} must list tokens with the ids that transformers gives them, got {first} for "
            f"{special.listed[first].content!r}, which becomes token {ids[first]} there and here ({len(moved)} of "
            f"{len(ids)} differ); correct the ids",
            stacklevel=4,
        )


def _tell_of_other(tokenizer: Any, folder: Path) -> None:
    """Warns of a vocabulary beside tokenizer.json that is another."""
    ids = read_object(folder / _VOCABULARY)
    if ids:
        found = tokenizer.get_vocab(with_added_tokens=True)
        other = next((token for token, number in ids.items() if found.get(token) != number), None)
        if other is not None:
            warnings.warn(
                f"a folder should have one tokenizer, got {_VOCABULARY} in {folder} with {other!r} as token "
                f"{ids[other]}, which {TOKENIZER} has as {found.get(other)}: {TOKENIZER} is read, as in transformers; "
                "delete what is old",
                stacklevel=4,
            )


def _tell_of_unread(path: Path, present: Mapping[int, Token]) -> None:
    """Warns where a tokenizer.json is named alone and other files of its folder would add tokens."""
    missing: list[Token] = []
    if path.name == TOKENIZER:
        # Nothing else of the folder was asked for.
        with contextlib.suppress(ValueError):
            missing = read_special_tokens(path.parent).missing(present)
    if missing:
        warnings.warn(
            f"data.tokenizer names {path} alone, so that tokens of the folder's other files are not read, got "
            f"{missing[0].content!r} there ({len(missing)} in all); name the folder to have them",
            stacklevel=4,
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        rule = "data.tokenizer must be a readable tokenizer.json or a directory with one"
        raise file_error(rule, path, error, "choose another file") from error


def _parse(text: bytes, path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(
            "data.tokenizer needs the tokenizers library, which is not installed; run pip install tokenizers"
        ) from None
    try:
        return Tokenizer.from_buffer(text)
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(
            f"data.tokenizer must be a tokenizer.json of the tokenizers library, got {path} ({error}); "
            "choose another file"
        ) from error
