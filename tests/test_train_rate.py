"""What a change of the run's length or of the optimizer does to the learning rate is said."""

import pytest

from sppo_jax.config import config_from_dict, to_dict
from sppo_jax.train.rate import rate_change
from sppo_jax.train.step import make_schedule


def config(steps=100, **optimizer):
    model = {"vocab_size": 24, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "mlp_size": 32}
    return config_from_dict(
        {"model": model, "sequence": {"length": 64}, "train": {"steps": steps}, "optimizer": {"lr": 1e-3, **optimizer}}
    )


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (config(200), "train.steps 100 -> 200: the learning rate of the next step is 0.00055 instead of 0.0001"),
        (config(50), "train.steps 100 -> 50: the learning rate of the next step is 0.0001 instead of 0.0001"),
        (config(100, lr=2e-3), "optimizer.lr 0.001 -> 0.002: the learning rate of the next step is 0.0002 instead"),
        (config(1000, warmup_steps=500), "train.steps 100 -> 1000, optimizer.warmup_steps 0 -> 500: "),
        (config(200, warmup_steps=150, warmup="from_zero"), "optimizer.warmup first_step -> from_zero: "),
        (
            config(200, decay="none"),
            "optimizer.decay cosine -> none: the learning rate of the next step is 0.001 instead of",
        ),
        (config(200, decay="none"), "0.0001, and is 0.001 at step 200"),
        (
            config(200, decay_steps=50, warmup_ratio=0.1),
            "optimizer.warmup_ratio None -> 0.1, optimizer.decay_steps auto",
        ),
        (config(200, min_lr_ratio=0.5), "0.00075 instead of 0.0001, and falls to 0.0005 at step 200"),
    ],
)
def test_a_change_is_said_with_both_rates(after, words):
    text = rate_change(to_dict(config()), after, 100)
    assert words in text and text.startswith("; ") and "\n" not in text
    assert f"is {float(make_schedule(after.optimizer, after.train.steps)(100)):.3g} instead of" in text


def test_nothing_is_said_where_nothing_changed_or_is_known():
    assert rate_change(to_dict(config()), config(weight_decay=0.2), 50) == ""
    assert rate_change({}, config(), 50) == "" and rate_change({"train": {"stepps": 1}}, config(), 50) == ""
