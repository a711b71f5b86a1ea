"""Text to tokens and back: by bytes, or by a tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sppo_jax.config.data import BYTES, DataConfig
from sppo_jax.data.tokens.tokenizer_file import open_tokenizer
from sppo_jax.data.vocabulary import VocabularyTooSmall
from sppo_jax.files.paths import local_path

# Bytes are tokens 0..255. Every document of bytes begins with this token, so that the first byte is predicted too.
START_TOKEN = 256


class Located(Protocol):
    """Tokens of a text, int64, and where they lie in it; no token begins or ends before the one before it."""

    tokens: np.ndarray

    def span(self, at: int) -> tuple[int, int]:
        """Returns the first, and one past the last, of the characters of token `at`."""
        ...

    def offsets(self) -> np.ndarray:
        """Returns the spans of all tokens, int64 [num_tokens, 2]."""
        ...


class Encoder(Protocol):
    """Turns text into tokens.

    Args:
        name: the name of the encoder in messages.
        key: a text that differs between encoders that give different tokens.
        num_ids: tokens lie in 0..num_ids-1.
        rendered_key: as `key`, for text that is rendered with its end, such as conversations.
        older_key: the key that version 0.1.0 of 2026-11-28 gave to text, for what that version cached.
        start: tokens that every document begins with.
        end: tokens that every document ends with.
        end_once: whether a document that ends with `end` already gets no other.
        own_end: tokens that every document would end with if no `eos_token` were added.
        special: tokens that are no part of a text, such as one that ends a turn.
        stops: tokens at which transformers stops generating.
        tokens_join: whether the tokens of a text's pieces, end to end, are those of the text.
    """

    name: str
    key: str
    num_ids: int
    rendered_key: str
    older_key: str
    start: tuple[int, ...]
    end: tuple[int, ...]
    end_once: bool
    own_end: tuple[int, ...]
    special: frozenset[int]
    stops: frozenset[int]
    tokens_join: bool

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of some texts, without start and end; bytes that are not UTF-8 come as lone surrogates."""
        ...

    def locate(self, texts: Sequence[str]) -> Sequence[Located]:
        """Returns the tokens of some texts, without start and end, and where they lie."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of some tokens."""
        ...


def end_after(encoder: Encoder, tokens: np.ndarray) -> tuple[int, ...]:
    """Returns the tokens that end a document whose text ends with some tokens."""
    return () if encoder.end_once and tokens[-1:].tolist() == list(encoder.end) else encoder.end


