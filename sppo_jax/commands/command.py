"""What the commands share: exit codes, the parser, reading a config and reading a plan."""

import argparse
import difflib
import re
import sys
import warnings
from pathlib import Path
from typing import Any, Literal, NoReturn

from sppo_jax.commands.shipped import find_config
from sppo_jax.config import Config, config_from_dict, load_config
from sppo_jax.config.hf.families import model_folder, read_num_positions
from sppo_jax.config.hf.hub import fetch
from sppo_jax.config.inert import inert_settings
from sppo_jax.config.load import to_dict
from sppo_jax.config.stretch import warn_beyond_length
from sppo_jax.files.paths import local_path
from sppo_jax.plan.plan import Plan
from sppo_jax.processes.distributed import local_devices
from sppo_jax.processes.environment import simulate_devices
from sppo_jax.search.evaluation import for_evaluation
from sppo_jax.search.given import contradicted
from sppo_jax.search.make import check_plan

_UNITS = {"K": 1024, "M": 1024**2}
_HF = "hf:"
# Sections of which an evaluation has nothing.
_OF_TRAINING = ("schedule", "stash", "optimizer", "planner")
DONE, FAILED, WRONG_INPUT, DOES_NOT_FIT = 0, 1, 2, 3


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line like any other wrong input: one line, no usage text."""

    def error(self, message: str) -> NoReturn:
        words = message.split()
        unknown = next((word for word in words if word.startswith("--")), "") if words[0] == "unrecognized" else ""
        near = difflib.get_close_matches(unknown, self._option_string_actions, n=1, cutoff=0.0) if unknown else []
        change = "".join(f"; the nearest option is {name}" for name in near)
        raise ValueError(f"{self.prog}: {message}{change}; see {self.prog} --help")

    def print_help(self, file: Any = None) -> None:
        """Prints like a command; argparse would ignore an output that fails."""
        print(self.format_help(), end="", file=file)


def some_path(text: str) -> Path:
    """Reads an option that is a path; refuses an empty one, which would be the working directory."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"a path must be given, got {text!r}")
    try:
        return local_path(text, "the path")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def num_simulated_devices(text: str) -> int:
    """Returns how many devices `--devices` asks to simulate; 0: use the devices present.

    Raises:
        ValueError: the text is neither "auto" nor "cpu:N".
    """
    if text == "auto":
        return 0
    found = re.fullmatch(r"cpu:([1-9]\d*)", text)
    if not found:
        raise ValueError(f"--devices must be auto or cpu:N with N at least 1, got {text!r}; write e.g. cpu:4")
    return int(found[1])


def positive(text: str) -> int:
    """Reads an option that is a whole number of at least 1; 128K and 1M are read as 131,072 and 1,048,576."""
    digits, size = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    if not (digits.isascii() and digits.isdecimal() and int(digits)):
        raise argparse.ArgumentTypeError(f"a whole number from 1 must be given, e.g. 131072 or 128K, got {text!r}")
    return int(digits) * size


def config_parser(command: str, description: str) -> Parser:
    """Returns the parser of a command that takes a config and overrides; use `parse_intermixed_args` to parse."""
    parser = Parser(prog=f"sppo {command}", description=description)
    parser.add_argument("config", metavar="CONFIG.yaml", help="a path, or the name of a config that sppo configs lists")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="settings that replace the file's"
    )
    return parser


def load(args: argparse.Namespace, *, reads: Literal["config", "tokenizer", "weights"] = "config") -> Config:
    """Reads the config, and warns of settings that change nothing.

    Args:
        args: the words parsed by a `config_parser`; a `cluster` among them replaces hardware.cluster, and a `length`
            replaces sequence.length. With a `length`, None or not, the config may also be a folder, hf:FOLDER. The name
            of a shipped config becomes its path.
        reads: what of a model of the hub is fetched beside its config.json: nothing, its tokenizer, or its weights too.
    """
    options = {"hardware.cluster": getattr(args, "cluster", None), "sequence.length": getattr(args, "length", None)}
    overrides = [*args.overrides, *(f"{name}={value}" for name, value in options.items() if value)]
    takes_folder = hasattr(args, "length")
    if Path(args.config).is_dir():
        change = f"write hf:{args.config} to plan for the model in it" if takes_folder else "name a YAML file"
        raise ValueError(f"a config must be a YAML file, got the folder {args.config}; {change}")
    if takes_folder and args.config.startswith(_HF):
        config = config_from_dict(folder_settings(args.config.removeprefix(_HF)), overrides)
    else:
        args.config = find_config(args.config)
        config = load_config(args.config, overrides)
    if reads != "config" and config.model.hf is not None:
        fetch(Path(config.model.hf), weights=reads == "weights", say=lambda line: print(line, file=sys.stderr))
    warn_beyond_length(config)
    for line in inert_settings(config):
        warnings.warn(line, stacklevel=2)
    return config


def evaluation_config(args: argparse.Namespace, config: Config) -> Config:
    """Returns the config of an evaluation: of the settings of meshes those on the command line alone.

    Args:
        args: the words parsed by a `config_parser`.
        config: from `load`.

    Raises:
        ValueError: a setting of training steps is on the command line.
    """
    names = [override.partition("=")[0].strip() for override in args.overrides]
    for name in names:
        if name.partition(".")[0] in _OF_TRAINING or (name.startswith("sequence.") and name != "sequence.length"):
            raise ValueError(
                f"--eval plans forwards alone, so settings of a step must be left out, got {name}; remove {name}"
            )
    mesh = [override for override in args.overrides if override.startswith("mesh.")]
    found = for_evaluation(config)
    return for_evaluation(config, config_from_dict(to_dict(found), mesh).mesh) if mesh else found


def simulate(config: Config, *, together: bool = False) -> None:
    """Simulates the devices that a config asks for, if it asks for some; call it before jax is imported.

    Args:
        config: all settings.
        together: whether the devices are those of all processes of a run; `distributed.start` comes next.
    """
    num_devices = config.train.num_simulated_devices
    if num_devices:
        simulate_devices(local_devices(num_devices) if together else num_devices)


def folder_settings(folder: str) -> dict[str, Any]:
    """Returns the settings of a step of the model in a Hugging Face folder, at the model's own length.

    Raises:
        ValueError: the folder holds no model that can be read.
    """
    length = read_num_positions(model_folder(folder))
    return {"model": {"hf": folder}, "sequence": {"length": length}, "train": {"steps": 1}}


def read_plan(path: Path, config: Config) -> Plan:
    """Reads the plan that --plan names, and checks that the plan suits the config.

    Raises:
        ValueError: the plan cannot be read, or does not match the config; the message says where.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--plan must be a readable plan.json, got {path} ({error}); name another file") from error
    try:
        plan = Plan.from_json(text)
        check_plan(plan, config)
    except ValueError as error:
        raise ValueError(f"--plan {path}: {error}") from None
    others = [f"{name} = {got}, not {want}" for name, (want, got) in contradicted(config, plan).items()]
    if others:
        warnings.warn(f"the plan {path} overrides the config: {', '.join(others)}", stacklevel=2)
    return plan
