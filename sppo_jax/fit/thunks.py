"""Which loops of a compiled program run inside CUDA graphs, read from what XLA:GPU dumps of its thunks.

The text of a program does not say: XLA makes command buffers, which are CUDA graphs, of the thunks behind the text.
The dump lists the thunks with indents, a loop as `003: kWhile`, below the `000: kCommandBuffer` that holds the loop.
Another dump gives the instruction of each number. jaxlib 0.11 dumps no command buffers: all loops then count as
outside.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_SEQUENCE, _NAMES = "*.thunk_sequence_after_thunk_passes.txt", "*.thunk_metadata.txt"
_THUNK = re.compile(r"^( *)(\d+): (k\w+)")
_NAMED = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')


def graphed_loops(folder: Path) -> frozenset[str]:
    """Returns the names of the loops and conditionals in command buffers.

    Args:
        folder: what `xla_dump_to` named while one program was compiled; no such files: XLA made no command buffer.
    """
    names = {number: name for path in folder.glob(_NAMES) for name, number in _named(path.read_text(encoding="utf-8"))}
    found = set()
    for path in folder.glob(_SEQUENCE):
        with path.open(encoding="utf-8") as lines:
            found |= {names[number] for number in _in_command_buffers(lines) if number in names}
    return frozenset(found)


def _named(text: str) -> list[tuple[str, int]]:
    return [(name.rpartition("/")[2], int(number)) for name, number in _NAMED.findall(text)]


def _in_command_buffers(lines: Iterable[str]) -> Iterator[int]:
    """Yields the numbers of the loops and conditionals below a command buffer."""
    outside = -1  # the indent of the command buffer that holds a line; below 0: none
    for line in lines:
        thunk = _THUNK.match(line)
        if thunk is None:
            continue
        indent, name = len(thunk.group(1)), thunk.group(3)
        if outside >= 0 and indent <= outside:
            outside = -1
        if outside < 0 and name == "kCommandBuffer":
            outside = indent
        elif outside >= 0 and name in ("kWhile", "kConditional"):
            yield int(thunk.group(2))
