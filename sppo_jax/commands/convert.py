"""`sppo convert`: models from Hugging Face folders and back; on the CPU, with one copy of the model in memory."""

import dataclasses
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sppo_jax.commands.command import DONE, Parser, some_path
from sppo_jax.config import Config, config_from_dict, load_config
from sppo_jax.config.data import BYTES
from sppo_jax.config.hf.families import CONFIG, read_config
from sppo_jax.config.to_hf import shape_to_hf
from sppo_jax.files.paths import local_path
from sppo_jax.files.whole import parse_json
from sppo_jax.models.counts import num_params
from sppo_jax.models.hf.tokenizer import check_tokenizer, copy_tokenizer
from sppo_jax.processes.environment import use_cpu

_LENGTH = 4096


def run(words: Sequence[str]) -> int:
    """Runs the conversion that the words name; returns the exit code."""
    parser = Parser(prog="sppo convert", description="Convert models from and to Hugging Face folders (safetensors).")
    directions = parser.add_subparsers(dest="direction", required=True, metavar="from-hf|to-hf", parser_class=Parser)
    into = directions.add_parser("from-hf", help="a model of a Hugging Face folder to a checkpoint and a config")
    into.add_argument("source", metavar="DIR", type=some_path, help="folder with config.json and safetensors")
    into.add_argument("target", metavar="OUT", type=some_path, help="folder to write, new or empty")
    out = directions.add_parser("to-hf", help="the model of a run or checkpoint to a folder that transformers loads")
    out.add_argument(
        "source",
        metavar="RUN_OR_CHECKPOINT",
        type=some_path,
        help="a run (its newest checkpoint is used), or a checkpoint",
    )
    out.add_argument("target", metavar="DIR", type=some_path, help="folder to write, new or empty")
    out.add_argument(
        "--like",
        metavar="DIR",
        type=some_path,
        help="folder that gives special tokens and tokenizer; model.hf by default",
    )
    out.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of the tensors; that of the parameters by default",
    )
    out.add_argument(
        "--without",
        action="append",
        default=[],
        choices=("mtp",),
        help="leave out layers that draft tokens, which are copied from the folder of the model otherwise",
    )
    args = parser.parse_args(words)
    # Host memory is larger than a device's; jax is not imported yet.
    use_cpu()
    commands: Mapping[str, Callable[[Namespace], None]] = {"from-hf": _from_hf, "to-hf": _to_hf}
    commands[args.direction](args)
    return DONE


def _from_hf(args: Namespace) -> None:
    """Writes a checkpoint of step 0, a config to start from, and the tokenizer."""
    config = _starting_config(args.source)
    check_tokenizer(args.source, config.model.vocab_size)

    from flax import nnx

    from sppo_jax.models.build import build_model
    from sppo_jax.models.hf.read import load_hf_params
    from sppo_jax.models.hf.write import new_folder
    from sppo_jax.train.checkpoints.save import save_params

    start_s = time.perf_counter()
    with new_folder(args.target, 4 * num_params(config.model)) as folder:
        shapes = nnx.state(build_model(config, abstract=True), nnx.Param)
        params = load_hf_params(args.source, shapes)
        save_params(folder, params, config)
        copied = copy_tokenizer(args.source, folder)
        (folder / CONFIG).write_bytes((args.source / CONFIG).read_bytes())
        (folder / "config.yaml").write_text(_short_yaml(config, args.target), encoding="utf-8")
    print(
        f"wrote {num_params(config.model):,} parameters to {args.target / '0'} in {time.perf_counter() - start_s:.1f} s"
        f" and to {args.target / 'config.yaml'} a config that continues training from {args.source}"
    )
    print(f"copied the tokenizer: {', '.join(copied)}" if copied else f"there is no tokenizer in {args.source}")


