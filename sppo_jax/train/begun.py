"""What a run keeps of its own config.yaml where the config that continues it leaves this open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sppo_jax.config import Config, load_config

# Earlier imports took a folder's coefficient although the folder does not switch the loss on.
BALANCE = "model.experts.balance"


def as_begun(config: Config, run_dir: Path) -> Config:
    """Returns a config that does not give `BALANCE`, with that of the run in a directory if both models are imported.

    Args:
        config: with which the run goes on.
        run_dir: the directory of the run, which need not be there.

    Raises:
        ValueError: the run's config.yaml cannot be read.
    """
    path = run_dir / "config.yaml"
    if config.model.hf is None or not config.model.experts.count or not path.exists():
        return config
    begun = load_config(path).model
    return config if begun.hf is None else with_balance(config, begun.experts.balance)


def with_balance(config: Config, balance: float) -> Config:
    """Returns a config with another coefficient of the loss that balances experts."""
    experts = replace(config.model.experts, balance=balance)
    return replace(config, model=replace(config.model, experts=experts))
