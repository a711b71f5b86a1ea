"""Documents of which some tokens are learned, whatever their form: written once into the cache, and opened."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sppo_jax.config.data import DataConfig
from sppo_jax.data.cache.left_out import NOTHING_LEARNED, Tally, as_facts, of_facts
from sppo_jax.data.cache.store import Writer
from sppo_jax.data.rows.corpus import Corpus, corpus_of
from sppo_jax.data.storage.folders import File
from sppo_jax.data.storage.parts import Job, tokenized
from sppo_jax.data.storage.progress import Progress
from sppo_jax.data.tokens.learned import Learned, count, learned_of, warn_of_dropped
from sppo_jax.data.tokens.mask_bit import join_words


@dataclass(frozen=True, kw_only=True)
class Masked:
    """A document.

    Args:
        file: the number of its file.
        tokens: int64 [num_tokens].
        learned: whether each token is learned, bool [num_tokens].
        marks: who says so.
    """

    file: int
    tokens: np.ndarray
    learned: np.ndarray
    marks: tuple[str, ...]


def write_masked(
    documents: Iterable[Masked], what: str, files: Sequence[File], writer: Writer, length: int, left_out: Tally,
    progress: Progress,
) -> None:  # fmt: skip
    """Writes the words of all documents in which something is learned, and facts.

    Args:
        documents: the documents, in the order of their files.
        what: what they are, for what is left out.
        files: the files.
        writer: takes tokens, ends and facts.
        length: tokens that a sequence holds.
        left_out: what of the files is not read.
        progress: takes the number of tokens.
    """
    found, counts, end = Learned(), [0] * len(files), 0
    for one in documents:
        progress.add_tokens(len(one.tokens))
        found += dataclasses.replace(count(one.learned, len(one.tokens), length), marks=one.marks)
        if not one.learned[1:].any():
            left_out[what, NOTHING_LEARNED] += 1
            continue
        words = join_words(one.tokens, one.learned)
        end += len(words)
        counts[one.file] += 1
        writer.add_tokens(words)
        writer.add_ends(np.array([end], np.int64))
    writer.facts.update(documents=counts, learned=dataclasses.asdict(found), left_out=as_facts(left_out))


def open_masked(config: DataConfig, job: Job, length: int) -> Corpus:
    """Opens what `write_masked` wrote, now or before.

    Raises:
        ValueError: as `parts.tokenized`.
    """
    entry = tokenized(config, job)
    assert entry.tokens is not None
    found = dataclasses.replace(learned_of(entry.facts["learned"]), kinds=("rows",))
    warn_of_dropped(found, length)
    names, counts = [file.name for file in job.files], entry.facts["documents"]
    corpus = corpus_of(entry.tokens, entry.ends, names, counts, starts=entry.starts)
    return dataclasses.replace(
        corpus, digest=str(entry.facts["crc"]), learned=found, left_out=of_facts(entry.facts["left_out"])
    )
