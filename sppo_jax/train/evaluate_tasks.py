"""Scores of a run, a checkpoint or a Hugging Face model on tasks at lengths, on the devices at hand."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from sppo_jax.config import Config, config_from_dict, to_dict
from sppo_jax.data.ends import has_content
from sppo_jax.data.open import with_tokenizer
from sppo_jax.data.rows.recall import RECALL
from sppo_jax.data.tasks.prompts import Prompter, chat_template
from sppo_jax.data.tokens.encoding import open_encoder
from sppo_jax.data.vocabulary import knows_the_model
from sppo_jax.evaluation.entries import entry_of, key_of
from sppo_jax.evaluation.score import score
from sppo_jax.evaluation.tasks import Task
from sppo_jax.evaluation.validate import Scores
from sppo_jax.files.whole import json_text
from sppo_jax.models import build_model
from sppo_jax.models.hf.read import load_hf_params
from sppo_jax.pipeline import api
from sppo_jax.pipeline.params import layout, storage
from sppo_jax.plan.plan import Plan
from sppo_jax.processes import distributed
from sppo_jax.processes.prepare import prepare_process
from sppo_jax.train.checkpoints import layer_order
from sppo_jax.train.checkpoints.fingerprint import fingerprints
from sppo_jax.train.checkpoints.read import load_params, read_run
from sppo_jax.train.evaluate_saved import config_at, expected_text, plan_of_rows
from sppo_jax.train.kernel_check import check_kernels_once

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model that is scored.

    Args:
        name: for tables and files.
        checkpoint: from `find_checkpoint`; None: the weights of a Hugging Face model.
        settings: of that model, from `folder_settings`; empty with a checkpoint.
        overrides: `section.key=value` strings.
    """

    name: str
    checkpoint: Path | None
    settings: Mapping[str, Any]
    overrides: tuple[str, ...]

    def config(self, length: int | None) -> Config:
        """Returns the settings with sequences of a length; None: of the run's, or of the model's own.

        Raises:
            ValueError: a setting is wrong.
        """
        if self.checkpoint is not None:
            return config_at(read_run(self.checkpoint), self.overrides, length)
        settings = {**self.settings, "sequence": {"length": length}} if length else self.settings
        return config_from_dict(settings, self.overrides)

    @property
    def step(self) -> int | None:
        """The step of a checkpoint."""
        return None if self.checkpoint is None else read_run(self.checkpoint).get("step")


@knows_the_model
def open_prompter(config: Config, *, raw: bool) -> Prompter:
    """Returns what writes prompts for a model: its tokenizer, and its chat template if it has one.

    Args:
        config: names tokenizer and template, or the model's folder.
        raw: whether the template is left out.

    Raises:
        ValueError: there is no tokenizer for text, or a template cannot be read.
    """
    data = with_tokenizer(config)
    is_recall = data.source == RECALL
    if data.tokenizer is None and (is_recall or has_content(data, ["tokens"], data.source, data.sources)):
        raise ValueError(
            f"a task of text must have a tokenizer, got a model of tokens of data.source={config.data.source} without "
            "one; set data.tokenizer to its path, or to bytes"
        )
    encoder = open_encoder(data, vocab_size=config.model.vocab_size)
    return Prompter(encoder=encoder, template=None if raw else chat_template(data))


def evaluate_tasks(
    subject: Subject,
    asked: Sequence[tuple[int, Task]],
    prompter: Prompter,
    known: Sequence[Entry],
    done: Callable[[Entry], None],
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Scores tasks at lengths; all processes must call it with the same arguments.

    Args:
        subject: the model.
        asked: lengths and tasks, those of a length together.
        prompter: of the model.
        known: entries that are there already; what has the key of one is not computed again.
        done: called with each entry, in the order of `asked`.
        say: gets lines on how long it will take, before it starts, in process 0 alone.

    Raises:
        ValueError: settings, devices, weights or samples do not fit together.
    """
    tokenizer = hashlib.sha256(prompter.encoder.key.encode()).hexdigest()[:16]
    lengths = list(dict.fromkeys(length for length, _ in asked))
    configs = {length: subject.config(length) for length in lengths}
    rows = {length: sum(task.num_samples for at, task in asked if at == length) for length in lengths}
    plans = {length: _shared_plan(subject, configs[length], rows[length], say) for length in lengths}
    prepare_process(plans[max(lengths)], trains=False)
    holder, by_key = _Holder(subject), {entry["key"]: entry for entry in known}
    for length, task in asked:
        config, plan = configs[length], plans[length]
        holder.load(config, plan)
        key = key_of(holder.fingerprint, to_dict(config)["model"], task, length, prompter)
        if key in by_key:
            done(by_key[key])
            continue
        documents = "many" if task.shares_rows else "one"
        plan = dataclasses.replace(plan, sequence_documents=documents)
        samples = distributed.together(partial(task.samples, prompter, length), is_long=True)
        result = score(samples, plan, holder.scores_of)
        about = {"model": subject.name, "step": subject.step, "overrides": list(subject.overrides)}
        done(about | entry_of(key, task, length, result) | {"tokenizer": tokenizer})


def _shared_plan(subject: Subject, config: Config, num_wanted: int, say: Callable[[str], None]) -> Plan:
    """Returns the plan that process 0 makes; says how long its rows will take."""
    cluster = distributed.cluster(config)

    def planned() -> str:
        if not distributed.is_main():
            return ""
        plan = plan_of_rows(config, subject.overrides, num_wanted, cluster)
        say(expected_text(config, plan, num_wanted, cluster))
        return plan.to_json()

    return Plan.from_json(distributed.share_text(distributed.together(planned, is_long=True)))


class _Holder:
    """Parameters on the devices, for one plan at a time."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._key: tuple[Any, ...] | None = None
        self._params: nnx.State | None = None
        self._mesh: Mesh | None = None
        self._model: nnx.Module | None = None
        self.fingerprint = ""

    def load(self, config: Config, plan: Plan) -> None:
        """Loads the parameters, unless they lie as the plan needs them."""
        mesh, model = layout.make_mesh(plan), build_model(config, abstract=True)
        shapes = nnx.state(model, nnx.Param)
        wanted = storage.stored_shapes(plan, shapes, mesh)
        key = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(wanted))
        self._model, self._mesh = model, mesh
        check_kernels_once(config, plan, *mesh.local_devices)
        if key == self._key:
            return
        self._params = None  # its memory is needed
        in_order = storage.stored_shapes(plan, shapes, mesh, in_order=True)
        read = partial(self._read, config, shapes, in_order)
        params = distributed.together(read, is_long=True)
        if not self.fingerprint:
            found = fingerprints({"params": nnx.to_pure_dict(params)})
            self.fingerprint = hashlib.sha256(json_text(dict(sorted(found.items()))).encode()).hexdigest()[:16]
        self._params, self._key = layer_order.rearrange(params, wanted), key

    def _read(self, config: Config, shapes: nnx.State, in_order: nnx.State) -> nnx.State:
        checkpoint = self._subject.checkpoint
        if checkpoint is not None:
            return load_params(checkpoint, shapes, in_order)
        assert config.model.hf is not None
        return load_hf_params(config.model.hf, shapes, in_order)

    def scores_of(self, plan: Plan) -> tuple[Scores, nnx.State, Mesh]:
        """Returns the program of a plan, the parameters and the mesh."""
        assert self._params is not None and self._mesh is not None and self._model is not None
        return api.evaluate(plan, self._model, self._mesh), self._params, self._mesh
