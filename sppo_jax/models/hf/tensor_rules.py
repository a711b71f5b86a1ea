"""How a parameter is read from the tensors of a Hugging Face model, and brought back into their layout; imports no jax.

Letters of layouts are listed in `hf_tensors`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Reads a part of a tensor: its name, and a slice for each dim.
ReadPart = Callable[[str, tuple[slice, ...]], np.ndarray]
# Letters that no parameter has: gates and ups, of which `TensorRule.half` is one, and a dim of one element.
HALVES, UNIT = "g", "u"
_SIZES = {HALVES: 2, UNIT: 1}
# A dim of a parameter that a tensor may have as two: value heads, by key heads.
_SPLIT = {"m": ("c", "r")}


@dataclass(frozen=True)
class JoinedRows:
    """One of several parameters of unlike sizes, whose rows a tensor has behind one another in its first dim.

    Args:
        sizes: of each part the letters whose product is its rows.
        number: of the part.
        within: the letter of which each index has all parts; "" where each part is in one piece.
    """

    sizes: tuple[str, ...]
    number: int
    within: str = ""


@dataclass(frozen=True)
class TensorRule:
    """One parameter and its counterpart.

    Args:
        ours: path of the parameter; those of layers are stacked [l, ...], those of experts [l, e, ...].
        theirs: name of the tensor; the first `{}` is the layer, the second the expert.
        layout: dims of the tensor -> dims of the parameter. The dims of layers and experts, which `{}` counts, are left
            out. Parentheses join letters to one dim.
        only: what a model must have for it to be there, a key of `hf_tensors.parts_of`; "" for always.
        half: index along `g`, where a tensor holds two parameters: 0 or 1.
        part: which part of the tensor it is, where this holds several of unlike sizes; None where it holds one size.
        of_stack: name of the stack of layers, see `ModelConfig.stacks`; None where all layers are alike.
        layers: the number of each of its layers in the model; () where all layers are alike.
    """

    ours: str
    theirs: str
    layout: str
    only: str = ""
    half: int = 0
    part: JoinedRows | None = None
    of_stack: str | None = None
    layers: tuple[int, ...] = ()

    def name(self, index: Sequence[int]) -> str:
        """Returns the name of the tensor at an index of the stacked dims."""
        if not self.layers or not index:
            return self.theirs.format(*index)
        layer, *rest = index
        return self.theirs.format(self.layers[layer], *rest)

    @property
    def stack(self) -> tuple[str, ...]:
        """Letters of the dims of the parameter that are spread over tensors, the first ones."""
        return ("l", "e")[: self.theirs.count("{}")]

    @property
    def groups(self) -> tuple[str, ...]:
        """Letters of each dim of the tensor."""
        left = self.layout.partition("->")[0]
        return tuple(joined or single for joined, single in re.findall(r"\((.*?)\)|(\w)", left))

    @property
    def letters(self) -> tuple[str, ...]:
        """Letter of each dim of the parameter, without those of `stack`."""
        return tuple(self.layout.partition("->")[2].split())

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of the tensor."""
        sizes = {**_SIZES, **sizes}
        shape = tuple(math.prod(sizes[letter] for letter in group.split()) for group in self.groups)
        if self.part is None:
            return shape
        return (sizes.get(self.part.within, 1) * sum(self.rows(sizes)), *shape[1:])

    def rows(self, sizes: Mapping[str, int]) -> list[int]:
        """Returns the rows of each part of the tensor, in one index of `part.within`."""
        assert self.part is not None
        return [math.prod(sizes[letter] for letter in letters.split()) for letters in self.part.sizes]

    @property
    def spread(self) -> tuple[str, ...]:
        """Letters of the parameter's dims as the tensor has them, without those of `stack`."""
        of_tensor = {letter for group in self.groups for letter in group.split()}
        return tuple(
            single
            for letter in self.letters
            for single in ((letter,) if letter in of_tensor else _SPLIT.get(letter, (letter,)))
        )


