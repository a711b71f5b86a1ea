"""`sppo data`: the data of a config, before anything is trained on them; jax is not imported."""

import os
import sys
import warnings
from collections.abc import Sequence

from sppo_jax.commands.command import DONE, config_parser, load
from sppo_jax.data.open import prepare_data, write_parts
from sppo_jax.data.storage.parts import parse_part
from sppo_jax.data.summary.fill import fill_of
from sppo_jax.data.summary.summary import as_dict, drawn, summarize
from sppo_jax.files.whole import json_text
from sppo_jax.report.data.text import data_text
from sppo_jax.report.data.trained_line import known_step_s, trained_line
from sppo_jax.report.flex.line import teams_line


def run(words: Sequence[str]) -> int:
    """Prints the data of a config in numbers and samples; returns the exit code."""
    parser = config_parser("data", "Describe the data of a config: lengths, packing, epochs, samples.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--part", metavar="N/M", help="only tokenize part N of M of the files into data.cache")
    args = parser.parse_intermixed_args(words)
    config = load(args, reads="tokenizer")
    if args.part:
        lines = write_parts(config, parse_part(args.part))
        print(json_text({"parts": lines}, indent=2) if args.json else "\n".join(lines))
        return DONE
    data = prepare_data(config)
    summary = summarize(config, data) if data.sources else drawn(config, data)
    sources = [(source.weight, source.training.corpus) for source in data.sources if source.training]
    fill = fill_of(config, sources)
    if fill and (line := fill.warning(config.train.steps, known_step_s(config))):
        warnings.warn(line, stacklevel=2)
    lines = {"groups": teams_line(config, data.training), "trained": trained_line(config, summary)}
    if args.json:
        print(json_text(as_dict(summary) | lines, indent=2))
        return DONE
    encoding = sys.stdout.encoding or "utf-8"
    text = data_text(summary, colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    last = "\n".join(line for line in lines.values() if line)
    print(f"{text}\n\n{last}".encode(encoding, "backslashreplace").decode(encoding))
    return DONE
