"""Trains decoder LLMs on sequences that do not fit on one device."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sppo_jax.processes.environment import avoid_wrong_sums as _avoid_wrong_sums
from sppo_jax.version import __version__ as __version__

if TYPE_CHECKING:  # a type checker reads these lines; a program imports a name when it first uses it
    from sppo_jax.attention.mixer import Attention
    from sppo_jax.config import load_config
    from sppo_jax.mixers.mixer import Operands
    from sppo_jax.models.build import build_model
    from sppo_jax.pipeline.api import evaluate, value_and_grad
    from sppo_jax.pipeline.params.layout import make_mesh
    from sppo_jax.pipeline.params.storage import param_shardings, stored_shapes
    from sppo_jax.plan.plan import Plan
    from sppo_jax.processes.prepare import prepare_process
    from sppo_jax.search.make import make_plan
    from sppo_jax.train.step import make_train_step
    from sppo_jax.train.token_loss import token_loss

_HOMES = {
    "load_config": "sppo_jax.config",
    "make_plan": "sppo_jax.search.make",
    "Plan": "sppo_jax.plan.plan",
    "build_model": "sppo_jax.models.build",
    "value_and_grad": "sppo_jax.pipeline.api",
    "evaluate": "sppo_jax.pipeline.api",
    "token_loss": "sppo_jax.train.token_loss",
    "prepare_process": "sppo_jax.processes.prepare",
    "make_mesh": "sppo_jax.pipeline.params.layout",
    "stored_shapes": "sppo_jax.pipeline.params.storage",
    "param_shardings": "sppo_jax.pipeline.params.storage",
    "make_train_step": "sppo_jax.train.step",
    "Attention": "sppo_jax.attention.mixer",
    "Operands": "sppo_jax.mixers.mixer",
}
__all__ = [
    "Attention",
    "Operands",
    "Plan",
    "build_model",
    "evaluate",
    "load_config",
    "make_mesh",
    "make_plan",
    "make_train_step",
    "param_shardings",
    "prepare_process",
    "stored_shapes",
    "token_loss",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that the planner never imports jax."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


# The one change that importing makes: a flag in XLA_FLAGS.
_avoid_wrong_sums()
