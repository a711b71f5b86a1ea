"""`sppo eval ... --tasks`: scores of a run, a checkpoint or a Hugging Face model on tasks at lengths."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sppo_jax.commands.command import DONE, folder_settings, positive, simulate, some_path
from sppo_jax.commands.outputs import Output, check_outputs
from sppo_jax.config import Config
from sppo_jax.config.hf.hub import fetch
from sppo_jax.config.stretch import warn_beyond_length
from sppo_jax.files.paths import local_path
from sppo_jax.files.whole import json_text
from sppo_jax.processes import distributed
from sppo_jax.processes.environment import set_memory_fraction, skip_cuda_without_driver
from sppo_jax.report.run.scores import FILE

if TYPE_CHECKING:
    from sppo_jax.data.tasks.prompts import Prompter
    from sppo_jax.evaluation.tasks import FileTask, NeedleTask
    from sppo_jax.train.evaluate_tasks import Entry, Subject

_HF = "hf:"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of scores on tasks."""
    parser.add_argument(
        "--tasks", metavar="TASK", nargs="+", help="needle, needle-keys, needle-uuid, or files of JSON lines, to score"
    )
    parser.add_argument(
        "--lengths", metavar="N,N", type=_lengths, help="tokens of a sample with its answer, e.g. 4K,32K; the run's"
    )
    parser.add_argument(
        "--samples", metavar="N", type=int, help="samples of each task; 50 that are drawn, or all rows of a file"
    )
    parser.add_argument("--out", metavar="FILE", help="the JSON of the scores; RUN/scores.json, or none for hf:FOLDER")
    parser.add_argument("--raw", action="store_true", help="prompts without the tokenizer's chat template")


def run_or_folder(text: str) -> str:
    """Reads what to evaluate: hf:FOLDER or hf:OWNER/NAME, else a path on this machine."""
    return text if text.startswith(_HF) else str(some_path(text))


def check_without_tasks(args: argparse.Namespace) -> None:
    """Checks that nothing is asked for that needs tasks.

    Raises:
        ValueError: a folder, or an option of tasks.
    """
    given = [f"--{name}" for name in ("lengths", "samples", "out", "raw") if getattr(args, name)]
    given += [args.checkpoint] if args.checkpoint.startswith(_HF) else []
    if given:
        raise ValueError(f"{given[0]} must come with --tasks, got no task; add --tasks needle, or leave it out")


def _lengths(text: str) -> list[int]:
    return sorted({positive(word) for word in text.split(",") if word})


def run_tasks(args: argparse.Namespace) -> int:
    """Scores a model, prints a table and writes the entries; returns the exit code.

    Raises:
        ValueError: a word, a row, a length or the model is wrong; nothing is written.
    """
    overrides, words = _sorted_words(args)
    if args.samples is not None and args.samples < 1:
        raise ValueError(f"--samples must be at least 1, got {args.samples}; raise it or leave it out")

    from sppo_jax.evaluation.tasks import open_tasks

    subject = _subject(args.checkpoint, overrides)
    config = subject.config((args.lengths or [None])[-1])
    warn_beyond_length(config)
    simulate(config, together=True)
    skip_cuda_without_driver()
    set_memory_fraction()
    distributed.start(config)

    haystack = config.data.needles.haystack
    if haystack is not None:
        from sppo_jax.data.tasks.haystack import read_haystack

        haystack = distributed.together(lambda: read_haystack(str(config.data.needles.haystack)))
    tasks = distributed.together(lambda: open_tasks(words, args.samples, haystack))
    prompter = distributed.together(lambda: _prompter(args, config))
    asked = distributed.together(lambda: _asked(tasks, args.lengths, config, prompter))
    return _scored(args, subject, asked, prompter)


