"""`sppo data`: the data of a config, before anything is trained on them; jax is not imported."""

import json
import sys
from collections.abc import Sequence

from sppo_jax.commands.command import DONE, config_parser
from sppo_jax.config import load_config
from sppo_jax.data.open import open_data
from sppo_jax.data.summary import as_dict, drawn, summarize
from sppo_jax.report.flex.line import groups_line
from sppo_jax.report.run.data_text import data_text


def run(words: Sequence[str]) -> int:
    """Prints the data of a config in numbers and samples; returns the exit code."""
    parser = config_parser("data", "Describe the data of a config: lengths, packing, epochs, samples.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    args = parser.parse_intermixed_args(words)
    config = load_config(args.config, args.overrides)
    data = open_data(config)
    summary = summarize(config, data) if data.sources else drawn(config, data)
    groups = groups_line(config, data.training)
    if args.json:
        print(json.dumps(as_dict(summary) | {"groups": groups}, indent=2))
        return DONE
    encoding = sys.stdout.encoding or "utf-8"
    print(f"{data_text(summary)}\n\n{groups}".encode(encoding, "backslashreplace").decode(encoding))
    return DONE
