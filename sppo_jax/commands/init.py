"""`sppo init`: a commented config for a model and the devices present or named; asks no questions, imports no jax."""

import argparse
import sys
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from sppo_jax.commands.command import DOES_NOT_FIT, DONE, Parser, folder_settings, positive, some_path
from sppo_jax.commands.outputs import Output, check_outputs
from sppo_jax.config import config_from_dict
from sppo_jax.config.stretch import Stretch, stretch, warn_beyond_length
from sppo_jax.hardware.sizes import resized
from sppo_jax.report.plan.figures import figures_of
from sppo_jax.report.plan.words import subject, verdict
from sppo_jax.search.search import search
from sppo_jax.search.space.layouts import clusters_for, layouts, length_for
from sppo_jax.search.space.request import Request, read_request

_HEAD = "# Written by sppo init"
# The model of a config without a folder: small enough for a CPU, on text that every Python has.
_SMALL = {"vocab_size": 257, "hidden_size": 96, "num_layers": 4, "num_heads": 2, "head_dim": 16, "mlp_size": 256}
_SMALL_LENGTH = 4096
_WIDTH = 120
_STEPS, _SMALL_STEPS = 1000, 240


def run(words: Sequence[str]) -> int:
    """Writes the config; returns the exit code, which says whether a plan fits the devices."""
    args = _parser().parse_args(words)
    _check_new(args.out)
    folder = None if args.model is None else args.model.removeprefix("hf:")
    usual = folder_settings(folder)["sequence"]["length"] if folder else _SMALL_LENGTH
    length = _suited_length(folder, usual, args)
    body = _yaml(folder, length, args.cluster)
    config = config_from_dict(yaml.safe_load(body))
    needed = stretch(config)
    if needed is not None and needed.settings:
        body = _yaml(folder, length, args.cluster, needed)
        config = config_from_dict(yaml.safe_load(body))
    warn_beyond_length(config)
    found = search(config)
    figures = figures_of(found, config)
    head = [f"{_HEAD} for {subject(figures)}.", "#"]
    head += [f"#   {name:<10} {text}" for name, text in verdict(figures)]
    head += [f"#   {'plan':<10} sppo plan {args.out}", f"#   {'train':<10} sppo train {args.out} --run-dir RUN", "#"]
    head += textwrap.wrap(f"{needed.why}.", _WIDTH, initial_indent="# ", subsequent_indent="# ") if needed else []
    head += ["# Every other setting has a default (docs/config.md); the planner chooses mesh, chunks, schedule, stash."]
    args.out.write_text("\n".join([*head, body]), encoding="utf-8")
    if not args.length and length != usual:
        print(f"sequence.length is {length:,}: no mesh of {figures.cluster.name} suits the usual {usual:,} tokens")
    print(f"wrote {args.out}: {subject(figures)}; next: sppo plan {args.out}")
    if found.fits:
        return DONE
    print(found.problem, file=sys.stderr)
    return DOES_NOT_FIT


def _suited_length(folder: str | None, usual: int, args: argparse.Namespace) -> int:
    """Returns the length that is asked for, else the usual one or one near it that has a mesh.

    Raises:
        ValueError: it has no mesh; names the nearest length that has one, or clusters, as options of this command.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a config that is not written
        config = config_from_dict(yaml.safe_load(_yaml(folder, args.length or usual, args.cluster)))
    request = read_request(config)
    suited = length_for(request)
    if suited and suited == config.sequence.length or suited and not args.length:
        return suited
    try:
        layouts(request)
    except ValueError as error:
        rule = str(error).partition("; use ")[0]
        raise ValueError(f"{rule}; use {_options(request, suited)}") from None
    return config.sequence.length


def _options(request: Request, suited: int | None) -> str:
    """Returns the options with which there is a mesh: the nearest length, or else other clusters, at worst one device.

    Args:
        request: what was asked for, for which there is no mesh.
        suited: the nearest length that has one; None: none has.
    """
    if suited:
        return f"--length {suited}"
    if clusters := clusters_for(request):
        return f"--cluster {' or '.join(cluster.name for cluster in clusters)}"
    one = resized(request.cluster, 1) or request.cluster
    return f"--cluster {one.name} --length {length_for(replace(request, cluster=one))}"


def _parser() -> Parser:
    parser = Parser(
        prog="sppo init", description="Write a commented config for a model and devices, without questions."
    )
    parser.add_argument(
        "model", metavar="hf:FOLDER", nargs="?", type=_folder, help="the model to continue training from"
    )
    parser.add_argument(
        "--length",
        type=positive,
        metavar="N",
        help="tokens of a sequence; by default the model's own, or nearest to it a length that the devices divide",
    )
    parser.add_argument("--cluster", metavar="NAME:HOSTSxDEVICES", help="the devices; those of this machine by default")
    parser.add_argument("--out", type=some_path, metavar="FILE", required=True, help="the config to write, a new file")
    return parser


def _folder(text: str) -> str:
    if not text.startswith("hf:"):
        raise argparse.ArgumentTypeError(f"a model must be hf:FOLDER, got {text!r}; write hf:{text}")
    return text


def _check_new(path: Path) -> None:
    """Refuses a file that exists: a config that was edited must not be lost."""
    if path.exists():
        raise ValueError(f"--out must name a new file, got {path}, which exists; name another file")
    check_outputs(Output(option="--out", path=path, head=_HEAD), inputs=[])


def _yaml(folder: str | None, length: int, cluster: str | None, needed: Stretch | None = None) -> str:
    """Returns the settings with a comment beside each that one is likely to change."""
    if folder is None:
        model = ["model:  # a small byte-level model", *(f"  {name}: {value}" for name, value in _SMALL.items())]
        data = [
            "data:",
            "  source: stdlib  # Python's own source files; or a pattern, e.g. 'books/*.jsonl'",
        ]
    else:
        model = [f"model: {_quoted(f'hf:{folder}')}"]
        if needed is not None:
            rope = ", ".join(f"{name}: {value}" for name, value in needed.settings.items())
            model = ["model:", f"  hf: {_quoted(folder)}", f"  rope: {{{rope}}}  # see above"]
        data = [
            "data:",
            "  source: YOUR/*.jsonl  # change to your files; docs/data.md lists the formats",
        ]
    lr, steps = (1.0e-5, _STEPS) if folder else (5.0e-3, _SMALL_STEPS)
    lines = [
        *model,
        *data,
        "sequence:",
        f"  length: {length}  # tokens",
        "optimizer:",
        f"  lr: {lr:.1e}  # the highest learning rate",
        "  warmup_steps: 20",
        "train:",
        f"  steps: {steps}  # optimizer steps, one sequence each unless sequence.per_step says more",
    ]
    if cluster:
        lines += ["hardware:", f"  cluster: {_quoted(cluster)}  # remove the line to train on the devices present"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Returns a text as a YAML string."""
    return "'" + text.replace("'", "''") + "'"
