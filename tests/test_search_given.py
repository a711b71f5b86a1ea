"""Settings of the plan: each is obeyed, refused, or said to change nothing; and what refusals advise can be loaded."""

import copy
import itertools
import re
import warnings
from dataclasses import replace
from functools import cache

import pytest

from sppo_jax.cli import main
from sppo_jax.commands.command import read_plan
from sppo_jax.config import ConfigError, config_from_dict
from sppo_jax.hardware import DEVICES, make_cluster
from sppo_jax.search.given import contradicted, without_effect
from sppo_jax.search.make import check_plan, make_plan

MODEL = {"vocab_size": 64, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "mlp_size": 128}
BASES = {
    "open": {},
    "a list of chunks": {"sequence.chunks": [512, 512]},
    "chunks of equal cost": {"sequence.balance": "cost", "sequence.chunks": 4},
    "one chunk": {"sequence.chunks": 1},
    "one stage": {"mesh.pipe": 1, "mesh.seq": 2},
    "one member": {"mesh.pipe": 2, "mesh.seq": 1},
    "two sequences": {"sequence.per_pipeline": 2},
    "breadth-first": {"schedule.name": "breadth-first"},
    "the paper's rules": {"planner": "paper"},
    "all computed again": {"stash.inputs": "recompute", "stash.attention": "recompute", "stash.rest": "recompute"},
    "one layer": {"model.num_layers": 1},
}
VALUES = {
    "sequence.balance": ["equal", "flops", "cost"],
    "sequence.longest": [1.25, 3.0],
    "sequence.shapes": [[64], [128, 1024], [1024], [3], [2048]],
    "sequence.chunks": [1, 2, 4, [768, 256], [256, 768]],
    "sequence.split": ["ulysses", "ring", "hybrid"],
    "sequence.ulysses": [1, 2, 3],
    "sequence.ring_pass": ["kv", "q"],
    "sequence.groups": ["static", "flex"],
    "schedule.name": ["gpipe", "1f1b", "sppo", "breadth-first", "seq1f1b", "interleaved-1f1b", "interleaved-seq1f1b"],
    "schedule.interleave": [1, 2, 3],
    "schedule.wave": [1, 2, 4],
    "stash.inputs": ["keep", "host", "recompute"],
    "stash.attention": ["keep", "host", "recompute"],
    "stash.rest": ["keep", "host", "recompute"],
    "stash.alpha": [0.0, 0.5, 1.0],
    "stash.kv_grad_dtype": ["float32", "bfloat16"],
    "stash.kv": ["keep", "rebuild", "host"],
    "stash.waiting": ["keep", "host"],
    "mesh.weights": ["resident", "gathered"],
    "mesh.pipe": [1, 2, 3],
    "mesh.seq": [1, 2, 3],
    "mesh.data": [1, 2],
    "optimizer.place": ["device", "host"],
}


SLOW = (
    "a list of chunks",
    "one member",
    "chunks of equal cost",
    "one stage",
    "two sequences",
    "the paper's rules",
    "all computed again",
    "one layer",
)
SOME = [pytest.param(base, marks=[pytest.mark.slow] if base in SLOW else []) for base in BASES]


def settings_of(given):
    settings = copy.deepcopy({"model": MODEL, "sequence": {"length": 1024}, "train": {"steps": 1}})
    for name, value in given.items():
        group, _, key = name.rpartition(".")
        (settings.setdefault(group, {}) if group else settings)[key] = value
    return settings


@cache
def tried(base, setting, number):
    """Returns the config, the plan, the warnings and the refusal of a base with one value of a setting."""
    given = BASES[base] | {setting: VALUES[setting][number]}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config = plan = refusal = None
        try:
            config = config_from_dict(settings_of(given))
            plan = make_plan(config, make_cluster(DEVICES["cpu"], 2))
        except ValueError as error:
            refusal = str(error)
    return config, plan, [str(line.message) for line in said], refusal


def cases(base):
    return [(setting, k) for setting in VALUES if setting not in BASES[base] for k in range(len(VALUES[setting]))]


