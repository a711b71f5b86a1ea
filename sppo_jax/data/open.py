"""From a config to what a run reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sppo_jax.config import Config
from sppo_jax.data.corpus import split_corpus
from sppo_jax.data.packing import PackedRows
from sppo_jax.data.rows import Rows
from sppo_jax.data.sources import START_TOKEN, load_corpus


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a run reads.

    Args:
        training: the sequences to train on.
        validation: those held out; None where nothing is.
        decode: the text of some tokens, integer [num_tokens].
    """

    training: Rows
    validation: Rows | None
    decode: Callable[[np.ndarray], str]


def open_data(config: Config) -> Data:
    """Open the sources of a config.

    Raises:
        ValueError: a source is unknown, unreadable or empty, or does not fit the model's vocabulary.
    """
    data = config.data
    corpus = load_corpus(data, vocab_size=config.model.vocab_size)
    training, validation = split_corpus(corpus, data.validation_fraction)

    def rows(corpus):
        return PackedRows(corpus, length=config.sequence.length, pack=data.pack, seed=data.seed)

    return Data(training=rows(training), validation=rows(validation) if validation else None, decode=_decode_bytes)


def _decode_bytes(tokens: np.ndarray) -> str:
    return bytes(tokens[tokens < START_TOKEN].astype(np.uint8)).decode("utf-8", "replace")
