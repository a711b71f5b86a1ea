"""Reading from a compiled program which of its collectives may change places with a loop that holds others."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute", "collective-broadcast")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\((.*)$")
CALLED = re.compile(r"(?:body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
BODY = re.compile(r"body=%?([\w.\-]+)")
INDEX = re.compile(r"\bindex=(\d+)")


class Instruction(NamedTuple):
    name: str
    opcode: str
    operands: list[str]
    called: list[str]
    body: str  # of a while
    index: int  # of a get-tuple-element
    is_root: bool

    @property
    def is_collective(self) -> bool:
        return self.opcode.removesuffix("-start") in COLLECTIVES

    @property
    def may_hold_some(self) -> bool:
        return self.opcode in ("while", "call", "conditional")


class Buffer(NamedTuple):
    """What an instruction gives: the element of the computation's parameter that it is, and what it is made of."""

    element: int | None
    needs: frozenset[str] = frozenset()


@dataclass
class Computation:
    """Which elements of a computation's parameter are read in it, and which are results in their own place."""

    read: set[int] = field(default_factory=set)
    passed_on: set[int] = field(default_factory=set)
    pairs: list[tuple[str, str]] = field(default_factory=list)


def read_computations(text: str) -> dict[str, list[Instruction]]:
    """Reads the computations of a scheduled module but for fused ones, their instructions in the schedule's order."""
    computations: dict[str, list[Instruction]] = {}
    current = None
    for line in text.splitlines():
        head = COMPUTATION.match(line)
        if head and not line.startswith("HloModule"):
            current = None if head[1].startswith("fused_computation") else computations.setdefault(head[1], [])
        elif (found := INSTRUCTION.match(line)) and current is not None:
            root, name, opcode, rest = found.groups()
            operands, _, attributes = rest.partition(")")
            branches, body, index = (pattern.search(attributes) for pattern in (BRANCHES, BODY, INDEX))
            called = CALLED.findall(attributes) + (re.findall(r"[\w.\-]+", branches[1]) if branches else [])
            operands = re.findall(r"%([\w.\-]+)", operands)
            details = body[1] if body else "", int(index[1]) if index else 0, bool(root)
            current.append(Instruction(name, opcode, operands, called, *details))
    return computations


def overtaking(text: str) -> list[tuple[str, str]]:
    """Lists the pairs (loop, collective) and (collective, loop) of a compiled module that have no order.

    A collective has its place once it needs the loop before it, since collectives start in one order. A loop has its
    place once it needs all that communicates before it. Loops work in place: what a body does not read, or hands on as
    it is, makes nothing wait.
    """
    reader = _Reader(read_computations(text))
    return [pair for name in reader.computations for pair in reader.read(name).pairs]


class _Reader:
    def __init__(self, computations: dict[str, list[Instruction]]):
        self.computations = computations
        self.done: dict[str, Computation] = {}
        self.communicating: dict[str, bool] = {}

    def communicates(self, instruction: Instruction) -> bool:
        return instruction.is_collective or (instruction.may_hold_some and any(map(self.inside, instruction.called)))

    def inside(self, name: str) -> bool:
        if name not in self.communicating:
            self.communicating[name] = any(map(self.communicates, self.computations[name]))
        return self.communicating[name]

    def read(self, name: str) -> Computation:
        if name not in self.done:
            self.done[name] = self._read(self.computations[name])
        return self.done[name]

    def _read(self, instructions: list[Instruction]) -> Computation:
        found, values, loop, since_loop = Computation(), {}, None, []
        for instruction in instructions:
            operands = [values[x] for x in instruction.operands if x in values]
            value, used = self._value(instruction, operands)
            values[instruction.name] = value
            found.read |= {x.element for x in used if x.element is not None}
            if instruction.is_root:
                found.passed_on = {i for i, x in enumerate(_leaves(value)) if x.element == i}
            if self.communicates(instruction):
                needs = frozenset().union(*(x.needs for x in used))
                if instruction.is_collective:
                    found.pairs += [(loop, instruction.name)] * (loop is not None and loop not in needs)
                    loop, since_loop = None, [*since_loop, instruction.name]
                else:
                    found.pairs += [(x, instruction.name) for x in since_loop if x not in needs]
                    loop, since_loop = instruction.name, [instruction.name]
        return found

    def _value(self, instruction: Instruction, operands: list):
        """Returns what an instruction gives, as a buffer or a list of such, and the buffers that it uses."""
        match instruction.opcode:
            case "parameter":
                return _Parameter(), []
            case "tuple":
                return operands, []
            case "get-tuple-element" if not isinstance(operands[0], Buffer):
                return operands[0][instruction.index], []
            case "get-tuple-element" | "bitcast" if len(_leaves(operands[0])) == 1:
                return operands[0], []
            case "while" if isinstance(operands[0], list):
                return self._loop(instruction, operands[0])
        used = [x for operand in operands for x in _leaves(operand)]
        return Buffer(None, self._with(instruction, used)), used

    def _loop(self, instruction: Instruction, elements: list):
        read = set().union(*(self.read(name).read for name in instruction.called))
        passed_on = self.read(instruction.body).passed_on
        used = [x for i, element in enumerate(elements) for x in _leaves(element) if i in read or i not in passed_on]
        needs = self._with(instruction, used)
        return [x if i in passed_on else Buffer(None, needs) for i, x in enumerate(elements)], used

    def _with(self, instruction: Instruction, used: list[Buffer]) -> frozenset[str]:
        itself = {instruction.name} if self.communicates(instruction) else set()
        return frozenset(itself).union(*(x.needs for x in used))


class _Parameter:
    """A computation's parameter: an array, or a tuple whose elements are known by their places."""

    def __getitem__(self, index: int) -> Buffer:
        return Buffer(index)


def _leaves(value) -> list[Buffer]:
    if isinstance(value, _Parameter):
        return [Buffer(None)]
    return [value] if isinstance(value, Buffer) else [x for element in value for x in _leaves(element)]