@pytest.mark.parametrize("base", SOME)
def test_no_setting_is_ignored_in_silence(base):
    """One plan cannot be what two values of a setting ask for: one is refused, or a line says it changes nothing."""
    for setting in dict.fromkeys(setting for setting, _ in cases(base)):
        plans = {}
        for number in range(len(VALUES[setting])):
            config, plan, said, refusal = tried(base, setting, number)
            if refusal is None and not any(line.startswith(f"{setting}=") for line in said):
                text = replace(plan, reasons={}).to_json()
                assert text not in plans, f"{setting} is {VALUES[setting][number]} and {plans[text]} in one plan"
                plans[text] = VALUES[setting][number]


@pytest.mark.parametrize("base", SOME)
def test_what_a_plan_says_is_what_was_given(base):
    for setting, number in cases(base):
        config, plan, _, refusal = tried(base, setting, number)
        if refusal is None:
            assert contradicted(config, plan) == {}, setting
            check_plan(plan, config)


KEY = re.compile(r"\b((?:mesh|sequence|schedule|stash|optimizer|model)\.\w+)=([\w.\-]+)")


@pytest.mark.parametrize("base", SOME)
def test_what_a_refusal_advises_can_be_loaded(base):
    refusals = 0
    for setting, number in cases(base):
        refusal = tried(base, setting, number)[3]
        if refusal is None:
            continue
        refusals += 1
        assert "\n" not in refusal and "list index" not in refusal
        for name, value in KEY.findall(refusal.partition("; ")[2]):
            given = BASES[base] | {setting: VALUES[setting][number]}
            try:
                config_from_dict(settings_of(given), [f"{name}={value.rstrip('.')}"])
            except ConfigError as error:  # another rule may be broken still, of the key itself none
                assert not str(error).startswith(f"{name} must be"), (refusal, error)
    assert refusals


@pytest.mark.parametrize("base", SOME)
def test_a_refusal_names_no_value_that_was_not_given(base):
    """What stands behind "got" is what the user wrote, not what the planner tried."""
    for setting, number in cases(base):
        refusal = tried(base, setting, number)[3]
        if refusal is None or "; " not in refusal:
            continue
        given = BASES[base] | {setting: VALUES[setting][number]}
        got = refusal.partition(", got ")[2].partition("; ")[0]
        for name, value in KEY.findall(got):
            if name in VALUES and name not in ("mesh.pipe", "mesh.seq", "mesh.data"):
                assert str(given.get(name)) == value, (refusal, given)


@pytest.mark.parametrize(
    "given, words",
    [
        (
            {"sequence.chunks": [512, 512], "sequence.balance": "cost"},
            "sequence.balance must be auto where .* is a list",
        ),
        ({"sequence.chunks": [512, 512], "sequence.balance": "equal"}, "got equal; set sequence.balance=auto, or seq"),
        ({"sequence.chunks": [512, 512], "sequence.longest": 2}, "set sequence.longest=auto, or sequence.chunks=auto"),
        ({"sequence.balance": "equal", "sequence.longest": 2}, "got 2 with sequence.balance=equal"),
        (
            {"schedule.name": "table", "schedule.table": "t.csv", "sequence.balance": "flops"},
            "sequence.balance must be auto with schedule.table",
        ),
        (
            {"schedule.name": "sppo", "stash.kv": "rebuild"},
            "^stash.kv=rebuild must have schedule.name=breadth-first",
        ),
        ({"sequence.chunks": 1, "stash.kv": "host"}, "use stash.kv=rebuild, or stash.kv=keep"),
        ({"sequence.ulysses": 2, "mesh.seq": 1}, "sequence.ulysses=2 must divide mesh.seq, got mesh.seq=1"),
        (
            {"schedule.name": "interleaved-1f1b", "mesh.pipe": 2, "mesh.seq": 1},
            "sequences of interleaved 1f1b must be a",
        ),
    ],
)
def test_the_broken_rule_is_named(given, words):
    with pytest.raises(ValueError, match=words):
        make_plan(config_from_dict(settings_of(given)), make_cluster(DEVICES["cpu"], 2))


