"""Reading plan.json: keys of a report, older versions of the layout, unknown and missing keys."""

import dataclasses
import json
from typing import Any

from sppo_jax.files.whole import parse_json
from sppo_jax.plan.host_pieces import ONE_PIECE
from sppo_jax.plan.renamed import model_of_today

SCHEMA_VERSION = 17
# What `sppo plan --json` adds to a plan to report on it; no part of the plan, so left aside where one is read.
REPORT_KEYS = (
    "fits",
    "problem",
    "rejected",
    "stages",
    "memory",
    "parts",
    "throughput",
    "documents",
    "search",
    "stall_s",
    "max_length",
    "min_devices",
)
# The keys that each version of the layout added, with the values that older plans had without the keys. The place is
# the object that holds the key; none: the plan itself.
_ADDED: tuple[tuple[int, str | None, dict[str, Any]], ...] = (
    (3, None, {"groups": "static"}),
    (4, "schedule", {"wave": 1}),
    (5, "schedule", {"shapes": ()}),
    (6, "stash", {"kv": "keep"}),
    (7, None, {"weights": "resident"}),
    (8, "stash", {"attention_from": 0}),
    (9, "stash", {"waiting": "keep"}),
    (10, None, {"optimizer": "device"}),
    (11, None, {"saves": "async"}),
    (12, None, {"host_pieces": ONE_PIECE, "host_arrays": {"state": (), "stash_bytes": 0, "save": ()}}),
    (13, "predicted", {"documents_step_s": None}),
    (14, None, {"planned_for": {"documents": "full", "mean_tokens": 0.0, "attended": 1.0}, "cluster": ""}),
    (15, None, {"sequence_documents": "many"}),
    (16, None, {"backward_queries": 0}),
)


def read_object(text: str) -> dict[str, Any]:
    """Returns the object that JSON text holds.

    Raises:
        ValueError: the text is not JSON, or holds something else.
    """
    try:
        values = parse_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"plan.json must hold JSON text, got text that is not JSON ({error}); plan again") from None
    if not isinstance(values, dict):
        raise ValueError(f"plan.json must hold a JSON object, got a value of type {type(values).__name__}; plan again")
    return values


def read_plan(cls: type, nested: dict[str, type], values: dict[str, Any]) -> Any:
    """Makes a plan from an object of this version of the layout or an older one.

    Args:
        cls: the dataclass of a plan.
        nested: the dataclasses of the keys that hold objects.
        values: the object; keys of a report (REPORT_KEYS) are left aside.

    Raises:
        ValueError: a key is unknown or missing, the version is another one, or the plan does not hold together.
    """
    values = _upgraded({key: value for key, value in values.items() if key not in REPORT_KEYS})
    found = values.get("schema_version")
    if found != SCHEMA_VERSION:
        raise ValueError(f"schema_version of plan.json must be {SCHEMA_VERSION}, got {found!r}; plan again")
    try:
        read = {
            key: _read(nested[key], value, f"{key} of plan.json") if key in nested else value
            for key, value in values.items()
        }
        return _read(cls, read, "plan.json")
    except (TypeError, AttributeError) as error:
        raise ValueError(f"plan.json must hold values of the right types, got others ({error}); plan again") from None


def _upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """Returns an older plan with the keys it lacks; anything but an object is refused where it is read."""
    for version, place, added in _ADDED:
        if values.get("schema_version") != version - 1:
            continue
        values = {**values, "schema_version": version}
        if place is None:
            values = {**added, **values}
        elif isinstance(values.get(place), dict):
            values[place] = {**added, **values[place]}
    if values.get("schema_version") == 16:
        values = {**values, "schema_version": 17, "model": model_of_today(values.get("model"))}
    return values


def _read(cls: type, values: Any, where: str) -> Any:
    """Makes a dataclass from a dict, refusing unknown and missing keys; lists become tuples."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be an object, got {values!r}; plan again")
    fields = {item.name: item for item in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(
            f"{where} must have only the keys {', '.join(fields)}, got {', '.join(unknown)} too; plan again"
        )
    # Every key is written, so every key is expected: a default would hide a truncated file.
    missing = sorted(set(fields) - set(values))
    if missing:
        raise ValueError(f"{where} must have every key, got none named {', '.join(missing)}; plan again")
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
