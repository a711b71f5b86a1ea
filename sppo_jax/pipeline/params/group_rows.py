"""Where the layers of a group lie in a stack of which only some groups have layers.

Groups of one layer are such where types have parameters of several shapes: each stack has a row for each of its layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from sppo_jax.arrays import buffers


@dataclass(frozen=True)
class GroupRows:
    """The rows of a stack [rows, layers, ...] by group of layers.

    Args:
        is_there: of each group, whether it has layers of the stack.
    """

    is_there: tuple[bool, ...]

    @property
    def count(self) -> int:
        """Rows of the stack."""
        return sum(self.is_there)

    @property
    def nearest(self) -> tuple[int, ...]:
        """Of each group its row. A group without one has that of the next group with one, or the last row.

        A backward goes through these groups before, so what a device holds of the stack is then of the nearest row.
        """
        return tuple(min(sum(self.is_there[:group]), self.count - 1) for group in range(len(self.is_there)))

    def row(self, group: jax.Array) -> jax.Array:
        """Returns a group's row."""
        return buffers.read_slot(jnp.array(self.nearest, jnp.int32), group)

    def has(self, group: jax.Array) -> jax.Array:
        """Returns 1 where a group has layers of the stack, else 0."""
        return buffers.read_slot(jnp.array(self.is_there, jnp.int32), group)


def rows_of(groups: Sequence[Sequence[str | None]], has: Callable[[str | None], bool]) -> GroupRows | None:
    """Returns the rows of the layers of some types; None where every group has some: its number is its row.

    Args:
        groups: the types of the layers of each group of a stage.
        has: whether a type is one of these.
    """
    is_there = tuple(any(map(has, layer_types)) for layer_types in groups)
    return None if all(is_there) or not any(is_there) else GroupRows(is_there)


def rows_of_stacks(
    groups: Sequence[Sequence[str | None]], stacks: Mapping[str | None, str | None]
) -> dict[str | None, GroupRows]:
    """Returns the rows of each stack of which only some groups have layers; arguments as in `stage.Layers`."""
    found = {name: rows_of(groups, lambda one, name=name: stacks[one] == name) for name in stacks.values()}
    return {name: rows for name, rows in found.items() if rows is not None}
