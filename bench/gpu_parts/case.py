"""One case of the benchmark of GPUs or of TPUs: what runs, what it needs, and what came of it. No jax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

# A case hands over one row of results at a time, so that a crash loses no earlier row.
Emit = Callable[[dict[str, Any]], None]
# "not run": what time did not allow, also where the case had begun.
DONE, FAILED, SKIPPED, NOT_RUN = "done", "failed", "skipped", "not run"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process of the benchmark.

    Args:
        part: the module that runs the case.
        name: unique within the part.
        settings: what the module's `run` and `programs` take; JSON values only.
        expected_s: seconds the case takes on an H100, compiling included; it is not begun with less time left.
        limit_s: seconds after which the process is killed.
        packages: packages that the case imports beyond those of the project.
        hbm_gib: device memory that the case needs at least.
        host_gib: host memory that the case needs at least.
        flags: what the process adds to XLA_FLAGS.
        devices: devices that the case needs; a CPU simulates them.
        folder: of `bench`, which has the module.
    """

    part: str
    name: str
    settings: dict[str, Any]
    expected_s: float
    limit_s: float
    packages: tuple[str, ...] = ()
    hbm_gib: float = 0.0
    host_gib: float = 0.0
    flags: str = ""
    devices: int = 1
    folder: str = "gpu_parts"

    @property
    def key(self) -> str:
        """The name in results and on the command line."""
        return f"{self.part}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a case.

    Args:
        key: of the case.
        status: "done", "failed", "skipped" or "not run".
        reason: why it failed, was skipped or was not run, in one line.
        wall_s: seconds of the whole process.
        rows: what it emitted, also where it failed later.
        settings: of the case.
        date: day on which it was made, YYYY-MM-DD; empty in results older than this field.
        clocks: what nvidia-smi says of the GPU before the case and behind it: clock, power, heat, and what slows it.
        printed: the end of what its process printed, where it failed; not in the JSON.
    """

    key: str
    status: str
    reason: str = ""
    wall_s: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    date: str = ""
    clocks: list[dict[str, Any]] = field(default_factory=list)
    printed: str = ""

    @property
    def part(self) -> str:
        """The part that the case belongs to."""
        return self.key.partition("/")[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return {name: value for name, value in asdict(self).items() if name != "printed"}