def _starting_config(folder: Path) -> Config:
    """Returns a config of the folder's model, for sequences of a length that the model was trained on."""
    model = {"hf": str(folder)}
    shape = config_from_dict({"model": model, "sequence": {"length": 1}, "train": {"steps": 1}}).model
    length = min(known for known in (_LENGTH, shape.rope.original_length) if known)
    return config_from_dict({"model": model, "sequence": {"length": length}, "train": {"steps": 1000}})


def _short_yaml(config: Config, target: Path) -> str:
    """Returns the settings that a user changes first, as YAML; all others have defaults."""
    settings = {
        "model": _plain(dataclasses.asdict(config.model)),
        "data": {"source": config.data.source},
        "sequence": {"length": config.sequence.length},
        "train": {"steps": config.train.steps},
    }
    head = (
        "# Continues training from the weights of model.hf:\n"
        f"#   sppo train {target / 'config.yaml'} data.source=TEXT sequence.length=32768\n"
        "# For longer sequences add a rotary scaling:\n"
        "#   model.rope.scaling=yarn model.rope.factor=4\n"
    )
    return head + yaml.safe_dump(settings, sort_keys=False)


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _to_hf(args: Namespace) -> None:
    """Writes the parameters of a checkpoint as safetensors, with config.json and the tokenizer, if one is known."""
    from sppo_jax.commands.finished_folder import finish_folder
    from sppo_jax.models.hf.copied import copied_from
    from sppo_jax.models.hf.write import check_new, to_hf
    from sppo_jax.train.checkpoints.read import find_checkpoint, load_params

    checkpoint = find_checkpoint(args.source)
    config = _config_of(checkpoint)
    like = args.like or _origin(config, checkpoint)
    # Refuse wrong input before anything large is read.
    check_new(args.target, 0)
    origin = read_config(like) if like else {}
    family = shape_to_hf(config.model, like=origin, length=0, dtype=args.dtype)["model_type"]
    copied_from(like, origin, config.model, family, args.without)
    if like:
        check_tokenizer(like, config.model.vocab_size)

    from flax import nnx

    from sppo_jax.models.build import build_model

    start_s = time.perf_counter()
    params = load_params(checkpoint, nnx.state(build_model(config, abstract=True), nnx.Param))
    length = config.sequence.length

    def finish(folder: Path) -> None:
        if like is None and config.data.tokenizer not in (None, BYTES):
            copy_tokenizer(_folder_of(local_path(config.data.tokenizer or "", "data.tokenizer")), folder)
        finish_folder(folder, config, args.source, checkpoint)

    given = dict(config=config.model, like=like, dtype=args.dtype, length=length, without=args.without)
    to_hf(params, args.target, finish=finish, **given)
    print(f"wrote {num_params(config.model):,} parameters to {args.target} in {time.perf_counter() - start_s:.1f} s")
    if like is None:
        print(
            "the model came from no known Hugging Face folder, so its special tokens are not written; "
            "--like DIR takes special tokens from DIR"
        )


def _folder_of(tokenizer: Path) -> Path:
    """Returns the folder of a tokenizer, which is given as a file or as a folder."""
    return tokenizer if tokenizer.is_dir() else tokenizer.parent


def _config_of(checkpoint: Path) -> Config:
    """Returns the config of a checkpoint's run, from the checkpoint or else from the run's directory."""
    from sppo_jax.train.checkpoints.read import read_run

    settings = read_run(checkpoint).get("config")
    if settings is not None:
        return config_from_dict(settings)
    beside = checkpoint.parent.parent / "config.yaml"
    if beside.is_file():
        return load_config(beside)
    raise ValueError(
        f"a checkpoint must name its model, got {checkpoint} without a config and no {beside}; use another checkpoint"
    )


def _origin(config: Config, checkpoint: Path) -> Path | None:
    """Returns the Hugging Face folder that a model came from, if it still exists, or the folder with copies from it."""
    places = [local_path(config.model.hf, "model.hf")] if config.model.hf else []
    for folder in [*places, checkpoint.parent]:
        if (folder / CONFIG).is_file() and "model_type" in parse_json((folder / CONFIG).read_text(encoding="utf-8")):
            return folder
    return None
