"""Whether a run reads text or conversations; how its texts end, and how those of an earlier version did."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable

import numpy as np

from sppo_jax.config import Config
from sppo_jax.config.data import DRAWN, DataConfig, Sources
from sppo_jax.data.content.content import FileContent, content_of
from sppo_jax.data.open import with_tokenizer
from sppo_jax.data.sources.open_source import LIBRARY, find_files
from sppo_jax.data.tokens.encoding import open_encoder


def has_content(
    data: DataConfig, contents: Collection[FileContent], given: str | Sources, names: Iterable[str]
) -> bool:
    """Returns whether a source has files with some content.

    Args:
        data: how files are read.
        contents: what the rows of a file hold.
        given: the setting that names the sources.
        names: their names.

    Raises:
        ValueError: a source cannot be looked at.
    """
    for name in names:
        own = data.with_settings(data.settings_of(name, given))
        if name in DRAWN:
            continue
        if name == LIBRARY:
            is_there = "text" in contents
        else:
            is_there = any(content_of(own, file) in contents for file in find_files(name)[0])
        if is_there:
            return True
    return False


def has_chats(data: DataConfig) -> bool:
    """Returns whether a config trains on conversations; where its files are gone, whether it names a template."""
    try:
        return has_content(data, ["chat"], data.source, data.sources)
    except ValueError:
        return data.chat.template != "auto" or data.format in ("chat", "alpaca")


def earlier_end_token(config: Config) -> str | None:
    """Returns the data.end_token with which texts end as they did before auto was the folder's `eos_token`.

    Returns:
        The token, or null where texts ended with none. None: texts end as they did, or there is no text.
    """
    data = with_tokenizer(config)
    sources = ((data.source, data.sources), (data.validation_source or {}, data.validation_sources))
    try:
        encoder = open_encoder(data, vocab_size=config.model.vocab_size)
        if (
            not encoder.end_once
            or len(encoder.own_end) > 1
            or not any(has_content(data, ["text"], *one) for one in sources)
        ):
            return None
    except ValueError:
        return None
    return f"'\"{encoder.decode(np.array(encoder.own_end))}\"'" if encoder.own_end else "null"


def warn_of_other_ends(config: Config, got: str, wanted: str | None) -> None:
    """Warns where texts end otherwise than in the run whose config is read again.

    Args:
        config: of the run.
        got: fingerprint of the data as they are read now.
        wanted: fingerprint of the run's data; None: no data are wanted.
    """
    if wanted in (None, got) or (earlier := earlier_end_token(config)) is None:
        return
    warnings.warn(
        f"an evaluation should read the documents of its run, got other documents (fingerprint {got}, not {wanted}); "
        f"add data.end_token={earlier} if the run began before texts ended with the tokenizer's eos_token",
        stacklevel=3,
    )
