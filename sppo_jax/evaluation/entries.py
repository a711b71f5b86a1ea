"""Scores as entries of a JSON file: each has a key, and what has the key is not computed again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sppo_jax.data.tasks.needles import DEPTHS
from sppo_jax.data.tasks.prompts import Prompter
from sppo_jax.evaluation.score import TaskResult
from sppo_jax.evaluation.tasks import Task
from sppo_jax.files.paths import file_error
from sppo_jax.files.whole import json_text, parse_json, write_whole
from sppo_jax.report.run.scores import SCORES, other_content
from sppo_jax.version import __version__

_PROBE = [{"role": "user", "content": "a"}]


def key_of(weights: str, model: Mapping[str, Any], task: Task, length: int, prompter: Prompter) -> str:
    """Returns a text that differs between scores that may differ; meshes and devices do not count.

    Args:
        weights: their fingerprint.
        model: the settings of the model.
        task: its samples.
        length: in tokens.
        prompter: tokenizer and template.
    """
    facts = {
        "weights": weights,
        "model": {name: value for name, value in model.items() if name not in ("hf", "preset", "check_kernels")},
        "task": task.key,
        "samples": task.num_samples,
        "length": length,
        "tokenizer": f"{prompter.encoder.key} {prompter.encoder.start}",
        "template": prompter.template and prompter.template.prompt(_PROBE),
        "version": __version__,
    }
    return hashlib.sha256(json_text(facts).encode()).hexdigest()[:16]


def entry_of(key: str, task: Task, length: int, result: TaskResult) -> dict[str, Any]:
    """Returns the figures of a task at a length.

    `share` is that of the samples that are right, `error` its standard error, `nats` the mean over the samples of the
    loss of a token of the answer.
    """
    share, error = share_of(result.hits)
    entry: dict[str, Any] = {
        "key": key,
        "task": task.name,
        "length": length,
        "samples": len(result.hits),
        "hits": int(result.hits.sum()),
        "share": share,
        "error": error,
        "nats": float(np.mean([one.nats / one.count for one in result.best])),
        "joined": sum(one.joins for one in result.best),
        "seconds": round(result.seconds, 3),
    }
    if result.hits_by_byte is not None:
        by_byte, its_error = share_of(result.hits_by_byte)
        entry |= {"acc": share, "acc_norm": by_byte, "acc_norm_error": its_error}
    if result.depths is not None:
        entry["depths"] = _by_depth(result)
    return entry


def share_of(hits: np.ndarray) -> tuple[float, float]:
    """Returns the share of hits and its standard error, that of a mean of independent samples.

    Args:
        hits: bool [num_samples], at least one.
    """
    share = float(hits.mean())
    return share, math.sqrt(share * (1 - share) / len(hits))


def _by_depth(result: TaskResult) -> list[dict[str, Any]]:
    """Returns samples and hits of each tenth of the text that has any."""
    assert result.depths is not None
    tenth = np.minimum((np.array(result.depths) * DEPTHS).astype(int), DEPTHS - 1)
    return [
        {"depth": at / DEPTHS, "samples": int((tenth == at).sum()), "hits": int(result.hits[tenth == at].sum())}
        for at in sorted(set(tenth.tolist()))
    ]


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Returns the entries of a file; none where there is no file.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        found = parse_json(text) if text.strip() else {SCORES: []}
    except OSError as error:
        raise file_error("a file of scores must be readable", path, error, "name another file") from error
    except ValueError:
        found = None
    entries = found.get(SCORES) if isinstance(found, dict) else None
    if not isinstance(entries, list) or not all(isinstance(one, dict) and "key" in one for one in entries):
        raise other_content(path)
    return entries


def write_entries(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Replaces a file by one with these entries, whole or not at all.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        write_whole(path, json_text({SCORES: list(entries)}, indent=2) + "\n")
    except OSError as error:
        raise file_error("a file of scores must be writable", path, error, "name another file with --out") from error
