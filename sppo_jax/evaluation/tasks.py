"""Tasks by their names: needle tasks, whose samples are drawn, and files of rows."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sppo_jax.config.data import NEEDLE_TASKS
from sppo_jax.data.tasks.fit import fit_needles
from sppo_jax.data.tasks.needles import EVALUATION, draw_needles
from sppo_jax.data.tasks.prompts import Prompter
from sppo_jax.evaluation.question_rows import Question, read_questions
from sppo_jax.evaluation.samples import TaskSample

# All models get the same samples, whatever the seeds of their runs.
_SEED = 0
_ROUNDED = 256  # the length of a file's rows is a multiple of it


class Task(Protocol):
    """Samples at a length.

    Args:
        name: as the user gives it.
        shares_rows: whether its samples are short, so that several may share a row.
    """

    name: str
    shares_rows: bool

    @property
    def key(self) -> dict[str, Any]:
        """What decides the samples beside length, tokenizer and template."""
        ...

    @property
    def num_samples(self) -> int:
        """Samples that are scored."""
        ...

    def samples(self, prompter: Prompter, length: int) -> list[TaskSample]:
        """Returns all samples.

        Raises:
            ValueError: a sample does not fit the length, or the template refuses it.
        """
        ...

    def check(self, prompter: Prompter, length: int) -> None:
        """Looks at samples before any is scored; raises as `samples`."""
        ...


@dataclass(frozen=True, kw_only=True)
class NeedleTask:
    """See `Task`; the samples are drawn.

    Args:
        name: one of NEEDLE_TASKS.
        num_samples: at least 1.
        haystack: a text of the user's; None: drawn sentences.
    """

    name: str
    num_samples: int
    haystack: str | None = None
    shares_rows: bool = False

    @property
    def key(self) -> dict[str, Any]:
        """See `Task`."""
        digest = self.haystack and hashlib.sha256(self.haystack.encode()).hexdigest()[:16]
        return {"task": self.name, "seed": _SEED, "haystack": digest}

    def samples(self, prompter: Prompter, length: int) -> list[TaskSample]:
        """See `Task`."""
        return [self._sample(number, prompter, length) for number in range(self.num_samples)]

    def check(self, prompter: Prompter, length: int) -> None:
        """See `Task`; all samples need about as many tokens."""
        self._sample(0, prompter, length)

    def _sample(self, number: int, prompter: Prompter, length: int) -> TaskSample:
        drawn = draw_needles(self.name, seed=_SEED, stream=EVALUATION, number=number, haystack=self.haystack)
        try:
            fitted = fit_needles(drawn, prompter, length)
        except ValueError as error:
            raise ValueError(f"--tasks {self.name}: {error}") from None
        return TaskSample(prompt=fitted.prompt, answers=fitted.answers, depth=fitted.depth)


@dataclass(frozen=True, kw_only=True)
class FileTask:
    """See `Task`; the samples are rows of a file.

    Args:
        name: path of the file.
        questions: its first rows.
        digest: of the file.
    """

    name: str
    questions: tuple[Question, ...]
    digest: str
    shares_rows: bool = True

    @property
    def key(self) -> dict[str, Any]:
        """See `Task`."""
        return {"file": self.digest}

    @property
    def num_samples(self) -> int:
        """See `Task`."""
        return len(self.questions)

    def samples(self, prompter: Prompter, length: int) -> list[TaskSample]:
        """See `Task`."""
        found = [question.sample(prompter) for question in self.questions]
        for question, sample in zip(self.questions, found, strict=True):
            answer = max(len(one.tokens) for one in sample.answers)
            if sample.num_tokens > length:
                what = "the answer alone" if answer >= length else "prompt and answer"
                raise ValueError(
                    f"{question.where}: {what} must fit the length, got {max(answer, sample.num_tokens):,} tokens and "
                    f"a length of {length:,}; use --lengths {self.length(prompter)}"
                )
        return found

    def check(self, prompter: Prompter, length: int) -> None:
        """See `Task`."""
        self.samples(prompter, length)

    def length(self, prompter: Prompter) -> int:
        """Returns a length that holds each sample: the longest one's, rounded up."""
        most = max(question.sample(prompter).num_tokens for question in self.questions)
        return -(-most // _ROUNDED) * _ROUNDED


def open_tasks(words: Sequence[str], num_samples: int | None, haystack: str | None) -> list[NeedleTask | FileTask]:
    """Returns tasks by their names or paths; of needle tasks 50 samples where no number is given, of files all rows.

    Args:
        words: names, or paths of files of JSON lines; one word may hold several with commas between them.
        num_samples: of each task; None: not given.
        haystack: a text of the user's for needle tasks.

    Raises:
        ValueError: a task is unknown, or a file is wrong.
    """
    names = [name for word in words for name in ([word] if Path(word).exists() else word.split(",")) if name]
    if not names:
        raise ValueError(f"--tasks must name a task, got none; name one of {', '.join(NEEDLE_TASKS)}, or a file")
    return [_open(name, num_samples, haystack) for name in dict.fromkeys(names)]


def _open(name: str, num_samples: int | None, haystack: str | None) -> NeedleTask | FileTask:
    if name in NEEDLE_TASKS:
        return NeedleTask(name=name, num_samples=50 if num_samples is None else num_samples, haystack=haystack)
    if "/" in name or "." in name or Path(name).exists():
        questions, digest = read_questions(name, num_samples)
        return FileTask(name=name, questions=questions, digest=digest)
    near = difflib.get_close_matches(name, NEEDLE_TASKS, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"--tasks must be of {', '.join(NEEDLE_TASKS)} or paths of .jsonl files, got {name}; the nearest task is {near}"
    )
