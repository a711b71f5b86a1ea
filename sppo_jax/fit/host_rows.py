"""Which slices of buffers on the host a plan's ticks copy: the rows of the plan in bytes, loop by loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from sppo_jax.fit.hlo.slices import Slice
from sppo_jax.pipeline.api import Step
from sppo_jax.pipeline.stash.buffers import ELEMENT, StashLayout
from sppo_jax.program.counters import numbers_of_iterations
from sppo_jax.program.fold import Loop, of_bodies

# XLA's names of the dtypes of what lies on the host.
_NAMES = {"uint16": "u16", "bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


def planned_slices(step: Step) -> list[Slice]:
    """Returns the slices of the stash and of the waiting room on the host that the ticks of a step copy.

    Ticks whose row depends on the stage, or on more than one loop's counter, are left out: kernels copy their rows.

    Args:
        step: of a plan.
    """
    program, found = step.program, list[Slice]()
    rows = {name: list(of_bodies(program.items, values)) for name, values in program.rows.items()}
    for number, spec in enumerate(_specs(program.items)):
        of_body = {name: values[number] for name, values in rows.items()}
        copies = (
            (spec.stash.write, True, "stash.write"),
            (spec.stash.fetch, False, "stash.fetch"),
            (spec.prefixes.refetch, False, "prefixes.refetch"),
        )
        for of_class, goes_out, field in copies:
            if of_class is not None:
                numbers = _numbers(of_body, f"{field}_row", f"{field}_short")
                begin = step.stash_layout(of_class).unread_lines if field == "stash.fetch" else 0
                buffers = _stash_buffers(step.stash_layout(of_class), program.stash, of_class)
                found += _stash_slices(step.stash_layout(of_class), buffers, numbers, begin, goes_out)
        waits = ((spec.waiting.put is not None, True, "put"), (spec.waiting.take, False, "take"))
        found += [
            _waiting_slice(step, goes_out, numbers)
            for does, goes_out, field in waits
            if does and (numbers := _numbers(of_body, f"waiting.{field}_row"))
        ]
    return found


def _specs(items: Sequence) -> Iterator[Any]:
    """Yields the shape of each body of ticks, in the order of `of_bodies`."""
    for item in items:
        yield from _specs(item.body) if isinstance(item, Loop) else [item]


def _numbers(values: Mapping[str, np.ndarray], *fields: str) -> list[tuple[int, ...]]:
    """Returns the rows of each iteration, and what else tells their place; none where a kernel copies them."""
    found = []
    for field in fields:
        of_field = values[field]
        numbers = numbers_of_iterations(of_field)
        if numbers is None and of_field.ndim == 1 and (of_field == of_field[0]).all():
            numbers = of_field[:1]  # outside of loops
        if numbers is None:
            return []
        found.append(numbers.tolist())
    return list(zip(*found, strict=True))


def _stash_buffers(layout: StashLayout, stash: Any, of_class: Any) -> list[tuple[str, int]]:
    """Returns each piece of a class on the host, and the bytes of one index of its first dim."""
    size = jnp.dtype(ELEMENT).itemsize
    steps = layout.first_step(stash.num_rows[of_class], stash.num_short.get(of_class, 0))
    name = _NAMES[jnp.dtype(ELEMENT).name]
    return [
        (f"{name}[{steps},{layout.step_lines},{elements}]", layout.step_lines * elements * size)
        for elements in layout.columns
    ]


def _stash_slices(
    layout: StashLayout,
    buffers: Sequence[tuple[str, int]],
    numbers: Sequence[tuple[int, ...]],
    begin_lines: int,
    goes_out: bool,
) -> Iterator[Slice]:
    for buffer, step_bytes in buffers:
        if numbers:
            steps = (int(layout.first_step(*number)) + begin_lines // layout.step_lines for number in numbers)
            yield Slice(buffer, goes_out, tuple(step * step_bytes for step in steps))


def _waiting_slice(step: Step, goes_out: bool, numbers: Sequence[tuple[int, ...]]) -> Slice:
    dtype, hidden_size = jnp.dtype(step.model.dtype), step.params["embedding"].get_value().shape[1]
    row = (step.program.max_tokens, hidden_size)
    buffer = f"{_NAMES[dtype.name]}[{step.program.waiting.num_rows},{row[0]},{row[1]}]"
    row_bytes = row[0] * row[1] * dtype.itemsize
    return Slice(buffer, goes_out, tuple(number * row_bytes for (number,) in numbers))