@pytest.mark.parametrize(
    "given, devices, rule, advice",
    [
        (
            {"sequence.shapes": [3, 1024]},
            8,
            "must divide each of sequence.shapes=\\[3, 1024\\]",
            "sequence.shapes=auto",
        ),
        (
            {"optimizer.place": "host", "schedule.wave": 1, "sequence.per_pipeline": 2},
            4,
            "optimizer.place=host must have all 2 sequences of a pipeline in one wave",
            "schedule.wave=auto",
        ),
        (
            {"optimizer.place": "host", "model.num_layers": 1},
            4,
            "breadth-first must have at least 2 layers per stage, mesh.data",
            "optimizer.place=auto",
        ),
        ({"mesh.weights": "gathered", "model.num_layers": 1}, 4, "at least 2 layers per stage", "mesh.weights=auto"),
    ],
)
def test_of_the_rules_of_meshes_the_broken_ones_are_named(given, devices, rule, advice):
    """With no mesh left, rules that every mesh keeps are not among those that are named, and the advice helps."""
    config = config_from_dict(settings_of(given))
    cluster = make_cluster(DEVICES["cpu"], devices)
    with pytest.raises(ValueError, match=rule) as refused:
        make_plan(config, cluster)
    text = str(refused.value)
    assert "must divide sequence.length=1024" not in text, text  # every mesh of 4 or 8 devices keeps this one
    assert advice in text.rpartition("; ")[2], text
    make_plan(config_from_dict(settings_of(given), [advice]), cluster)


def test_a_longest_chunk_asks_for_chunks_of_equal_cost():
    config = config_from_dict(
        settings_of({"sequence.longest": 1.25, "sequence.chunks": 8, "mesh.pipe": 2, "mesh.seq": 1})
    )
    lengths = make_plan(config, make_cluster(DEVICES["cpu"], 2)).chunk_lengths
    assert len(set(lengths)) > 2 and max(lengths) <= 1.25 * 1024 / 8 + 1


def test_a_setting_without_effect_is_named_by_the_command(tmp_path, capfd):
    (tmp_path / "c.yaml").write_text(repr(settings_of({"sequence.balance": "cost", "sequence.chunks": 1})))
    assert main(["plan", str(tmp_path / "c.yaml"), "hardware.cluster=h100:1x1"]) == 0
    line = "sequence.balance=cost changes nothing in this plan, because sequences are in one chunk; leave it out"
    assert capfd.readouterr().err == f"warning: {line}\n"


@pytest.mark.parametrize(
    "given, name, said",
    [
        ({"stash.inputs": "host"}, "stash.inputs", ("host", "keep")),
        ({"sequence.chunks": 2}, "sequence.chunks", (2, 1)),
        ({"sequence.chunks": [512, 512]}, "sequence.chunks", ((512, 512), (1024,))),
        ({"sequence.ring_pass": "q"}, "sequence.ring_pass", ("q", "auto")),
        ({"stash.kv_grad_dtype": "bfloat16"}, "stash.kv_grad_dtype", ("bfloat16", "float32")),
    ],
)
def test_a_plan_that_is_followed_against_a_setting_says_so(tmp_path, given, name, said):
    base = {"sequence.chunks": 1, "stash.inputs": "keep"}
    made = make_plan(config_from_dict(settings_of(base)), make_cluster(DEVICES["cpu"], 2))
    (tmp_path / "plan.json").write_text(made.to_json())
    assert contradicted(config_from_dict(settings_of({})), made) == {}
    assert contradicted(config_from_dict(settings_of(given)), made) == {name: said}
    line = f"overrides the config: {re.escape(f'{name} = {said[1]}, not {said[0]}')}$"
    with pytest.warns(UserWarning, match=line):
        assert read_plan(tmp_path / "plan.json", config_from_dict(settings_of(given))) == made


def test_every_open_setting_is_without_a_line():
    plans = (make_plan(config_from_dict(settings_of(BASES[base])), make_cluster(DEVICES["cpu"], 2)) for base in BASES)
    for plan, other in itertools.pairwise(plans):
        assert without_effect(config_from_dict(settings_of({})), plan) == [] and plan != other
