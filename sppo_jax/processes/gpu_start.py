"""What XLA and CUDA read at the start of a run on several GPUs: limits of waiting, and when kernels are loaded.

XLA ends a process in which a device waits too long for another one. Three waits of a first step are longer than XLA
expects, so that their limits follow the limit of the run itself, `train.stall_s`:

* Where devices start before the plan is known, the first step pins the host memory of each device of a process, which
  takes minutes (other runs pin before the first step, see `processes.host_pool`). Then all devices of the process meet.
  The limit is 30 s by default. The devices meet first where they join their communicators; that limit is infinite by
  default. A user who sets it to a few minutes ends the process there.
* Devices meet at the first call of each collective, 40 s at most. A loop whose count is not known holds the thread of
  its device back, so that the stages of a pipeline wait for the chunk of another one, which may take a minute.

None of these limits ends a collective whose peer has died in a later step (jax-ml/jax#38503): the watchdog does that.
One process a GPU has no such meeting: only devices of one process meet.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sppo_jax.plan.stall_limit import AUTO, stall_limit_s
from sppo_jax.version import jaxlib_version

if TYPE_CHECKING:
    from sppo_jax.plan.plan import Plan

# The field of the first option in XLA's protobuf ends in _seconds. The flag does not.
WAITING_FLAGS = (
    "--xla_gpu_executable_terminate_timeout",
    "--xla_gpu_first_collective_call_terminate_timeout_seconds",
    "--xla_gpu_nccl_termination_timeout_seconds",
)
# The versions of jaxlib that were seen to know these flags. XLA ends a process with a flag that XLA does not know.
_FIRST_KNOWN, _LAST_KNOWN = (0, 10), (0, 12)
_LOADING = "CUDA_MODULE_LOADING"
# The flag with which devices take another way between hosts, and one with which collectives deadlock.
REFUSED_FLAGS = {
    "xla_gpu_experimental_enable_nvshmem": "jax-ml/jax#31398",
    "xla_gpu_experimental_parallel_collective_overlap_limit": "openxla/xla#40656",
}
# XLA ends the process only after the watchdog, whose line says more.
_AFTER_THE_WATCHDOG_S = 300
_DAY_S = 24 * 3600


def waiting_limit_s(plan: Plan | None, given: float | str = AUTO) -> int:
    """Returns the seconds for which a device may wait for another one, more than those of the watchdog.

    Args:
        plan: the plan; None if it is not known yet: a day.
        given: `train.stall_s`; 0: a day at least.
    """
    if plan is None:
        return _DAY_S
    limit_s = max(stall_limit_s(plan), stall_limit_s(plan, given) or _DAY_S)
    return math.ceil(limit_s) + _AFTER_THE_WATCHDOG_S


def variables(plan: Plan | None) -> dict[str, str]:
    """Returns the variables with which several GPUs run a plan: CUDA loads all kernels at the start, and NCCL warns.

    CUDA loads a kernel at its first call by default. Loading may wait for the kernels that run on the device, and a
    collective among these may wait for another device: a deadlock (openxla/xla#38932). One GPU runs no collective.

    Args:
        plan: the plan; None if it is not known yet.
    """
    return {_LOADING: "EAGER", "NCCL_DEBUG": "WARN"} if _may_wait(plan) else {}


def refused_flags(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the flags among some of XLA's that must not be given with several devices.

    Args:
        words: `--NAME=VALUE` each; 1 is what XLA has by itself for the limit, false for the other.
    """
    found = []
    for word in words:
        name, _, value = word.lstrip("-").partition("=")
        if name in REFUSED_FLAGS and value.lower() not in ("false", "0", "1" if name.endswith("limit") else "false"):
            found.append(word)
    return tuple(found)


def check_flags(plan: Plan | None, words: Sequence[str]) -> None:
    """Refuses flags with which collectives of several GPUs fail or hang.

    Args:
        plan: the plan; None if it is not known yet.
        words: of XLA_FLAGS.

    Raises:
        ValueError: there is one.
    """
    for word in refused_flags(words) if _may_wait(plan) else ():
        bug = REFUSED_FLAGS[word.lstrip("-").partition("=")[0]]
        raise ValueError(
            f"XLA_FLAGS must not have a flag with which collectives of several GPUs fail or hang ({bug}), got {word}; "
            "remove the flag"
        )


def waiting_flags(plan: Plan | None, given: float | str) -> dict[str, int]:
    """Returns XLA's limits of waiting in seconds, by flag, where several GPUs may run a plan.

    Args:
        plan: the plan; None if it is not known yet.
        given: `train.stall_s`.
    """
    if not _may_wait(plan):
        return {}
    if not _FIRST_KNOWN <= jaxlib_version()[:2] <= _LAST_KNOWN:
        warnings.warn(
            f"XLA may end a process whose GPUs wait 30 s for each other; jaxlib must be 0.10 to 0.12 to get longer "
            f"limits, got {version('jaxlib')}; add {' and '.join(WAITING_FLAGS)} to XLA_FLAGS if jaxlib knows them",
            stacklevel=4,
        )
        return {}
    return dict.fromkeys(WAITING_FLAGS, waiting_limit_s(plan, given))


def _may_wait(plan: Plan | None) -> bool:
    return (plan is None or plan.mesh.num_devices > 1) and _has_gpu_plugin()


def _has_gpu_plugin() -> bool:
    """Returns whether a plugin of jax for GPUs is installed; without one no GPU can start."""
    spec = find_spec("jax_plugins")
    folders = (spec and spec.submodule_search_locations) or ()
    return any(
        path.name.startswith(("xla_cuda", "xla_rocm")) for folder in folders for path in Path(folder).glob("xla_*")
    )
