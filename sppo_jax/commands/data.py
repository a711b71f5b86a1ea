"""`sppo data`: what a config's data are, before anything is trained on them; jax is not imported."""

import dataclasses
import json
import sys
from collections.abc import Sequence

from sppo_jax.commands.command import DONE, config_parser
from sppo_jax.config import load_config
from sppo_jax.data.open import open_data
from sppo_jax.data.summary import summarize
from sppo_jax.report.data_text import data_text


def run(words: Sequence[str]) -> int:
    """Prints the data of a config in numbers and samples; returns the exit code."""
    parser = config_parser("data", "Say what a config's data are: lengths, packing, epochs, samples.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    args = parser.parse_intermixed_args(words)
    config = load_config(args.config, args.overrides)
    data = open_data(config)
    if not data.sources:
        raise ValueError(
            f"sppo data needs documents, got data.source={config.data.source}, drawn at random; train on it"
        )
    summary = summarize(config, data)
    if args.json:
        steps = {"epoch_steps": summary.epoch_steps, "run_epochs": summary.run_epochs}
        print(json.dumps({**dataclasses.asdict(summary), **steps}, indent=2))
        return DONE
    encoding = sys.stdout.encoding or "utf-8"
    print(data_text(summary).encode(encoding, "backslashreplace").decode(encoding))
    return DONE
