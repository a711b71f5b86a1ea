"""Files of questions, one JSON object a line: RULER's `input` and `outputs`, or `prompt` with `answer` or `choices`."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo_jax.data.tasks.prompts import Prompter
from sppo_jax.evaluation.samples import TaskSample
from sppo_jax.files.paths import file_error
from sppo_jax.files.whole import parse_json

_FORMS = (("prompt", "choices", "answer"), ("input", "outputs"), ("prompt", "answer"))
_NEEDED = "input and outputs, prompt and answer, or prompt, choices and answer"
# RULER's tasks whose answers have several values, all of which count: no single answer can be scored.
_SEVERAL = ("niah_multivalue", "niah_multiquery", "vt", "variable_tracking", "cwe", "fwe")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A row.

    Args:
        where: file and row, for messages.
        asked: what the model reads.
        prefix: the beginning of the answer, which is given.
        answers: right ones, of which one is enough; or all choices. None is empty.
        right: number of the right choice; None: the answers are no choices.
    """

    where: str
    asked: str
    prefix: str
    answers: tuple[str, ...]
    right: int | None

    def sample(self, prompter: Prompter) -> TaskSample:
        """Returns the tokens.

        Raises:
            ValueError: the template refuses the row.
        """
        text = prompter.text(self.asked, self.prefix)
        ways = [prompter.continuations(text, answer) for answer in self.answers]
        if self.right is not None:
            sizes = tuple(len(answer.encode("utf-8", "replace")) for answer in self.answers)
            # The first way has a space between prompt and choice, unless one of them has it.
            answers = tuple(way[0] for way in ways)
        else:
            sizes, answers = (), tuple({one.tokens: one for way in ways for one in way}.values())
        return TaskSample(prompt=prompter.tokens(text), answers=answers, right=self.right, sizes=sizes)


def read_questions(name: str, num_wanted: int | None) -> tuple[tuple[Question, ...], str]:
    """Returns the first rows of a file, and a digest of the file.

    Args:
        name: path of the file.
        num_wanted: most rows; None: all. Where there are fewer, all are read, and a warning says so.

    Raises:
        ValueError: the file cannot be read, or a row is wrong.
    """
    path = Path(name)
    try:
        content = path.read_bytes()
        lines = content.decode().splitlines()
    except OSError as error:
        raise file_error("--tasks must be a readable file of JSON lines", path, error, "name another file") from error
    except UnicodeDecodeError:
        raise ValueError(f"--tasks must be a file of JSON lines in UTF-8, got {path}; name another file") from None
    if several := {path.stem, path.parent.name}.intersection(_SEVERAL):
        raise ValueError(
            f"a file of questions must have answers of one value, got {path} of RULER's task {several.pop()}, whose "
            "answers have several values; leave the file out"
        )
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"a file of questions must have a row, got none in {path}; name another file")
    if num_wanted is not None and num_wanted > len(numbered):
        warnings.warn(f"{path} has {len(numbered):,} rows, and all are scored, not {num_wanted:,}", stacklevel=2)
    found = tuple(_question(line, f"{path} row {number}") for number, line in numbered[:num_wanted])
    forms = {one.right is None for one in found}
    if len(forms) > 1:
        raise ValueError(f"all rows of a file must have choices or none, got both in {path}; use two files")
    return found, hashlib.sha256(content).hexdigest()[:16]


def _question(line: str, where: str) -> Question:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ValueError(f"a row must be a JSON object, got {where} ({error}); correct the row") from None
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, got {where} with {type(row).__name__}; correct the row")
    form = next((form for form in _FORMS if set(form) <= set(row)), None)
    if form is None:
        keys = ", ".join(sorted(map(str, row))) or "no keys"
        raise ValueError(f"a row must have {_NEEDED}, got {keys} in {where}; correct the row")
    asked = _text(row[form[0]], form[0], where)
    if "choices" in form:
        choices = _texts(row["choices"], "choices", where)
        return Question(where=where, asked=asked, prefix="", answers=choices, right=_index(row, choices, where))
    prefix = _text(row.get("answer_prefix", ""), "answer_prefix", where)
    answers = row[form[1]]
    several = answers if form[1] == "outputs" or isinstance(answers, list) else [answers]
    return Question(where=where, asked=asked, prefix=prefix, answers=_texts(several, form[1], where), right=None)


def _index(row: dict[str, Any], choices: tuple[str, ...], where: str) -> int:
    index = row["answer"]
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(choices):
        raise ValueError(
            f"answer must be the number of a choice from 0, below {len(choices)}, got {index!r} in {where}; correct "
            "the row"
        )
    return index


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a text, got {type(value).__name__} in {where}; correct the row")
    return value


def _texts(values: Any, key: str, where: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        kinds = sorted({type(value).__name__ for value in values}) if isinstance(values, list) else []
        got = f"a list of {', '.join(kinds) or 'nothing'}" if isinstance(values, list) else type(values).__name__
        raise ValueError(f"{key} must be a list of texts, got {got} in {where}; correct the row")
    if not all(value.strip() for value in values):
        raise ValueError(f"{key} must not have an empty text, got one in {where}; correct the row")
    return tuple(values)
