"""A row is a hit if and only if transformers' greedy generation writes its answer, on plans of several kinds."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from hf_models import make_model

from sppo_jax.config import config_from_dict
from sppo_jax.data.tasks.prompts import Continuation
from sppo_jax.evaluation.samples import TaskSample
from sppo_jax.evaluation.score import score
from sppo_jax.models import build_model, load_hf_params
from sppo_jax.pipeline import api
from sppo_jax.pipeline.params import layout, storage
from sppo_jax.search.make import make_plan
from sppo_jax.train.checkpoints import layer_order

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LENGTH, VOCABULARY = 64, 61
PLANS = {
    "pipe": {"mesh": {"data": 1, "pipe": 2, "seq": 2}, "sequence": {"chunks": 2}},
    "ring": {"mesh": {"data": 1, "pipe": 1, "seq": 4}, "sequence": {"chunks": 2, "split": "ring"}},
    "breadth": {
        "mesh": {"data": 1, "pipe": 1, "seq": 4},
        "sequence": {"chunks": 2},
        "schedule": {"name": "breadth-first"},
        "stash": {"kv": "host"},
    },
    "data": {"mesh": {"data": 2, "pipe": 1, "seq": 2}, "sequence": {"chunks": 2, "per_step": 2}},
}
# Dense, experts, windows, sinks, states.
SHAPES = ("llama", "qwen3-moe", "mistral-window", "gpt-oss", "qwen3-next")
FULL = ["sliding_attention", "full_attention"]
CHANGES = {
    "gpt-oss": {"num_hidden_layers": 4, "layer_types": FULL * 2, "sliding_window": 8},
    "mistral-window": {"sliding_window": 8},
    "qwen3-next": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
}
IN_CI = {("gpt-oss", "pipe")}
CASES = [
    pytest.param(shape, plan, marks=[] if (shape, plan) in IN_CI else [pytest.mark.slow])
    for shape in SHAPES
    for plan in PLANS
]


def greedy(model, prompt, count):
    made = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None,
        pad_token_id=0, attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
    )  # fmt: skip
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("shape", "plan"), CASES)
def test_a_hit_is_what_transformers_writes(tmp_path, shape, plan):
    reference = make_model(shape, **CHANGES.get(shape, {}))
    reference.save_pretrained(tmp_path / "model")
    settings = {"sequence": {"length": LENGTH}, "train": {"steps": 1, "devices": "cpu:4"}}
    settings |= {"model": {"hf": str(tmp_path / "model"), "compute_dtype": "float32"}}
    given = PLANS[plan]
    settings |= {name: settings.get(name, {}) | value for name, value in given.items()}
    config = config_from_dict(settings)
    made = replace(make_plan(config), sequence_documents="many")
    mesh, model = layout.make_mesh(made), build_model(config, abstract=True)
    shapes = nnx.state(model, nnx.Param)
    in_order = storage.stored_shapes(made, shapes, mesh, in_order=True)
    read = load_hf_params(tmp_path / "model", shapes, in_order)
    params = layer_order.rearrange(read, storage.stored_shapes(made, shapes, mesh))
    rng = np.random.default_rng([SHAPES.index(shape), list(PLANS).index(plan)])
    samples, wanted = [], []
    for number in range(10):
        prompt = rng.integers(0, VOCABULARY, rng.integers(4, 40)).tolist()
        written = greedy(reference, prompt, int(rng.integers(1, 12)))
        answer = list(written)
        if number % 2:
            answer[int(rng.integers(len(answer)))] = int(rng.integers(VOCABULARY))
        one = Continuation(tokens=tuple(answer), joins=True)
        samples.append(TaskSample(prompt=np.array(prompt), answers=(one,)))
        wanted.append(answer == written)
    found = score(samples, made, lambda plan: (api.evaluate(plan, model, mesh), params, mesh))
    assert found.hits.tolist() == wanted and sum(wanted) >= 5
