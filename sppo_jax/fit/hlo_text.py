"""Reads which computations a scheduled HLO text holds, and which of them an instruction runs."""

import re

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_BODY = re.compile(r" while\(.*body=%([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_BRANCHES = re.compile(r"(?:true_computation|false_computation)=%([\w.\-]+)|branch_computations=\{([^}]*)\}")
_NAME = re.compile(r"^(?:ROOT )?%([\w.\-]+) = ")
_FUSED = re.compile(r" fusion\(.*calls=%([\w.\-]+)")


def computations_of(hlo_text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of each computation of a text, by name, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in hlo_text.splitlines():
        header = _HEADER.match(line)
        if header:
            lines = computations[header.group(1)] = []
            entry = header.group(1) if line.startswith("ENTRY") else entry
        elif line.startswith("  "):
            lines.append(line.strip())
    return computations, entry


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
