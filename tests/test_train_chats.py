"""Conversations packed on a mesh have the loss and the targets that transformers has, one conversation at a time."""

import json
import os
import random
import signal

import jax
import numpy as np
import pytest
import torch
import transformers
from chat_cases import THINKING, draw, make_tokenizer
from exactness import quick_jit, small_plan
from flax import nnx
from hf_models import float64_transformers, make_model
from tiny_runs import at_batch, losses_of, make_config, run

from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data
from sppo_jax.data.rows import flex
from sppo_jax.data.rows.flex import FlexRows
from sppo_jax.flex import cells
from sppo_jax.flex.of_plan import window_shape
from sppo_jax.models import from_hf
from sppo_jax.pipeline.api import value_and_grad
from sppo_jax.pipeline.params.layout import make_mesh
from sppo_jax.pipeline.params.storage import param_shardings
from sppo_jax.search.make import costs_of

# One worker makes what all of these look at.
pytestmark = pytest.mark.xdist_group("train_chats")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LENGTH, PER_STEP = 384, 2
CASES = {
    "pipe-2-seq-2": dict(chunks=(192, 192)),
    "breadth-first": dict(chunks=(192, 192), schedule="breadth-first", interleave=2),
    "flexible-groups": dict(chunks=(192, 192), kind="ring", groups="flex"),
}


class Padded:
    """Rows of one epoch, and behind these rows without a document."""

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return -(-len(self._rows) // PER_STEP) * PER_STEP

    def __getitem__(self, index):
        row = self._rows[min(index, len(self._rows) - 1)]
        if index < len(self._rows):
            return row
        return {name: np.zeros_like(row[name]) - (name in ("targets", "document_ids")) for name in row}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Forty conversations with calls of tools, a model, and what transformers computes: loss and targets."""
    folder = tmp_path_factory.mktemp("chats")
    tokenizer = make_tokenizer(folder / "model")
    rng = random.Random(5)
    drawn = (draw(rng) for _ in range(400))
    drawn = (row for row in drawn if any("tool_calls" in message for message in row))
    rows = [row for row in drawn if len(tokenizer.encode(json.dumps(row))) < 1.3 * LENGTH][:40]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    (folder / "model" / "chat_template.jinja").write_text(THINKING)
    total, count = 0.0, 0
    with float64_transformers(), torch.no_grad():
        model = make_model("qwen3-tied", vocab_size=304, num_hidden_layers=4, max_position_embeddings=LENGTH)
        for row in rows:
            found = tokenizer.apply_chat_template(
                row, chat_template=THINKING, return_assistant_tokens_mask=True, return_dict=True
            )
            ids, mask = torch.tensor([found["input_ids"]]), torch.tensor([found["assistant_masks"]])
            labels = torch.where(mask == 1, ids, -100)
            number = int((labels[:, 1:] != -100).sum())
            total, count = total + model(ids, labels=labels).loss.item() * number, count + number
    model.save_pretrained(folder / "model")
    return folder, total / count, count


def grouped(pieces, shape):
    """Places documents in groups even where the planner, on simulated CPUs, would leave the rows as they are."""
    found = cells.candidates(pieces, shape)
    return min((found[name] for name in found if name != cells.TODAY), key=lambda placement: placement.cost)


@pytest.mark.parametrize(
    "name", ["pipe-2-seq-2", *(pytest.param(name, marks=pytest.mark.slow) for name in list(CASES)[1:])]
)
def test_loss_and_targets_are_those_of_transformers(x64, chats, monkeypatch, name):
    folder, wanted, num_targets = chats
    config = config_from_dict(
        {
            "model": {"hf": str(folder / "model"), "compute_dtype": "float64"},
            "data": {"source": str(folder / "chats.jsonl"), "validation_fraction": 0, "cache": str(folder / "cache")},
            "sequence": {"length": LENGTH},
            "train": {"steps": 1, "devices": "cpu:4"},
        }
    )
    data = open_data(config)
    assert data.sources[0].training.corpus.num_documents == 40 and len(data.training) < 35
    plan = small_plan(**CASES[name], mesh=(1, 2, 2), sequences=PER_STEP)
    rows = Padded(data.training)
    if plan.groups == "flex":
        monkeypatch.setattr(flex, "plan_cells", grouped)
        rows = FlexRows(rows, window=PER_STEP, shape=window_shape(plan, costs_of(plan, config)), per_step=PER_STEP)
        moved = [not np.array_equal(rows[at]["tokens"], Padded(data.training)[at]["tokens"]) for at in range(8)]
        assert any(moved)
    model = from_hf(folder / "model", dtype="float64")
    mesh, params = make_mesh(plan), nnx.state(model, nnx.Param)
    params = jax.device_put(params, param_shardings(plan, params, mesh))
    step = quick_jit(value_and_grad(plan, model, mesh))
    total, count = 0.0, 0
    for first in range(0, len(rows), PER_STEP):
        batch = [rows[first + at] for at in range(PER_STEP)]
        batch = {key: np.stack([row[key] for row in batch]) for key in batch[0]}
        loss, _ = step(params, batch)
        number = int((batch["targets"] >= 0).sum())
        total, count = total + float(loss) * number, count + number
    assert count == num_targets > 500
    assert total / count == pytest.approx(wanted, rel=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_a_stopped_run_on_chats_and_text_goes_on_bit_for_bit(chats, tmp_path):
    folder, _, _ = chats
    (tmp_path / "words.txt").write_text("river stone tree " * 300)
    (tmp_path / "t.jinja").write_text(THINKING)
    config = make_config(
        {str(folder / "chats.jsonl"): {"weight": 2, "train_on": "last"}, str(tmp_path / "words.txt"): 1},
        model={"vocab_size": 257},
        data={"chat": {"template": str(tmp_path / "t.jinja"), "too_long": "cut"}, "cache": str(tmp_path / "cache")},
        optimizer={"lr": 1e-3},
        train={"steps": 6, "log_every": 1, "eval_sequences": 0},
    )
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run(config, straight)
    _, result = run(config, stopped, at_batch(2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert result.stopped_by == "SIGTERM" and result.step < 5
    run(config, stopped)
    assert losses_of(stopped) == losses_of(straight) and len(losses_of(straight)) == 6
