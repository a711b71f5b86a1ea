"""How long the step with flexible teams takes to compile, beside the same step without: part `compile` of `flex.py`.

CPU seconds of tracing, lowering and compiling, in turns, so that other work on the machine tells less. A process that
has compiled a program compiles the next one no faster: no cache is kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

ROUNDS = 3
GROUPS = ("static", "flex")


def of_kinds(
    sides: Callable[[str, str], Callable[[], Any]], kinds: Sequence[str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the CPU seconds that each side takes to compile, and the ratio of the medians.

    Args:
        sides: from the setting of teams and the kind to a function that traces, lowers and compiles the step.
        kinds: of stream attention.
        say: takes a line of progress.
    """
    result = {}
    for kind in kinds:
        compiles = {groups: sides(groups, kind) for groups in GROUPS}
        cpu_s: dict[str, list[float]] = {groups: [] for groups in GROUPS}
        for _ in range(ROUNDS):
            for groups, compiled in compiles.items():
                begin = time.process_time()
                compiled()
                cpu_s[groups].append(time.process_time() - begin)
        ratio = statistics.median(cpu_s["flex"]) / statistics.median(cpu_s["static"])
        result[kind] = {"cpu_s": cpu_s, "ratio": ratio}
        say(f"{kind}: flex takes {ratio:.2f} of the CPU time of static to compile")
    return result
