"""Twelve drawn validations in float64: how many sequences are held out, how many are wanted, and the mesh."""

import random
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from exactness import quick_jit, random_batch, small_model, small_plan
from flax import nnx

from sppo_jax.evaluation.validate import validate
from sppo_jax.pipeline.api import evaluate
from sppo_jax.pipeline.params.layout import make_mesh
from sppo_jax.pipeline.params.storage import param_shardings

MOST = 9
# Mesh and sequences of a pipeline; those of two processes span both.
ALONE = (((1, 1, 1), 2), ((2, 1, 1), 1), ((3, 1, 1), 2))
SHARED = (((2, 1, 1), 2), ((1, 2, 1), 2))


@dataclass(frozen=True)
class Case:
    held_out: int
    wanted: int
    mesh: tuple[int, int, int]
    sequences: int


def cases():
    """Returns ten cases of one process, and two of two processes."""
    draw = random.Random(62)
    shapes = [*(ALONE[number % len(ALONE)] for number in range(10)), *SHARED]
    return [Case(draw.randint(1, MOST), draw.randint(1, 20), *shape) for shape in shapes]


class HeldOut:
    """The first of nine sequences of packed documents, with padding, again and again."""

    def __init__(self, size):
        self.size, self.pool = size, random_batch(np.random.default_rng(5), MOST, 24, 20, padding=2)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {name: values[index % self.size] for name, values in self.pool.items()}


@lru_cache(maxsize=1)
def model():
    return small_model(vocab_size=20, num_layers=2)


@lru_cache(maxsize=8)
def program(mesh, sequences):
    """Returns plan, mesh, compiled scores and parameters, shared by the cases of one mesh."""
    plan = small_plan((12, 12), mesh=mesh, sequences=sequences)
    devices, params = make_mesh(plan), nnx.state(model(), nnx.Param)
    placed = jax.tree.map(
        lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x)[index]),
        params,
        param_shardings(plan, params, devices),
    )
    return plan, devices, quick_jit(evaluate(plan, model(), devices)), placed


def measured(case):
    """Returns the validation of a case."""
    plan, mesh, scores, params = program(case.mesh, case.sequences)
    return validate(scores, params, HeldOut(case.held_out), plan, mesh, num_wanted=case.wanted)


@lru_cache(maxsize=1)
def dense_losses():
    """Returns the dense model's loss of each token of the nine sequences, and which tokens have a target."""
    batch = HeldOut(MOST).pool
    arrays = {name: jnp.asarray(batch[name]) for name in ("tokens", "positions", "document_ids")}
    logits = quick_jit(lambda b: model()(b["tokens"], b["positions"], b["document_ids"]))(arrays)
    log_p, targets = np.asarray(jax.nn.log_softmax(logits)), batch["targets"]
    return -np.take_along_axis(log_p, np.maximum(targets, 0)[..., None], -1)[..., 0], targets >= 0


def exact(case):
    """Returns the mean over the targets of the first sequences, and the number of targets."""
    losses, wanted = (each[: min(case.held_out, case.wanted)] for each in dense_losses())
    return losses[wanted].mean(), int(wanted.sum())
