"""Writes what README and docs print: `sppo plan`, `--help`, small schedules and their pictures.

    python -m bench.readme     write all blocks and pictures; a few seconds

Nothing is compiled or run.
"""

import io
import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from textwrap import fill
from unittest.mock import patch

from bench.blocks import write_block
from bench.row_keys import field_table, key_table
from sppo_jax.cli import COMMANDS, main
from sppo_jax.config import load_config
from sppo_jax.config.hf.families import FAMILIES
from sppo_jax.config.presets import PRESETS
from sppo_jax.predict.seconds.simulate import simulate
from sppo_jax.report.draw.timeline import timeline_svg
from sppo_jax.report.plan.evaluation_text import evaluation_text
from sppo_jax.report.plan.figures import figures_of
from sppo_jax.report.plan.text import brief_text
from sppo_jax.schedule.generators import make_table
from sppo_jax.schedule.table import Table, TickShape, Unit
from sppo_jax.search.evaluation import for_evaluation, plan_evaluation
from sppo_jax.search.make import resolve_cluster
from sppo_jax.search.search import search

ROOT = Path(__file__).parents[1]
# Lines of the answer: what is planned for, the verdict, and what the verdict says.
_ANSWER = 6
# A small model of what a chunk takes: the attention of a whole sequence costs this many times its other layers.
_ATTENTION, _BACKWARD, _HEAD = 8.0, 2.0, 0.02
_LENGTH = 4096
_WIDTH = 900
_HELP_WIDTH = 100
_WRAP = 120


@dataclass(frozen=True)
class Printed:
    """A command `sppo plan` on a page, and the first lines that it prints.

    Args:
        page: the page, from the root of the repository.
        config: the config, from the root of the repository.
        overrides: the words after the config, settings and options.
        cluster: the devices; "": those of the config.
        lines: how many lines are shown; 0: all of them.
    """

    page: str
    config: str
    overrides: tuple[str, ...] = ()
    cluster: str = ""
    lines: int = _ANSWER

    @property
    def command(self) -> str:
        """The words that a user types."""
        cluster = ("--cluster", self.cluster) if self.cluster else ()
        return " ".join(("sppo", "plan", self.config, *self.overrides, *cluster))

    def text(self) -> str:
        """Returns the block: the command, and what it prints."""
        lines = _plan_lines(self.config, self.overrides, self.cluster)
        shown = lines[: self.lines or None]
        return "\n".join(["```", f"$ {self.command}", *shown, *(["..."] if len(shown) < len(lines) else []), "```"])


_EIGHT = "configs/llama3-8b-128k-8gpu.yaml"
PRINTED = (
    Printed(page="README.md", config=_EIGHT, cluster="h100:1x8"),
    Printed(page="docs/start/one-gpu.md", config="configs/llama3-8b-1gpu-80g.yaml"),
    Printed(page="docs/start/eight-gpus.md", config=_EIGHT, cluster="h100:1x8"),
    Printed(page="docs/start/tpu-pod.md", config="configs/llama3-8b-1m-v5p-64.yaml"),
    Printed(page="docs/start/many-hosts.md", config="configs/llama3-70b-32gpu.yaml"),
    Printed(page="docs/plan.md", config=_EIGHT, cluster="h100:1x8", lines=0),
)


@cache
def _plan_lines(config: str, overrides: tuple[str, ...], cluster: str) -> list[str]:
    settings = [*overrides, *([f"hardware.cluster={cluster}"] if cluster else [])]
    loaded = load_config(ROOT / config, settings)
    return brief_text(figures_of(search(loaded), loaded)).splitlines()


# The evaluation that docs/plan.md plans: config, tokens of a row, devices.
_EVALUATION = "configs/qwen3-8b-1m-8gpu.yaml", 262144, "h100:1x2"


def evaluation_block() -> str:
    """Returns the plan of an evaluation: the command, and what it prints."""
    config, length, cluster = _EVALUATION
    loaded = for_evaluation(load_config(ROOT / config, [f"sequence.length={length}", f"hardware.cluster={cluster}"]))
    devices = resolve_cluster(loaded)
    found = plan_evaluation(loaded, devices, loaded.train.eval_sequences)
    command = f"$ sppo plan {config} --eval --length {length} --cluster {cluster}"
    return "\n".join(["```", command, evaluation_text(found, loaded.model, devices), "```"])


