"""All processes of a run lower the same programs, on the same software: compared before anything is compiled.

XLA divides the work of compiling among processes. Where their programs differ, processes may wait for each other for
hours without a word (marin-community/marin#9042). What stays uncovered: programs of one text that autotuning compiles
to different kernels (openxla/xla#7716).
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from sppo_jax.processes import distributed
from sppo_jax.processes.software import device_facts, software

_NUM_DIGITS = 16
_SHOWN = 160
# Figures that may differ by this share: the memory of cards of one kind.
_NUMBERS = {"device memory": 0.03}


class Different(ValueError):
    """Processes would compile different programs, or on different software; the line names the first difference."""


def check_lowered(name: str, lowered: Any, device: jax.Device, facts: Mapping[str, str] = MappingProxyType({})) -> None:
    """Checks that all processes are about to compile the same program on the same software; all must call it.

    Args:
        name: of the program, in words.
        lowered: from a jitted function's `lower`.
        device: of this process.
        facts: what else must be alike, by name.

    Raises:
        Different: in every process, with the same line.
    """
    if distributed.num_processes() > 1:
        check_same(name, lowered.as_text(), software() | device_facts(device) | dict(facts))


def check_same(name: str, text: str, facts: Mapping[str, str]) -> None:
    """Checks that all processes are about to compile the same program; all processes must call it.

    Args:
        name: of the program, in words.
        text: of the lowered program, without locations.
        facts: what else must be alike, by name.

    Raises:
        Different: in every process, with the same line.
    """
    if distributed.num_processes() == 1:
        return
    digits = digits_of(text)
    mine = {"host": socket.gethostname(), "facts": dict(facts), "digits": digits}
    posts = [json.loads(post) for post in distributed.exchange(json.dumps(mine))]
    if problem := differing_fact(posts):
        raise Different(problem)
    other = differing_program(posts)
    if other is None:
        return
    first_text = _decoded(distributed.share_text(_encoded(text)))
    path = _written(name, text)
    found = distributed.exchange(json.dumps([*first_difference(first_text, text), str(path)]))
    number, ours, theirs, theirs_at = json.loads(found[other])
    at = json.loads(found[0])[-1]
    raise Different(
        f"all processes must lower the same {name}, got another one in process {other} on {posts[other]['host']}: line "
        f"{number} is {theirs!r}, and {ours!r} in process 0; compare {theirs_at} there with {at} in process 0, and use "
        "one version of the code, one config and one environment"
    )


def differing_fact(posts: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line on the first fact that differs between processes; "" where none does.

    Args:
        posts: of each process its "host" and "facts".
    """
    first = posts[0]["facts"]
    for name in dict.fromkeys(name for post in posts for name in post["facts"]):
        for process, post in enumerate(posts):
            ours, theirs = (facts.get(name, "none") for facts in (first, post["facts"]))
            if not _is_alike(name, ours, theirs):
                return (
                    f"processes of one program must have the same {name}, got {theirs} in process {process} "
                    f"on {post['host']} and {ours} in process 0; install and set the same on all hosts"
                )
    return ""


def differing_program(posts: Sequence[Mapping[str, Any]]) -> int | None:
    """Returns the first process whose digits are not process 0's; None where all are."""
    return next((process for process, post in enumerate(posts) if post["digits"] != posts[0]["digits"]), None)


def digits_of(text: str) -> str:
    """Returns 16 digits that differ between lowered programs that differ."""
    return hashlib.sha256(text.encode()).hexdigest()[:_NUM_DIGITS]


def first_difference(first: str, second: str) -> tuple[int, str, str]:
    """Returns the number of the first line that differs, from 1, and both lines; 0 where none does."""
    ours, theirs = first.splitlines(), second.splitlines()
    for number in range(max(len(ours), len(theirs))):
        pair = [lines[number] if number < len(lines) else "" for lines in (ours, theirs)]
        if pair[0] != pair[1]:
            return number + 1, *(_around(line, pair) for line in pair)  # type: ignore[return-value]
    return 0, "", ""


def _around(line: str, pair: Sequence[str]) -> str:
    """Returns the part of a line from a little before the place where two lines differ."""
    same = next((k for k, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
    begin = max(0, same - _SHOWN // 4)
    return ("..." if begin else "") + line.strip()[begin : begin + _SHOWN] if begin else line.strip()[:_SHOWN]


def _is_alike(name: str, ours: str, theirs: str) -> bool:
    if name in _NUMBERS and ours.isdecimal() and theirs.isdecimal():
        return abs(int(ours) - int(theirs)) <= _NUMBERS[name] * int(ours)
    return ours == theirs


def _written(name: str, text: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="sppo-lowered-"))
    path = folder / f"{name.replace(' ', '_')}-process-{distributed.process_id()}.mlir"
    path.write_text(text, encoding="utf-8")
    return path


def _encoded(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _decoded(text: str) -> str:
    return zlib.decompress(base64.b64decode(text)).decode()
