"""Which stored compiled figures are of programs that this code no longer makes.

A row is judged by what is cheapest: the versions of the compiler, then the files that made its program, then the
program lowered again. A row without digits has nothing to compare a lowered program with: its program is counted, and
not lowered. Nothing is compiled.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sppo_jax.fit.fingerprint import Lowering

Verdict = Literal["fresh", "stale", "another jaxlib", "unknown", "unreadable"]
VERDICTS: tuple[Verdict, ...] = ("fresh", "stale", "another jaxlib", "unknown", "unreadable")
RESULTS = Path(__file__).parent / "results" / "stale.json"
# What lowering alone says of a program, and what rows had before they had digits.
_COUNTS = ("num_bodies", "kernel_calls", "host_stash_bytes")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What is known of a row.

    Args:
        file: the file of results that has the row.
        name: the row.
        date: when the row was compiled.
        verdict: whether today's code makes the program of the row.
        why: the reason, in words.
    """

    file: str
    name: str
    date: str
    verdict: Verdict
    why: str


def named(name: str, words: Sequence[str]) -> bool:
    """Returns whether a name has one of the words, or there are none."""
    return not words or any(word in name for word in words)


def judge(
    row: Mapping[str, Any],
    versions: Mapping[str, str],
    sources: str,
    *,
    lower: Callable[[], Lowering],
    count: Callable[[], Mapping[str, int]],
) -> tuple[Verdict, str]:
    """Returns the verdict on a row, and why.

    Args:
        row: with the values of `Lowering`; older rows lack some or all of them.
        versions: of this jaxlib and of this compiler.
        sources: digits of the files of this code.
        lower: lowers the program of the row; raises ValueError where its config or its plan no longer loads.
        count: returns the counts of the program that need no lowering, with the same errors.
    """
    then = row.get("versions", {"jaxlib": row["jax"]} if "jax" in row else {})
    other = [f"{name} {then[name]}, not {versions.get(name, 'installed')}" for name in then
             if then[name] != versions.get(name)]  # fmt: skip
    if other:
        return "another jaxlib", ", ".join(other)
    if row.get("sources") == sources:
        return "fresh", "the same source files"
    try:
        found = lower().to_dict() if "fingerprint" in row else count()
    except (ValueError, KeyError, TypeError) as error:
        return "unreadable", " ".join(str(error).split())[:200]
    if "fingerprint" in row and row["fingerprint"] == found["fingerprint"]:
        return "fresh", "the same program"
    changed = [f"{name} {row[name]:,} then, {found[name]:,} now" for name in _COUNTS
               if name in row and name in found and row[name] != found[name]]  # fmt: skip
    if "fingerprint" not in row and not changed:
        return "unknown", "compiled before rows had digits"
    return "stale", ", ".join(changed) or "another program of the same counts"


def report(rows: Iterable[Judged]) -> str:
    """Returns the rows that are not fresh, a line each, and the counts."""
    rows = list(rows)
    lines = [f"{row.file} {row.name} ({row.date}): {row.verdict}: {row.why}" for row in rows if row.verdict != "fresh"]
    counts = Counter(row.verdict for row in rows)
    return "\n".join([*lines, ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)])


def write(rows: Iterable[Judged], day: str, path: Path = RESULTS) -> None:
    """Writes the rows that are not fresh, a row a line, with the day."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows if row.verdict != "fresh")
    path.write_text(f'{{"date": {json.dumps(day)}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def dates(file: str, path: Path = RESULTS) -> dict[str, str]:
    """Returns of each row of a file that is not known to be of today's program the date of its compilation."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {row["name"]: row["date"] for row in found if row["file"] == file}