def _costs(table: Table) -> Callable[[Unit, TickShape], float]:
    """Returns the seconds of a unit of the small model: linear in its tokens, attention by its (query, key) pairs."""
    lengths, stages = table.chunk_lengths, table.num_stages * table.num_groups
    starts = list(accumulate(lengths, initial=0))

    def seconds(unit: Unit, shape: TickShape) -> float:
        length = lengths[unit.chunk]
        share = length / sum(lengths)
        if unit.op == "H":
            return _HEAD * share
        pairs = length * (starts[unit.chunk] + length / 2) / (sum(lengths) ** 2 / 2)
        forward = (share + _ATTENTION * pairs) / (1 + _ATTENTION) / stages
        return forward * (_BACKWARD if unit.op == "B" else 1)

    return seconds


# The schedules of docs/learn/: a label, the schedule, its stages and the chunk lengths, and groups of layers a stage.
_EQUAL = tuple([_LENGTH // 8] * 8)
_FOUR = (1536, 1024, 832, 704)
_FALLING = (1024, 704, 544, 448, 384, 352, 320, 320)
SCHEDULES: dict[str, tuple[str, str, int, Sequence[int], int]] = {
    "whole": ("one sequence, not cut, through 4 stages", "gpipe", 4, (_LENGTH,), 1),
    "chunks": ("the same sequence in 8 equal chunks", "sppo", 4, _EQUAL, 1),
    "cost": ("in 8 chunks that take about equally long", "sppo", 4, _FALLING, 1),
    "breadth": ("breadth-first: 4 chunks, 3 groups of layers, one stage", "breadth-first", 1, _FOUR, 3),
}


def _table(name: str) -> Table:
    _, schedule, stages, lengths, groups = SCHEDULES[name]
    return make_table(schedule, stages, 1, lengths, groups)


# The pictures of docs/learn/, by their path from the root of the repository.
PICTURES = {f"docs/learn/{name}.svg": name for name in SCHEDULES}


def picture(path: str) -> str:
    """Returns a picture of docs/learn/ as SVG."""
    table = _table(PICTURES[path])
    return timeline_svg(table, _costs(table), width=_WIDTH, title=SCHEDULES[PICTURES[path]][0])


def streams() -> str:
    """Returns the table of docs/learn/why-chunks-stream.md: how long the same work takes in each schedule."""
    lines = ["| schedule | step | share in which stages wait |", "|---|---|---|"]
    for name in ("whole", "chunks", "cost"):
        table = _table(name)
        result = simulate(table, _costs(table))
        lines.append(f"| {SCHEDULES[name][0]} | {sum(result.tick_s):.2f} s | {result.bubble_fraction:.0%} |")
    return "\n".join(lines)


def help_texts() -> str:
    """Returns what `--help` prints of each command, for docs/cli.md."""
    sections = []
    for command in COMMANDS:
        printed = io.StringIO()
        with patch.dict(os.environ, COLUMNS=str(_HELP_WIDTH)), redirect_stdout(printed), suppress(SystemExit):
            main([command, "--help"])
        sections.append(f"### sppo {command}\n\n```\n{printed.getvalue().strip()}\n```")
    return "\n\n".join(sections)


def models() -> str:
    """Returns the line of README.md on the models that are read and known by name."""
    families = ", ".join(dict.fromkeys(family.models for family in FAMILIES.values()))
    text = f"* Hugging Face folders of {families}, dense or with experts; {len(PRESETS)} shapes by name."
    return fill(text, _WRAP, subsequent_indent="  ")


# All blocks by page and name, and what makes them.
BLOCKS: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "models"): models,
    **{(printed.page, "plan"): printed.text for printed in PRINTED},
    ("docs/plan.md", "plan-eval"): evaluation_block,
    ("docs/learn/why-chunks-stream.md", "streams"): streams,
    ("docs/cli.md", "help"): help_texts,
    ("docs/sft.md", "keys"): key_table,
    ("docs/sft.md", "fields"): field_table,
}


if __name__ == "__main__":
    for (page, name), make in BLOCKS.items():
        write_block(ROOT / page, name, make())
        print(f"{page}: {name} written")
    for path in PICTURES:
        (ROOT / path).write_text(picture(path), encoding="ascii")
        print(f"{path}: written")
