"""The train step as `sppo train` builds it, lowered for GPUs that are not there."""

import jax
import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.fit.lowering import counts_before_lowering, train_program
from sppo_jax.search.make import make_plan

MODEL = {"vocab_size": 64, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "mlp_size": 32, "kernel": "cudnn"}


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 1, "pipe": 1, "seq": 1},
        {"data": 1, "pipe": 2, "seq": 4},
        {"data": 2, "pipe": 1, "seq": 2},
        {"data": 1, "pipe": 1, "seq": 6},  # parameters with two cuts, within an axis
    ],
    ids=str,
)
def test_a_step_with_the_fused_kernel_takes_arrays_of_the_mesh_of_a_run(mesh):
    sequence = {"length": 16 * 2 * mesh["seq"], "chunks": 2, "split": "auto"}
    model = {**MODEL, "compute_dtype": "bfloat16"}
    devices = mesh["data"] * mesh["pipe"] * mesh["seq"]
    hardware = {"cluster": f"h100:1x{devices}"}
    config = config_from_dict(
        {"model": model, "sequence": sequence, "mesh": mesh, "hardware": hardware, "train": {"steps": 1}}
    )
    program = train_program(config, make_plan(config), jax.devices()[:devices], "gpu")
    traced = program.step.trace(program.state, program.batch, program.signals)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("__cudnn$fmhaSoftmax(") > 0 and lowered.count("__cudnn$fmhaSoftmaxBackward(") > 0


def test_counts_are_known_before_a_step_is_lowered():
    sequence, stash = {"length": 256, "chunks": 4}, {"inputs": "host", "attention": "host", "alpha": 1.0}
    config = config_from_dict(
        {
            "model": {**MODEL, "compute_dtype": "bfloat16"},
            "sequence": sequence,
            "stash": stash,
            "mesh": {"data": 1, "pipe": 1, "seq": 1},
            "hardware": {"cluster": "h100:1x1"},
            "train": {"steps": 1},
        }
    )
    how = config, make_plan(config), jax.devices()[:1], "gpu"
    found, program = counts_before_lowering(*how), train_program(*how)
    assert found == {"num_bodies": program.num_bodies, "host_stash_bytes": program.host_stash_bytes}
    assert min(found.values()) > 0
