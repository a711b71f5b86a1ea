"""`sppo configs`: the configs that come with the package, a line each."""

from collections.abc import Sequence

from sppo_jax.commands.command import DONE, Parser
from sppo_jax.commands.shipped import shipped_configs, summary


def run(words: Sequence[str]) -> int:
    """Prints the name of each shipped config and what it is; returns the exit code."""
    Parser(
        prog="sppo configs",
        description="List the configs that come with sppo_jax. Every command takes one by the name of its file.",
    ).parse_args(words)
    configs = shipped_configs()
    width = max(map(len, configs), default=0)
    print("\n".join(f"{name:{width}}  {summary(path)}" for name, path in configs.items()))
    return DONE