def read_parameter(
    rule: TensorRule, read: ReadPart, index: Sequence[slice], sizes: Mapping[str, int], dtype: np.dtype
) -> np.ndarray:
    """Reads a part of a parameter, tensor by tensor, and only the bytes that are needed.

    Args:
        rule: of the parameter.
        read: reads a part of a tensor.
        index: the part, a slice for each dim of the parameter, the stacked ones first.
        sizes: of the letters.
        dtype: wanted.

    Returns:
        The part, in the parameter's layout.
    """
    letters = (*rule.stack, *rule.letters)
    spans = {letter: part.indices(sizes[letter])[:2] for letter, part in zip(letters, index, strict=True)}
    out = _aligned([stop - start for start, stop in spans.values()], np.dtype(dtype))
    for numbers in itertools.product(*(range(*spans[letter]) for letter in rule.stack)):
        place = tuple(number - spans[letter][0] for number, letter in zip(numbers, rule.stack, strict=True))
        out[place] = _read_tensor(rule, rule.name(numbers), read, spans, sizes)
    return out


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Makes an empty array that jax uses on a CPU without a copy."""
    num_bytes, line = math.prod(shape) * dtype.itemsize, 64
    room = np.empty(num_bytes + line, np.uint8)
    first = -room.ctypes.data % line
    return room[first : first + num_bytes].view(dtype).reshape(shape)


def _read_tensor(
    rule: TensorRule, name: str, read: ReadPart, spans: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]
) -> np.ndarray:
    """Reads a part of one tensor into the layout of its parameter."""
    if rule.part is not None:
        whole = _read_part(rule, name, read, sizes)
        return whole[tuple(slice(*spans[letter]) for letter in rule.letters)]
    sizes, spans = {**_SIZES, **sizes}, {HALVES: (rule.half, rule.half + 1), UNIT: (0, 1), **spans}
    cuts, shape, flat = [], [], []
    for group in rule.groups:
        lead, *inner = group.split()
        # Rows of the leading letter lie together; what is wanted of an inner one is cut out afterwards.
        size, (start, stop) = math.prod(sizes[letter] for letter in inner), spans[lead]
        cuts.append(slice(start * size, stop * size))
        shape += [stop - start, *(sizes[letter] for letter in inner)]
        flat += [lead, *inner]
    leads = {group.split()[0] for group in rule.groups}
    values = read(name, tuple(cuts)).reshape(shape)
    values = values[tuple(slice(None) if letter in leads else slice(*spans[letter]) for letter in flat)]
    for letter in set(flat) - set(rule.letters):
        values = values.squeeze(flat.index(letter))
        flat.remove(letter)
    return values.transpose([flat.index(letter) for letter in rule.letters])


def _read_part(rule: TensorRule, name: str, read: ReadPart, sizes: Mapping[str, int]) -> np.ndarray:
    """Reads a parameter from its rows of a tensor, in the parameter's layout."""
    assert rule.part is not None
    sizes, rows = {**_SIZES, **sizes}, rule.rows(sizes)
    first = sum(rows[: rule.part.number])
    values = read(name, tuple(slice(0, size) for size in rule.shape(sizes)))
    values = values.reshape(sizes.get(rule.part.within, 1), sum(rows), *values.shape[1:])
    values = values[:, first : first + rows[rule.part.number]]
    flat = [letter for group in rule.groups for letter in group.split()]
    values = values.reshape([sizes[letter] for letter in flat if letter != UNIT])
    flat = [letter for letter in flat if letter != UNIT]
    values = values.transpose([flat.index(letter) for letter in rule.spread])
    return values.reshape([sizes[letter] for letter in rule.letters])


def _join_parts(rules: Sequence[TensorRule], values: Sequence[np.ndarray], sizes: Mapping[str, int]) -> np.ndarray:
    """Brings the parameters of a tensor into its rows, one behind the other."""
    pieces = []
    for rule, value in zip(rules, values, strict=True):
        assert rule.part is not None
        flat = [letter for group in rule.groups for letter in group.split() if letter != UNIT]
        value = value.reshape([sizes[letter] for letter in rule.spread])
        value = value.transpose([rule.spread.index(letter) for letter in flat])
        pieces.append(value.reshape(sizes.get(rule.part.within, 1), -1, *rule.shape(sizes)[1:]))
    return np.concatenate(pieces, axis=1).reshape(rules[0].shape(sizes))


def to_tensor(rules: Sequence[TensorRule], values: Sequence[np.ndarray], sizes: Mapping[str, int]) -> np.ndarray:
    """Brings the parameters of one tensor into its layout.

    Args:
        rules: of the parameters that the tensor holds: one, the two of `g`, or all its parts.
        values: of each parameter, without the stacked dims.
        sizes: of the letters.
    """
    rule = rules[0]
    if rule.part is not None:
        return _join_parts(rules, values, {**_SIZES, **sizes})
    sizes = {**_SIZES, **dict(zip(rule.letters, values[0].shape, strict=True))}
    flat = [letter for group in rule.groups for letter in group.split()]
    order = [rule.letters.index(letter) for letter in flat if letter in rule.letters]
    if len(rules) == 1:
        return values[0].transpose(order).reshape(rule.shape(sizes))
    out = np.empty([sizes[letter] for letter in flat], values[0].dtype)
    for part, value in zip(rules, values, strict=True):
        out[tuple(part.half if letter == HALVES else slice(None) for letter in flat)] = value.transpose(order)
    return out.reshape(rule.shape(sizes))
