"""What a process does before it runs a plan, in the open."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sppo_jax.processes import environment

if TYPE_CHECKING:
    from sppo_jax.plan.plan import Plan


def prepare_process(plan: Plan, *, stall_s: float | str = "auto", trains: bool = True) -> dict[str, str]:
    """Prepares this process to run a plan on GPUs; other devices need no preparation.

    Limits of memory (XLA's share of a GPU, its pool of pinned host memory) and of waiting go into the environment. XLA
    reads them when its backend starts, so call it before jax's first computation, and of several processes in all of
    them. Where the plan trains with memory of the host, the backend starts and the pools of pinned memory are filled,
    which may pin hundreds of GiB. What the user has set stays. A second call changes nothing, nor does any call behind
    the start of the backend. `import sppo_jax` itself sets one flag, with which jaxlib adds rightly on CPUs.

    Args:
        plan: the plan that the process will run.
        stall_s: `train.stall_s` of the config; how long devices may wait for each other follows from it.
        trains: whether steps will train; an evaluation keeps little on the host, and fills no pools.

    Returns:
        The variables of the environment that the call has set, by name.

    Raises:
        ValueError: the system does not let so much memory be pinned.
    """
    before = dict(os.environ)
    environment.skip_cuda_without_driver()
    environment.set_waiting_limits(plan, stall_s)
    if environment.set_limits(plan) and trains:
        from sppo_jax.processes.host_pool import fill_pools_of_mesh  # imports jax

        fill_pools_of_mesh(plan)
    return {name: value for name, value in os.environ.items() if before.get(name) != value}
