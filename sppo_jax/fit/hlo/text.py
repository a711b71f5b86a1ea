"""Reads which computations a scheduled HLO text holds, and which of them an instruction runs.

XLA:GPU writes beside a loop how many iterations it has. XLA:TPU does not, so they are read from the loop's counter.
"""

import re
from collections.abc import Mapping, Sequence

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_BODY = re.compile(r" while\(.*body=%([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_BRANCHES = re.compile(r"(?:true_computation|false_computation)=%([\w.\-]+)|branch_computations=\{([^}]*)\}")
_NAME = re.compile(r"^(?:ROOT )?%([\w.\-]+) = ")
_FUSED = re.compile(r" fusion\(.*calls=%([\w.\-]+)")
_LOOP = re.compile(r" while\(%([\w.\-]+)\), condition=%([\w.\-]+), body=%([\w.\-]+)")
_BELOW = re.compile(r"^ROOT .* compare\(%([\w.\-]+), %([\w.\-]+)\), direction=LT")
_ELEMENT = re.compile(r" get-tuple-element\(%[\w.\-]+\), index=(\d+)")
_CONSTANT, _SUM = re.compile(r" constant\((\d+)\)"), re.compile(r" add\(%([\w.\-]+), %([\w.\-]+)\)")
_SAME = re.compile(r" (?:copy|copy-start|copy-done|bitcast)\(%([\w.\-]+)\)")
_TUPLE = re.compile(r" tuple\(([^)]*)\)")


def computations_of(hlo_text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of each computation of a text, by name, and the name of the entry.

    Where the text says of no loop how many iterations it has, those that count from a constant to a constant say so.
    """
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in hlo_text.splitlines():
        header = _HEADER.match(line)
        if header:
            lines = computations[header.group(1)] = []
            entry = header.group(1) if line.startswith("ENTRY") else entry
        elif line.startswith("  "):
            lines.append(line.strip())
    return computations if _TRIPS.search(hlo_text) else _with_trips(computations), entry


def _with_trips(computations: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Returns the lines of each computation, in which loops have their iterations as XLA:GPU writes them."""

    def with_trips(line, lines):
        trips = _counted(line, lines, computations) if " while(" in line else None
        return line if trips is None else f'{line}, backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'

    return {name: [with_trips(line, lines) for line in lines] for name, lines in computations.items()}


def _counted(line: str, lines: Sequence[str], computations: Mapping[str, list[str]]) -> int | None:
    """Returns the iterations of a loop whose counter goes up by one from a constant to a constant; None for others."""
    loop = _LOOP.search(line)
    if not loop:
        return None
    condition, body = (computations.get(loop[number], []) for number in (2, 3))
    test = next(filter(None, map(_BELOW.match, condition)), None)
    element = _ELEMENT.search(_origin(test[1], condition)) if test else None
    if not element:
        return None
    number = int(element[1])
    begin = _constant(_operand(_origin(loop[1], lines), number), lines)
    step = _SUM.search(_origin(_operand(next((x for x in body if x.startswith("ROOT ")), ""), number), body))
    end = _constant(test[2], condition)
    if begin is None or end is None or not step or _constant(step[2], body) != 1:
        return None
    counter = _ELEMENT.search(_origin(step[1], body))
    return max(0, end - begin) if counter and int(counter[1]) == number else None


def _operand(line: str, number: int) -> str:
    """Returns the name of an element of a tuple; empty where the instruction makes none."""
    made = _TUPLE.search(line)
    return re.findall(r"%([\w.\-]+)", made[1])[number] if made else ""


def _origin(name: str, lines: Sequence[str]) -> str:
    """Returns the instruction that made an array, before copies of it; empty where there is none."""
    line = next((line for line in lines if name and name_of(line) == name), "")
    copied = _SAME.search(line)
    return _origin(copied[1], lines) if copied else line


def _constant(name: str, lines: Sequence[str]) -> int | None:
    found = _CONSTANT.search(_origin(name, lines))
    return int(found[1]) if found else None


def loop_of(line: str) -> tuple[str, int | None] | None:
    """Returns the body of a loop and its iterations (None if the text does not say); None for other instructions."""
    body = _BODY.search(line)
    if body is None:
        return None
    trips = _TRIPS.search(line)
    return body.group(1), int(trips.group(1)) if trips else None


def name_of(line: str) -> str:
    """Returns the name of an instruction; empty for other lines."""
    named = _NAME.match(line)
    return named.group(1) if named else ""


def branches_of(line: str) -> list[str]:
    """Returns the computations of which a conditional runs one; none for other instructions."""
    if " conditional(" not in line:
        return []
    names = [name for single, several in _BRANCHES.findall(line) for name in (single or several).split(",")]
    return [name.strip().lstrip("%") for name in names]


def fused_in(line: str) -> str | None:
    """Returns the computation of a fusion; None for other instructions."""
    fused = _FUSED.search(line)
    return fused.group(1) if fused else None


def inner_of(line: str) -> list[tuple[str, int | None]]:
    """Returns the computations that a loop or a conditional runs, and how often (None if the text does not say)."""
    loop = loop_of(line)
    return [loop] if loop else [(name, 1) for name in branches_of(line)]


def holds(line: str, pattern: re.Pattern[str], computations: Mapping[str, Sequence[str]]) -> bool:
    """Returns whether an instruction matches, or one in a fusion, a loop or a conditional that it is, at any depth."""
    instruction = line.partition(", metadata=")[0]
    if pattern.search(instruction):
        return True
    fused = fused_in(instruction)
    if fused and any(holds(x, pattern, computations) for x in computations.get(fused, ())):
        return True
    return any(holds(x, pattern, computations) for inner, _ in inner_of(line) for x in computations[inner])
