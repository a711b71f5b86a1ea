"""`sppo flex`: the gain of a team of devices for each document; touches no accelerator, does not import jax."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from sppo_jax.commands.command import DONE, Parser, config_parser, load, simulate, some_path
from sppo_jax.commands.outputs import FLEX, Output, check_outputs, files_read
from sppo_jax.config import Config
from sppo_jax.data.open import prepare_data
from sppo_jax.data.rows.flex import window_pieces
from sppo_jax.data.rows.lengths import rows_of_corpus, rows_of_lengths
from sppo_jax.data.rows.protocol import Rows
from sppo_jax.files.whole import json_text
from sppo_jax.flex.flexsp.costs import MODELS
from sppo_jax.flex.lengths import corpora, read_lengths
from sppo_jax.plan.plan import Plan
from sppo_jax.report.flex.figures import figures_of_teams
from sppo_jax.report.flex.flexsp import flexsp_dict, flexsp_figures, flexsp_text
from sppo_jax.report.flex.json_report import flex_dict
from sppo_jax.report.flex.text import flex_text
from sppo_jax.search.make import make_plan

_WINDOWS, _MOST_WINDOWS = 4, 256
# Rows are packed from this many times the documents that are shown, as the rows of a large corpus would be.
_SURPLUS = 2
_STDOUT = Path("-")


def run(words: Sequence[str]) -> int:
    """Prints the gain of teams for the documents of a config, or for other lengths; returns the exit code."""
    args = _parser().parse_intermixed_args(words)
    _check(args)
    config = load(args, reads="tokenizer")
    simulate(config)
    to_file = args.json if args.json != _STDOUT else None
    inputs = [Path(args.config), args.lengths, *files_read(config)]
    check_outputs(Output(option="--json", path=to_file, head=FLEX), inputs=inputs)
    plan = make_plan(config)
    source, rows = _rows(args, config, plan)
    windows = [window_pieces(rows, number, plan.num_sequences) for number in range(args.windows)]
    figures = figures_of_teams(config, plan, windows, source)
    own = flexsp_figures(args.flexsp, plan.mesh.num_devices, windows) if args.flexsp else None
    if args.json is not None:
        text = json_text(flex_dict(figures) | ({"flexsp": flexsp_dict(own)} if own else {}), indent=2)
        if args.json == _STDOUT:
            print(text)
            return DONE
        args.json.write_text(text + "\n", encoding="utf-8")
    print(flex_text(figures))
    if own:
        print(f"\n{flexsp_text(own)}")
    return DONE


def _parser() -> Parser:
    parser = config_parser("flex", "Simulate the gain of a team of devices for each document.")
    parser.add_argument("--cluster", metavar="NAME:HOSTSxDEVICES", help="the devices to plan for, e.g. a100-80g:16x8")
    parser.add_argument(
        "--windows", type=int, default=_WINDOWS, metavar="N", help=f"steps to simulate; {_WINDOWS} by default"
    )
    documents = parser.add_mutually_exclusive_group()
    documents.add_argument("--lengths", type=some_path, metavar="FILE", help="document lengths, one per line, or .npy")
    documents.add_argument("--corpus", choices=sorted(corpora()), help="document lengths of a corpus")
    parser.add_argument(
        "--flexsp", choices=list(MODELS), metavar="MODEL", help=f"also show FlexSP's own plan: {', '.join(MODELS)}"
    )
    parser.add_argument(
        "--json", type=_json_path, nargs="?", const=_STDOUT, metavar="FILE", help="print JSON, or also write it to FILE"
    )
    return parser


def _json_path(text: str) -> Path:
    if "=" in text:
        raise ArgumentTypeError(f"a file or nothing must follow --json, got the setting {text}; put --json last")
    return some_path(text)


def _check(args: Namespace) -> None:
    """Checks the options before anything is planned.

    Raises:
        ValueError: an option is out of range, or does not go with the others.
    """
    if not 1 <= args.windows <= _MOST_WINDOWS:
        raise ValueError(f"--windows must be in 1..{_MOST_WINDOWS}, got {args.windows}; change the number")


def _rows(args: Namespace, config: Config, plan: Plan) -> tuple[str, Rows]:
    """Returns where the documents come from, in words, and the sequences that hold the documents.

    Raises:
        ValueError: the lengths or the data cannot be read.
    """
    if args.lengths is None and args.corpus is None:
        return f"data.source={_source(config)}", _data_rows(config)
    data = config.data
    length, pack, seed, fill = config.sequence.length, data.pack, data.seed, data.fill
    if args.corpus is not None:
        quantiles, tokens = corpora()[args.corpus], _SURPLUS * args.windows * plan.num_sequences * length
        rows = rows_of_corpus(quantiles, tokens=tokens, length=length, pack=pack, seed=seed, fill=fill)
        return f"corpus {args.corpus}", rows
    try:
        lengths = read_lengths(args.lengths)
    except OSError as error:
        raise ValueError(
            f"--lengths must be a readable file, got {args.lengths} ({error.strerror}); name another file"
        ) from error
    return f"lengths of {args.lengths}", rows_of_lengths(lengths, length=length, pack=pack, seed=seed, fill=fill)


def _data_rows(config: Config) -> Rows:
    try:
        return prepare_data(config).training
    except ValueError as error:
        raise ValueError(f"{error}, or give document lengths with --lengths or --corpus") from error


def _source(config: Config) -> str:
    return ", ".join(config.data.sources)
