"""The results of the GPU benchmark: one JSON, written after each case, so that several calls can join. No jax."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

from bench.gpu_parts.case import Outcome
from bench.gpu_parts.machine import Machine
from sppo_jax.files.whole import write_whole

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "transformers", "nvidia-cudnn-cu13", "libtpu")
# What a program that is compiled and not run depends on: compiling loads neither cuDNN nor torch.
_COMPILERS = ("jax", "jaxlib")


@dataclass(kw_only=True)
class Results:
    """What was measured, on what, and when.

    Args:
        path: of the JSON.
        machine: the device and its host.
        versions: of the packages that matter.
        date: day of the first case, YYYY-MM-DD; each outcome has its own day.
        outcomes: by key, in the order in which they were made.
    """

    path: Path
    machine: dict[str, Any]
    versions: dict[str, str]
    date: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def begin(cls, path: Path, machine: Machine) -> Results:
        """Begin with nothing measured; nothing is written before the first outcome."""
        return cls(path=path, machine=asdict(machine), versions=versions(), date=_today())

    @classmethod
    def resume(cls, path: Path, machine: Machine, *, compiled_only: bool = False) -> Results:
        """Go on with an earlier call's results; begin where there are none.

        Args:
            path: of the JSON.
            machine: the device and its host, as they are now.
            compiled_only: whether programs are compiled and not run: then only the compiler must be the same.

        Raises:
            ValueError: the file cannot be read, or comes from another device or other versions.
        """
        new = cls.begin(path, machine)
        if not path.exists():
            return new
        try:
            old = read(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"--resume needs results that this benchmark wrote, got {path} ({type(error).__name__}); "
                "move the file away, or leave --resume out"
            ) from None
        before_versions, now_versions = old.versions, new.versions
        if compiled_only:
            before_versions, now_versions = (
                {name: found[name] for name in _COMPILERS} for found in (old.versions, new.versions)
            )
        for what, before, now in (
            ("the device", old.machine["description"], machine.description),
            ("the versions", before_versions, now_versions),
        ):
            if before != now:
                raise ValueError(
                    f"--resume joins calls on one machine, got {what} {now} after {before} in {path}; "
                    "move the file away, or leave --resume out"
                )
        return old

    def add(self, outcome: Outcome) -> None:
        """Add an outcome, in the place of an earlier one of the same case, and write the file; add to the log."""
        self.outcomes[outcome.key] = replace(outcome, date=outcome.date or _today(), printed="")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if outcome.printed:
            with self.path.with_suffix(".log").open("a", encoding="utf-8") as log:
                log.write(f"==== {outcome.key}: {outcome.status}, {outcome.reason}\n{outcome.printed}\n")
        write_whole(self.path, json.dumps(self.to_dict(), indent=1) + "\n")

    def rows(self, part: str) -> list[dict[str, Any]]:
        """Return the rows of a part's cases, each with the case's name."""
        found = [outcome for outcome in self.outcomes.values() if outcome.part == part]
        return [{"case": outcome.key, **row} for outcome in found for row in outcome.rows]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        head = {"date": self.date, "machine": self.machine, "versions": self.versions}
        return {**head, "cases": [outcome.to_dict() for outcome in self.outcomes.values()]}


def read(path: Path) -> Results:
    """Read what `Results.add` wrote."""
    values: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    outcomes = [Outcome(**case) for case in values["cases"]]
    return Results(
        path=path,
        machine=dict(values["machine"]),
        versions=dict(values["versions"]),
        date=values["date"],
        outcomes={outcome.key: outcome for outcome in outcomes},
    )


def _today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter and are there."""
    found = {"python": python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
