"""A config small enough to compile in seconds, on the recall task, and a checkpoint of its first parameters."""

from pathlib import Path

import orbax.checkpoint as ocp
import yaml
from flax import nnx

from sppo_jax.config import config_from_dict, to_dict
from sppo_jax.models import build_model
from sppo_jax.search.make import make_plan
from sppo_jax.train.checkpoints.fingerprint import stamp

SETTINGS = {
    "model": {"vocab_size": 24, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "mlp_size": 32, "init_scale": 0.3},
    "data": {"source": "recall", "recall": {"pairs": 4, "distances": [8, 32]}},
    "mesh": {"pipe": 2, "data": 1, "seq": 1},
    "sequence": {"length": 128, "chunks": 2, "per_pipeline": 2},
    "train": {"steps": 5, "devices": "cpu:2", "eval_sequences": 4},
}


def write_config(path: Path) -> Path:
    """Writes the config and returns where."""
    path.write_text(yaml.safe_dump(SETTINGS))
    return path


def write_checkpoint(run_dir: Path, step: int = 5) -> Path:
    """Writes a run directory with a checkpoint; returns the checkpoint."""
    config = config_from_dict(SETTINGS)
    plan, params = make_plan(config), nnx.state(build_model(config), nnx.Param)
    directory, tree = run_dir / "checkpoints", {"params": nnx.to_pure_dict(params)}
    run = {
        "step": step,
        "config": to_dict(config),
        "plan": plan.to_dict(),
        "data": {"sequence": 0},
        **stamp(tree, tree),
    }
    items = ocp.args.Composite(state=ocp.args.StandardSave(tree), run=ocp.args.JsonSave(run))
    with ocp.CheckpointManager(directory.resolve()) as manager:
        manager.save(step, args=items)
    return directory / str(step)
