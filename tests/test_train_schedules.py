"""Learning rates by step against transformers' schedules, and settings of AdamW against optax by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sppo_jax.config import OptimizerConfig, config_from_dict
from sppo_jax.report.run.card import _rate
from sppo_jax.train.step import make_optimizer, make_schedule

pytestmark = pytest.mark.xdist_group("models_hf")  # torch is imported once
LR = 3e-4
# Steps, warm-up, steps of the decay (None: all that are left).
SPANS = [(1, 0, None), (1, 1, None), (12, 0, None), (12, 1, None), (12, 5, None), (12, 12, None), (40, 7, 9), (9, 3, 6)]
SPANS += [(40, 0, 40), (2, 1, 1), (200, 20, 1)]


def rates(num_steps, warmup_steps, decay_steps, **settings):
    config = OptimizerConfig(lr=LR, warmup_steps=warmup_steps, decay_steps=decay_steps or "auto", **settings)
    schedule = make_schedule(config, num_steps)
    return np.array([float(schedule(step)) for step in range(num_steps)]) / LR


def of_transformers(name, num_steps, **settings):
    """Returns the factors of one of transformers' schedules at every step."""
    torch, optimization = pytest.importorskip("torch"), pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = getattr(optimization, name)(optimizer, **settings)
    found = []
    for _ in range(num_steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return np.array(found)


@pytest.mark.parametrize(("num_steps", "warmup", "decay_steps"), SPANS)
@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_decays_are_those_of_transformers(x64, decay, num_steps, warmup, decay_steps):
    """Its warm-up-stable-decay has all of them: the stable part may have no step."""
    length = num_steps - warmup if decay_steps is None else decay_steps
    theirs = dict(num_warmup_steps=warmup, num_decay_steps=length, num_training_steps=num_steps, decay_type=decay)
    want = of_transformers("get_wsd_schedule", num_steps, **theirs)
    got = rates(num_steps, warmup, decay_steps, decay=decay, warmup="from_zero", min_lr_ratio=0)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-7)
    first = rates(num_steps, warmup, decay_steps, decay=decay, min_lr_ratio=0)
    np.testing.assert_allclose(first[warmup:], want[warmup:], rtol=0, atol=1e-7)
    np.testing.assert_allclose(first[:warmup], (1 + np.arange(warmup)) / max(warmup, 1), atol=1e-7)


@pytest.mark.parametrize(("num_steps", "warmup"), [span[:2] for span in SPANS[:6]])
def test_a_minimum_and_a_constant_rate_are_those_of_transformers(x64, num_steps, warmup):
    spans = dict(num_warmup_steps=warmup)
    name, settings = "get_cosine_with_min_lr_schedule_with_warmup", dict(num_training_steps=num_steps, min_lr_rate=0.1)
    want = of_transformers(name, num_steps, **spans, **settings)
    got = rates(num_steps, warmup, None, warmup="from_zero", min_lr_ratio=0.1)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-7)
    want = of_transformers("get_linear_schedule_with_warmup", num_steps, **spans, num_training_steps=num_steps)
    got = rates(num_steps, warmup, None, decay="linear", warmup="from_zero", min_lr_ratio=0)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-7)
    want = of_transformers("get_constant_schedule_with_warmup", num_steps, **spans)
    got = rates(num_steps, warmup, None, decay="none", warmup="from_zero")
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-7)


def test_a_share_of_the_steps_warms_up_and_is_rounded_up():
    counts = {n: OptimizerConfig(warmup_ratio=0.1).num_warmup_steps(n) for n in (1, 10, 11, 1978)}
    assert counts == {1: 1, 10: 1, 11: 2, 1978: 198}
    assert OptimizerConfig(warmup_ratio=0.0).num_warmup_steps(7) == 0


def params(tied):
    rng = np.random.default_rng(0)

    def param(*shape):
        return nnx.Param(jnp.asarray(rng.normal(size=shape), jnp.float32))

    tables = {"embedding": param(5, 3), **({} if tied else {"head": param(5, 3)})}
    return nnx.State({**tables, "final_norm": {"scale": param(3)}, "layers": {"up": param(2, 3, 4)}})


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_embeddings_may_not_decay_and_gradients_may_not_be_clipped(tied, clip_norm):
    config = OptimizerConfig(lr=0.1, weight_decay=0.3, decay_embeddings=False, clip_norm=clip_norm)
    schedule, given = make_schedule(config, 10), params(tied)
    mask = {"embedding": False, "final_norm": {"scale": False}, "layers": {"up": True}} | (
        {} if tied else {"head": True}
    )
    theirs = optax.adamw(schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=0.3, mask=mask)
    theirs = theirs if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), theirs)
    grads, plain = jax.tree.map(lambda x: 3 * jnp.ones_like(x), given), nnx.to_pure_dict(given)
    optimizer = make_optimizer(config, schedule, given)
    assert nnx.to_pure_dict(optimizer.decays) == mask and optimizer.rule.clip_norm == clip_norm
    with jax.numpy_dtype_promotion("standard"):
        got, state = optimizer.update(grads, optimizer.init(given), given)
        want, _ = theirs.update(nnx.to_pure_dict(grads), theirs.init(plain), plain)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(got), want)
    clipped = make_optimizer(OptimizerConfig(), schedule, given).init(given)
    assert jax.tree.structure(state) == jax.tree.structure(clipped)  # so a run may change the setting


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warmup_steps": 5}, "0.0003, 5 warm-up steps, cosine to 0.1 of it"),
        (
            {"warmup_ratio": 0.1, "warmup": "from_zero", "decay": "none"},
            "0.0003, 10 warm-up steps from 0, then constant",
        ),
        (
            {"decay": "linear", "decay_steps": 20, "min_lr_ratio": 0},
            "0.0003, 0 warm-up steps, linear to 0 of it over the last 20 steps",
        ),
    ],
)
def test_the_card_says_the_rate(settings, words):
    assert _rate(OptimizerConfig(**settings), 100) == words


def test_a_decay_must_fit_behind_the_warm_up():
    model = {"vocab_size": 24, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "mlp_size": 32}
    given = {"model": model, "sequence": {"length": 64}, "train": {"steps": 100}}
    config_from_dict(given | {"optimizer": {"warmup_ratio": 0.25, "decay_steps": 75}})
    with pytest.raises(
        ValueError, match="decay_steps must be at most train.steps less the warm-up = 75, got 76; lower"
    ):
        config_from_dict(given | {"optimizer": {"warmup_ratio": 0.25, "decay_steps": 76}})
