"""Figures of small plans for the tests of reports."""

from functools import lru_cache

from sppo_jax.config import Config, config_from_dict
from sppo_jax.report.plan.figures import Figures, figures_of
from sppo_jax.search.search import search

MODEL = {"vocab_size": 1024, "hidden_size": 512, "num_layers": 16, "num_heads": 8, "mlp_size": 2048}
HOST = {"inputs": "host", "attention": "host"}


def gpus(count: int) -> str:
    """Returns the fewest equal hosts of H100 that have so many devices."""
    each = max(size for size in range(1, 9) if count % size == 0)
    return f"h100:{count // each}x{each}"


def small_config(cluster: str = "h100:1x4", **groups: dict) -> Config:
    """Returns a config of a small model on four stages, not interleaved."""
    settings = {
        "model": MODEL,
        "mesh": {"pipe": 4},
        "schedule": {"interleave": 1},
        "sequence": {"length": 65536, "chunks": 8, "balance": "equal"},
        "stash": HOST,
        "train": {"steps": 1},
        "hardware": {"cluster": cluster},
    }
    if isinstance(groups.get("sequence", {}).get("chunks"), list):
        del settings["sequence"]["balance"]  # lengths that are given have no balance
    return config_from_dict({name: settings.get(name, {}) | groups.get(name, {}) for name in {**settings, **groups}})


def small_figures(cluster: str = "h100:1x4", **groups: dict) -> Figures:
    """Returns the figures of the plan of a small config."""
    return _figures(small_config(cluster, **groups))


@lru_cache(maxsize=32)
def _figures(config: Config) -> Figures:
    found = search(config)
    return figures_of(found, config)


def too_large() -> Figures:
    """Returns the figures of a plan that does not fit."""
    return small_figures(hardware={"hbm_bytes": 2**26})
