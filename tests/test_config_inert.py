"""Settings that change nothing beside the others are named in a line."""

import dataclasses

import pytest

from sppo_jax.cli import main
from sppo_jax.config import config_from_dict
from sppo_jax.config.inert import _ROWS, inert_settings

BASE = {
    "model": {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "mlp_size": 128},
    "sequence": {"length": 256},
    "train": {"steps": 1},
}
EXPERTS = "model.experts.count=8"
# Settings that act wherever there are experts.
OF_EXPERTS = dict(
    chosen=2, mlp="geglu", bias="true", shared_size=8, scores="sigmoid", scaling=2, choice_bias="true", balance=0.1,
    z=0.1, expert_groups=2,
)  # fmt: skip
# A setting, others beside which it changes nothing, and others beside which it acts.
CASES = {
    "data.text_key=body": (["data.source=a.txt"], ["data.source=a.jsonl.gz"]),
    "data.ignore_keys=[loss]": (["data.source=a.txt"], ["data.source=a.jsonl"]),
    "data.start_token=null": (["data.source=a.npy"], ["data.source={a.npy: 1, b.parquet: 1}"]),
    "data.end_token=</s>": (["data.source=recall"], ["data.source=folder"]),
    "data.chat.messages_key=turns": (["data.source=a.txt"], ["data.source=a.jsonl"]),
    "data.chat.tools_key=functions": (["data.source=a.bin"], ["data.source=folder"]),
    "data.chat.template=t.jinja": (["data.source=recall"], ["data.source=a.parquet"]),
    "data.chat.train_on=last": (
        ["data.source=a.jsonl", "data.format=text"],
        ["data.source={a.jsonl: {format: chat}}", "data.format=text"],
    ),
    "data.chat.too_long=cut": (["data.source={a.jsonl: {format: text}}"], ["data.source=a.jsonl", "data.format=chat"]),
    "data.chat.date='2026-01-31'": (["data.source=stdlib"], ["data.source=a.jsonl"]),
    "data.chat.values={a: 1}": (["data.source=stdlib"], ["data.source=a.jsonl"]),
    "data.token_dtype=uint32": (["data.source=a.npy"], ["data.source='*.bin'"]),
    "data.separator=0": (["data.source=stdlib"], ["data.source=a.npy"]),
    "data.pack=stream": (["data.source=recall"], ["data.source=stdlib"]),
    "data.fill=0.9": (["data.source=recall"], []),
    "optimizer.warmup=from_zero": (["optimizer.warmup_ratio=0"], ["optimizer.warmup_steps=1"]),
    "optimizer.min_lr_ratio=0.2": (["optimizer.decay=none"], ["optimizer.decay=linear"]),
    "optimizer.decay_steps=1": (["optimizer.decay=none"], []),
    "optimizer.decay_embeddings=false": (["optimizer.weight_decay=0"], []),
    "data.validation_fraction=0.1": (["data.validation_source=v.txt"], ["data.source=a.txt"]),
    "data.recall.pairs=4": (["data.source=stdlib"], ["data.source=recall"]),
    "data.recall.values=4": ([], ["data.source=recall"]),
    "data.recall.distances=[5]": ([], ["data.source=recall"]),
    "data.needles.tasks=[needle-uuid]": (["data.source=recall"], ["data.source=needles"]),
    "model.rope.factor=8": ([], ["model.rope.scaling=linear"]),
    "model.rope.low_freq_factor=2": (
        ["model.rope.scaling=linear"],
        ["model.rope={scaling: llama3, original_length: 64}"],
    ),
    "model.rope.high_freq_factor=2": ([], ["model.rope={scaling: llama3, original_length: 64}"]),
    "model.rope.beta_fast=2": ([], ["model.rope={scaling: yarn, original_length: 64}"]),
    "model.rope.beta_slow=2": ([], ["model.rope={scaling: yarn, original_length: 64}"]),
    "model.rope.truncate=false": ([], ["model.rope={scaling: yarn, original_length: 64}"]),
    **{f"model.experts.{name}={value}": ([], [EXPERTS]) for name, value in OF_EXPERTS.items()},
    "model.experts.size=24": ([], [EXPERTS, "model.mlp_size=24"]),
    "model.experts.shared_gate=true": ([], [EXPERTS, "model.experts.shared_size=8"]),
    "model.experts.chosen_groups=2": ([], [EXPERTS, "model.experts.expert_groups=4"]),
    **{
        f"model.delta.{name}=2": ([], ["model.layers=delta,full"])
        for name in ("value_heads", "key_heads", "key_size", "value_size", "taps")
    },
    "model.mlp=gelu": ([EXPERTS], [EXPERTS, "model.layers=full,d", "model.layer_types={d: {experts: {count: 0}}}"]),
    "model.mlp_size=80": ([EXPERTS, "model.experts.size=24"], [EXPERTS]),
    "model.experts.normalized=false": ([EXPERTS, "model.experts.scores=softmax_of_chosen"], [EXPERTS]),
    "model.experts.bias_rate=0.01": ([EXPERTS], [EXPERTS, "model.experts.choice_bias=true"]),
    "model.experts.balance_form=layer": ([EXPERTS, "model.experts.balance=0"], [EXPERTS]),
    "model.experts.balance_over=batch": (
        [EXPERTS, "model.experts.balance=0"],
        [EXPERTS, "model.experts.balance=0", "model.experts.z=0.1"],
    ),
    "checkpoint.keep_best=1": (["train.eval_sequences=0"], []),
    "train.eval_context=true": (["train.eval_sequences=0"], []),
    "checkpoint.keep_every=10": (["checkpoint={every_s: 0, final: false}"], ["checkpoint={every_s: 0}"]),
}


@pytest.mark.parametrize("setting", CASES)
def test_a_setting_that_changes_nothing_is_named(setting):
    beside, acting = CASES[setting]
    name, _, value = setting.partition("=")
    (line,) = inert_settings(config_from_dict(BASE, [*beside, setting]))
    assert line.startswith(f"{name}=") and "changes nothing, because" in line and "\n" not in line
    assert inert_settings(config_from_dict(BASE, [*acting, setting])) == []


def test_every_row_is_tried_and_names_settings_that_exist():
    assert {setting.partition("=")[0] for setting in CASES} == {name for names, _, _ in _ROWS for name in names}
    config = config_from_dict(BASE)
    for names, _, _ in _ROWS:
        for name in names:
            group = config
            for part in name.split(".")[:-1]:
                group = getattr(group, part)
            assert name.rpartition(".")[2] in {field.name for field in dataclasses.fields(group)}


def test_the_line_is_printed_once(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(repr(BASE))
    assert main(["plan", "c.yaml", "hardware.cluster=h100:1x1", "data.separator=0"]) == 0
    errors = capfd.readouterr().err
    assert errors == (
        "warning: data.separator=0 changes nothing, because no source is a .bin or .npy file; leave it out\n"
    )


def test_presets_with_experts_give_nothing_in_vain():
    for name in ("qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-20b", "qwen3.6-35b-a3b", "qwen3-next-80b-a3b"):
        config = config_from_dict({**BASE, "model": {"preset": name}})
        assert inert_settings(config) == []