class BytesEncoder:
    """Bytes of UTF-8 as tokens; a file that is not UTF-8 keeps its own bytes."""

    name = key = rendered_key = older_key = "bytes"
    num_ids = START_TOKEN + 1
    start: tuple[int, ...] = (START_TOKEN,)
    end: tuple[int, ...] = ()
    own_end: tuple[int, ...] = ()
    end_once = False
    special: frozenset[int] = frozenset({START_TOKEN})
    stops: frozenset[int] = frozenset()
    tokens_join = True

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Encoder`."""
        return [np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8) for text in texts]

    def locate(self, texts: Sequence[str]) -> Sequence[Located]:
        """See `Encoder`; all bytes of a character have its place."""
        return [_BytesLocated(tokens.astype(np.int64)) for tokens in self.encode(texts)]

    def decode(self, tokens: np.ndarray) -> str:
        """See `Encoder`; the start token gives no text."""
        return bytes(tokens[(tokens >= 0) & (tokens < START_TOKEN)].astype(np.uint8)).decode("utf-8", "replace")


class _BytesLocated:
    """See `Located`."""

    def __init__(self, tokens: np.ndarray) -> None:
        """Takes bytes."""
        self.tokens = tokens
        # Every byte of UTF-8 but those that go on with a character begins one.
        self._at = np.cumsum((tokens & 0xC0) != 0x80) - 1

    def span(self, at: int) -> tuple[int, int]:
        """See `Located`."""
        return int(self._at[at]), int(self._at[at]) + 1

    def offsets(self) -> np.ndarray:
        """See `Located`."""
        return np.stack([self._at, self._at + 1], axis=1)


class _FileLocated:
    """See `Located`."""

    def __init__(self, encoding: Any) -> None:
        """Takes what the tokenizers library returns."""
        self.tokens, self._encoding = np.array(encoding.ids, np.int64), encoding

    def span(self, at: int) -> tuple[int, int]:
        """See `Located`."""
        found = self._encoding.token_to_chars(at)
        return (0, 0) if found is None else found

    def offsets(self) -> np.ndarray:
        """See `Located`."""
        return np.array(self._encoding.offsets, np.int64).reshape(-1, 2)


class FileEncoder:
    """A tokenizer.json of the tokenizers library, or a folder with one, never truncating or padding."""

    tokens_join = False

    def __init__(
        self, path: Path, *, start_token: str | None, end_token: str | None, num_rows: int | None = None
    ) -> None:
        """Reads the tokenizer.

        Args:
            path: the file; or a Hugging Face folder, of which all is read that transformers reads.
            start_token: token that documents begin with; "auto": the tokens that the tokenizer adds; None: no token.
            end_token: token that documents end with; "auto": the folder's `eos_token`, or the tokens that the tokenizer
                adds where there is none or where they stop generation already; None: no token.
            num_rows: rows of the model's embedding; tokens that only a folder's other files add need one.

        Raises:
            ValueError: the file is missing or broken, or lacks a token; or the tokenizers library is not installed.
        """
        opened = open_tokenizer(path, num_rows)
        self.name, self._path, self._tokenizer = str(opened.path), opened.path, opened.tokenizer
        self.num_ids = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = frozenset(number for number, token in added.items() if token.special)
        self.stops = opened.stops
        start, own_end = self._added()
        self.start = start if start_token == "auto" else self._ids("data.start_token", start_token)
        self.own_end = own_end if end_token == "auto" else self._ids("data.end_token", end_token)
        self.end, self.end_once = self.own_end, False
        if end_token == "auto" and opened.eos is not None and not self.stops.intersection(own_end[-1:]):
            self.end, self.end_once = (opened.eos,), True
        # The number is that of the way in which tokens of pieces are joined.
        self.older_key = f"{opened.digest} {self.start} {self.own_end} 2"
        self.rendered_key = self.older_key + opened.additions
        self.key = f"{opened.digest} {self.start} {self.end} 2{opened.additions}" + " once" * self.end_once

    def _added(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Finds the tokens that the tokenizer itself puts around a text."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a").ids
        for at in range(len(whole) - len(plain) + 1):
            if whole[at : at + len(plain)] == plain:
                return tuple(whole[:at]), tuple(whole[at + len(plain) :])
        return (), ()

    def _ids(self, setting: str, token: str | None) -> tuple[int, ...]:
        if token is None:
            return ()
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"{setting} must be a token of {self._path}, got {token!r}; name one of its tokens")
        return (found,)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Encoder`."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in encoded]

    def locate(self, texts: Sequence[str]) -> Sequence[Located]:
        """See `Encoder`."""
        return [_FileLocated(one) for one in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, tokens: np.ndarray) -> str:
        """See `Encoder`; special tokens are written out."""
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def open_encoder(config: DataConfig, *, vocab_size: int) -> Encoder:
    """Returns the encoder of a config's text.

    Args:
        config: gives tokenizer, start_token and end_token.
        vocab_size: the vocabulary size of the model, which must have a row for every token.

    Raises:
        ValueError: the tokenizer cannot be used, or has more tokens than the model.
    """
    if config.tokenizer in (None, BYTES):
        if (config.start_token, config.end_token) != ("auto", "auto"):
            raise ValueError(
                f"data.start_token and data.end_token must be auto where data.tokenizer is not given or bytes, got "
                f"{config.start_token} and {config.end_token}; leave both at auto (a document of bytes begins with "
                f"token {START_TOKEN})"
            )
        encoder: Encoder = BytesEncoder()
    else:
        path = local_path(config.tokenizer or "", "data.tokenizer")
        ends = {"start_token": config.start_token, "end_token": config.end_token}
        encoder = FileEncoder(path, **ends, num_rows=vocab_size)
    if encoder.num_ids > vocab_size:
        must = f"model.vocab_size must be above {encoder.num_ids - 1}, the largest token of {encoder.name}"
        raise VocabularyTooSmall(must, vocab_size, encoder.num_ids)
    return encoder
