"""Reading from a compiled program which of its collectives may overtake a loop that holds others."""

import re
from typing import NamedTuple

COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute", "collective-broadcast")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\((.*)$")
CALLED = re.compile(r"(?:body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Instruction(NamedTuple):
    name: str
    opcode: str
    operands: list[str]
    called: list[str]

    @property
    def is_collective(self) -> bool:
        return self.opcode.removesuffix("-start") in COLLECTIVES

    @property
    def may_hold_some(self) -> bool:
        return self.opcode in ("while", "call", "conditional")


def read_computations(text: str) -> dict[str, list[Instruction]]:
    """Reads the computations of a scheduled module, their instructions in the schedule's order."""
    computations: dict[str, list[Instruction]] = {}
    current = None
    for line in text.splitlines():
        head = COMPUTATION.match(line)
        if head and not line.startswith("HloModule"):
            current = computations[head[1]] = []
        elif (found := INSTRUCTION.match(line)) and current is not None:
            name, opcode, rest = found.groups()
            operands, _, attributes = rest.partition(")")
            branches = BRANCHES.search(attributes)
            called = CALLED.findall(attributes) + (re.findall(r"[\w.\-]+", branches[1]) if branches else [])
            current.append(Instruction(name, opcode, re.findall(r"%([\w.\-]+)", operands), called))
    return computations


def overtaking(text: str) -> list[tuple[str, str]]:
    """Lists the pairs (loop, what communicates next and needs nothing of the loop) of a compiled module's text."""
    computations, known = read_computations(text), {}

    def communicates(instruction):
        return instruction.is_collective or (instruction.may_hold_some and any(map(inside, instruction.called)))

    def inside(name):
        if name not in known:
            known[name] = any(map(communicates, computations[name]))
        return known[name]

    pairs = []
    for instructions in computations.values():
        loop, needing = None, set()
        for instruction in instructions:
            needs = not needing.isdisjoint(instruction.operands)
            if needs:
                needing.add(instruction.name)
            if communicates(instruction):
                if loop and not needs:
                    pairs.append((loop, instruction.name))
                loop = None if instruction.is_collective else instruction.name
                needing = {loop}
    return pairs
