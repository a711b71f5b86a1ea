"""Conversations tokenized once: which tokens are learned, which conversations are cut or dropped, and their counts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sppo_jax.config.data import DataConfig
from sppo_jax.data.cache.left_out import NOTHING_LEARNED, SAYS_SO, Tally, as_facts, of_facts
from sppo_jax.data.cache.store import Writer
from sppo_jax.data.chat.controls import ControlTokens, warn_of_controls
from sppo_jax.data.chat.newest import newest_turns
from sppo_jax.data.chat.roles import Chat, Rendered
from sppo_jax.data.chat.spans import overlaps, whole_turns
from sppo_jax.data.chat.stop_tokens import warn_of_no_stop
from sppo_jax.data.chat.template_places import Templates, read_template
from sppo_jax.data.chat.thoughts import count_thoughts, warn_of_thoughts
from sppo_jax.data.content.conversations import chat_of, rows_of
from sppo_jax.data.content.loss_keys import ignored_key
from sppo_jax.data.content.other_conversations import with_messages
from sppo_jax.data.rows.corpus import Corpus, corpus_of
from sppo_jax.data.storage.folders import File, beginnings, unchanged
from sppo_jax.data.storage.parts import Job, tokenized
from sppo_jax.data.storage.progress import Progress, total_bytes
from sppo_jax.data.tokens.encoding import Encoder, Located
from sppo_jax.data.tokens.learned import Learned, count, learned_of, warn_of_dropped
from sppo_jax.data.tokens.mask_bit import join_words

_BATCH = 64
_FORMAT, _OLDER_FORMAT = 4, 3  # of the words in the cache
# Fingerprints name the older format: what it read rightly has the same tokens, so runs go on.
_DIGEST_FORMAT = _OLDER_FORMAT
_ADVICE = {
    "turns": "set data.chat.too_long=newest, which keeps the newest turns",
    "newest": "leave out the rows whose last turns are too long",
    "drop": "set data.chat.too_long=newest or turns",
}
_TOO_LONG = "they are longer than a sequence, and nothing in what is kept is learned"


def load_chats(config: DataConfig, files: Sequence[File], encoder: Encoder, length: int) -> Corpus:
    """Opens the conversations of files, which are tokenized once.

    Args:
        config: gives the chat settings and the cache.
        files: files of rows.
        encoder: turns text into tokens.
        length: tokens that a sequence holds.

    Raises:
        ValueError: a conversation or the template is wrong, or nothing is left to learn.
    """
    job = chat_job(config, files, encoder, length)
    entry = tokenized(config, job)
    assert entry.tokens is not None
    found = dataclasses.replace(learned_of(entry.facts["learned"]), kinds=("conversations",))
    warn_of_dropped(found, length, _ADVICE.get(config.chat.resolved().too_long, ""))
    warn_of_controls(found)
    warn_of_thoughts(found)
    corpus = corpus_of(
        entry.tokens, entry.ends, [file.name for file in files], entry.facts["documents"], starts=entry.starts
    )
    digest = _digest(entry.facts["crc"], job.key["chat"])
    return dataclasses.replace(corpus, digest=digest, learned=found, left_out=of_facts(entry.facts["left_out"]))


def _digest(crc: int, chat: dict[str, Any]) -> str:
    """Returns the text that tells conversations apart: the tokens, and what they were made with."""
    return f"{crc} {json.dumps(chat | {'format': _DIGEST_FORMAT}, sort_keys=True)}"


def chat_job(config: DataConfig, files: Sequence[File], encoder: Encoder, length: int) -> Job:
    """Returns how the conversations of files become tokens; see `load_chats`."""
    found = read_template(config)
    config = dataclasses.replace(config, chat=config.chat.resolved())
    chat, template = config.chat, Templates(found, config)
    warn_of_no_stop(template, encoder)
    key: dict[str, Any] = {
        "files": [file.key for file in files],
        "begins": beginnings(files),
        "encoder": encoder.rendered_key,
        # The fingerprint has this part too, so what is read since it was made comes behind it.
        "chat": dataclasses.asdict(chat) | {"template": found.text, "variables": found.settings, "format": _FORMAT},
        "length": length if chat.too_long != "cut" else None,
        "counts": "control tokens",
    }
    older = key | {"encoder": encoder.older_key, "chat": key["chat"] | {"format": _OLDER_FORMAT}}
    key |= {
        **ignored_key(config),
        **({"rows": config.format} if config.format in ("prompt", "alpaca") else {}),
        **({"variables": found.variables} if found.variables != found.settings else {}),
        **({"for tools": found.for_tools} if found.for_tools is not None else {}),
    }

    def tokenize(some: Sequence[File], writer: Writer) -> None:
        _tokenize(some, config, template, encoder, writer, length)

    def check(facts: dict[str, Any]) -> None:
        found = learned_of(facts["learned"])
        if not any(facts["documents"]):
            raise ValueError(
                f"data.source must hold conversations with something to learn, got {found.read:,} without, of "
                f"which {found.too_long:,} are longer than a sequence of {length:,}; see data.chat.train_on and "
                f"data.chat.too_long, or correct the {{% generation %}} regions of {template.name}"
            )

    return Job(files=files, key=key, dtype=np.dtype(np.uint32), tokenize=tokenize, check=check, older=[older])


def _tokenize(
    files: Sequence[File], config: DataConfig, template: Templates, encoder: Encoder, writer: Writer, length: int
) -> None:
    """Writes the words of all conversations, and counts."""
    found, controls = Learned(marks=(template.whose_marks,)), ControlTokens(encoder)
    documents, end, left_out = [0] * len(files), 0, Tally()
    with Progress(total_bytes(files)) as progress:
        for batch in _batches(files, config, template, left_out, progress):
            encoded = encoder.locate([rendered.text for _, _, _, rendered in batch])
            for (number, where, chat, rendered), located in zip(batch, encoded, strict=True):
                size = len(located.tokens)
                progress.add_tokens(size)
                if size > length and config.chat.too_long == "newest":
                    with _told(where):
                        rendered, located = newest_turns(template.of(chat), encoder, chat, rendered, located, length)
                learned = overlaps(located, rendered.trained)
                kept = _kept(config, rendered, located, learned, length, where)
                found += count(learned, kept, length, size=size) + controls.count(chat)
                if not learned[1:kept].any():
                    left_out["conversations", NOTHING_LEARNED if kept == size else _TOO_LONG] += 1
                    continue
                found += count_thoughts(rendered, where, is_first=not found.lost_thoughts)
                words = join_words(located.tokens[:kept], learned[:kept])
                end += kept
                documents[number] += 1
                writer.add_tokens(words)
                writer.add_ends(np.array([end], np.int64))
    writer.facts.update(documents=documents, learned=dataclasses.asdict(found), left_out=as_facts(left_out))


def _batches(
    files: Sequence[File], config: DataConfig, template: Templates, left_out: Tally, progress: Progress
) -> Iterator[list[tuple[int, str, Chat, Rendered]]]:
    """Gives conversations, also as text, with the number of their file and their place."""
    batch: list[tuple[int, str, Chat, Rendered]] = []
    for number, file in enumerate(files):
        with unchanged(file), progress.reading(file):
            for where, found in rows_of(file.path, left_out):
                row = with_messages(found, config, where)
                if row is None:
                    left_out["conversations", SAYS_SO] += 1
                    continue
                chat = chat_of(row, config.chat, where)
                with _told(where):
                    batch.append((number, where, chat, template.render(chat)))
                progress.advance(len(batch[-1][-1].text))
                if len(batch) == _BATCH:
                    yield batch
                    batch = []
    if batch:
        yield batch


@contextlib.contextmanager
def _told(where: str) -> Iterator[None]:
    """Puts the place of a conversation before what is said of it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _kept(
    config: DataConfig, rendered: Rendered, located: Located, learned: np.ndarray, length: int, where: str
) -> int:
    """Returns how many leading tokens of a conversation are kept."""
    size, rule = len(learned), config.chat.too_long
    if size <= length or rule == "cut":
        return size
    if rule == "refuse":
        raise ValueError(
            f"a conversation must fit a sequence where data.chat.too_long is refuse, got {size:,} tokens in {where} "
            f"and {length:,} of a sequence; raise sequence.length, or choose newest, turns, cut or drop"
        )
    return whole_turns(rendered, located.offsets(), learned, length) if rule == "turns" else 0