def _sorted_words(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Returns settings and tasks, which may stand behind --tasks in any order."""
    settings = [word for word in args.tasks if "=" in word and not Path(word).exists()]
    return [*args.overrides, *settings], [word for word in args.tasks if word not in settings]


def _subject(name: str, overrides: Sequence[str]) -> Subject:
    from sppo_jax.train.checkpoints.read import find_checkpoint
    from sppo_jax.train.evaluate_tasks import Subject

    if lengths := [one for one in overrides if one.partition("=")[0].strip() == "sequence.length"]:
        raise ValueError(f"lengths of tasks must be given by --lengths, got {lengths[0]}; write --lengths")
    given = tuple(overrides)
    if not name.startswith(_HF):
        checkpoint = find_checkpoint(Path(name))
        return Subject(name=name, checkpoint=checkpoint, settings={}, overrides=given)
    subject = Subject(name=name, checkpoint=None, settings=folder_settings(name.removeprefix(_HF)), overrides=given)
    folder = subject.config(None).model.hf
    if folder is not None:
        fetch(Path(folder), weights=True, say=lambda line: print(line, file=sys.stderr))
    return subject


def _prompter(args: argparse.Namespace, config: Config) -> Prompter:
    from sppo_jax.train.evaluate_tasks import open_prompter

    return open_prompter(config, raw=args.raw)


def _asked(
    tasks: Sequence[NeedleTask | FileTask], lengths: Sequence[int] | None, config: Config, prompter: Prompter
) -> list[tuple[int, NeedleTask | FileTask]]:
    """Returns each length with each task, by length; a file without given lengths has that of its longest row.

    Raises:
        ValueError: a sample does not fit a length.
    """
    from sppo_jax.evaluation.tasks import FileTask

    found = []
    for task in tasks:
        own = [task.length(prompter)] if isinstance(task, FileTask) else [config.sequence.length]
        for length in lengths or own:
            task.check(prompter, length)
            found.append((length, task))
    return sorted(found, key=lambda one: one[0])


def _scored(
    args: argparse.Namespace, subject: Subject, asked: Sequence[tuple[int, NeedleTask | FileTask]], prompter: Prompter
) -> int:
    from sppo_jax.evaluation.entries import read_entries
    from sppo_jax.evaluation.tables import scores_text
    from sppo_jax.files.whole import parse_json
    from sppo_jax.train.evaluate_tasks import evaluate_tasks

    out = _out(args, subject)
    text = distributed.together(lambda: json_text(read_entries(out)) if out and distributed.is_main() else "[]")
    known: list[Entry] = parse_json(distributed.share_text(text))
    if prompter.template is not None and not args.json:
        distributed.say(f"prompts with the chat template {prompter.template.name}; --raw leaves it out")
    found: list[Entry] = []

    def done(entry: Entry) -> None:
        found.append(entry)
        if entry not in known:
            known.append(entry)
            if out is not None and distributed.is_main():
                _write(out, known)
        if not args.json:
            distributed.say(f"{entry['task']} at {entry['length']:,}: {entry['hits']} of {entry['samples']} right")

    evaluate_tasks(subject, asked, prompter, list(known), done, lambda line: print(line, file=sys.stderr))
    where = f"\nwrote {out}" if out else "\nnot stored; --out FILE stores the scores"
    distributed.say(json_text(found, indent=2) if args.json else f"\n{scores_text(found)}\n{where}")
    return DONE


def _out(args: argparse.Namespace, subject: Subject) -> Path | None:
    """Returns the file of the scores; None for a folder without --out, which is not written into."""
    if args.out is not None:
        path = local_path(args.out, "--out")
        if distributed.is_main():
            check_outputs(Output(option="--out", path=path, head='"scores"'), inputs=[])
        return path
    if subject.checkpoint is None:
        return None
    directory = subject.checkpoint.parent
    return (directory.parent if directory.name == "checkpoints" else directory) / FILE


def _write(out: Path, entries: Sequence[Entry]) -> None:
    from sppo_jax.evaluation.entries import write_entries

    write_entries(out, entries)
