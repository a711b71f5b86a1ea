"""Settings under names of before, through each way in: a file, an override, Python, a checkpoint and plan.json."""

import json
import warnings
from dataclasses import replace
from functools import reduce

import pytest
import yaml

from sppo_jax.commands.command import read_plan
from sppo_jax.config import ConfigError, config_from_dict, load_config, to_dict
from sppo_jax.plan.json_format import SCHEMA_VERSION
from sppo_jax.plan.plan import Plan
from sppo_jax.plan.renamed import RENAMED, find_renamed, new_name, new_value
from sppo_jax.search.make import make_plan
from sppo_jax.train.evaluate_saved import saved_config

MODEL = dict(vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, mlp_size=32)
LOCAL = {"local": {"sliding_window": 8}}
# Each old setting: what a user wrote, and the same under the name of today.
OLD = {
    "sequence.kind": ({"sequence": {"kind": "ring"}}, {"sequence": {"split": "ring"}}),
    "model.kinds": (
        {"model": {"layers": "local,full", "kinds": LOCAL}},
        {"model": {"layers": "local,full", "layer_types": LOCAL}},
    ),
}
# Each setting of which 0 once said that none is given: as a user wrote it, and as today.
ZEROS = {
    "sequence.ulysses": "auto",
    "sequence.per_step": "auto",
    "model.num_kv_heads": "auto",
    "model.head_dim": "auto",
    "model.mlp_size": None,
    "model.query_scale": None,
    "model.logit_cap": None,
    "model.sliding_window": None,
    "model.delta.value_heads": "auto",
    "model.delta.key_heads": "auto",
    "model.delta.key_size": "auto",
    "model.delta.value_size": "auto",
    "model.experts.size": "auto",
    "model.experts.shared_size": None,
    "model.rope.original_length": None,
    "model.layer_types.local.num_kv_heads": "auto",
    "model.layer_types.local.head_dim": "auto",
    "model.layer_types.local.mlp_size": "none",
    "model.layer_types.local.query_scale": "none",
    "model.layer_types.local.sliding_window": "none",
    "model.layer_types.local.rope.original_length": None,
    "model.layer_types.local.experts.shared_size": None,
}


def nested(name: str, value) -> dict:
    """Returns the settings of a config that has one setting, by its dotted name."""
    for part in reversed(name.split(".")):
        value = {part: value}
    if ".layer_types." in name:
        value["model"]["layers"] = "local,full"
    if name.endswith(".mlp_size"):  # of models whose layers have experts alone
        value["model"]["experts"] = {"count": 4, "chosen": 2, "size": 8}
    return value


def settings(changes: dict) -> dict:
    base = {"model": MODEL, "sequence": {"length": 64}, "train": {"steps": 1}}
    return {name: base.get(name, {}) | changes.get(name, {}) for name in base | changes}


def lines_of(load) -> tuple:
    """Returns what a function returns, and the lines it says."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = load()
    return result, [str(each.message) for each in found]


def said(name: str) -> list[str]:
    """Returns the lines that an old name is worth."""
    return [each.line for each in RENAMED if f"{each.section}.{each.old}" == name and each.line]


def overrides(changes: dict) -> list[str]:
    return [
        f"{section}.{name}={json.dumps(value)}" for section, each in changes.items() for name, value in each.items()
    ]


@pytest.mark.parametrize("name", OLD)
def test_a_file_an_override_and_python_take_the_old_name_with_its_line(name, tmp_path):
    old, new = OLD[name]
    path = tmp_path / "c.yaml"
    wanted, none = lines_of(lambda: config_from_dict(settings(new)))
    assert none == []
    assert lines_of(lambda: config_from_dict(settings(old))) == (wanted, said(name))
    path.write_text(yaml.safe_dump(settings(old)))
    assert lines_of(lambda: load_config(path)) == (wanted, said(name))
    path.write_text(yaml.safe_dump(settings({})))
    assert lines_of(lambda: load_config(path, overrides(old))) == (wanted, said(name))
    whole = [f"{section}={json.dumps(values)}" for section, values in settings(old).items()]
    assert lines_of(lambda: load_config(path, whole)) == (wanted, said(name))


@pytest.mark.parametrize("name", ZEROS)
def test_a_zero_that_is_none_is_taken_with_its_line(name, tmp_path):
    old, new = settings(nested(name, 0)), settings(nested(name, ZEROS[name]))
    path, line = tmp_path / "c.yaml", [f"{name}=0 is now {json.dumps(ZEROS[name])}; 0 is read until version 0.3"]
    line = [each.replace('"', "") for each in line]
    wanted, none = lines_of(lambda: config_from_dict(new))
    assert none == [] and to_dict(wanted) == to_dict(config_from_dict(to_dict(wanted)))
    assert lines_of(lambda: config_from_dict(old)) == (wanted, line)
    path.write_text(yaml.safe_dump(old))
    assert lines_of(lambda: load_config(path)) == (wanted, line)
    path.write_text(yaml.safe_dump(settings(nested(name, 3))))
    assert lines_of(lambda: load_config(path, [f"{name}=0"])) == (wanted, line)


def test_a_number_is_a_number():
    """A model without experts has 0 of them; a dataclass that is made by hand reads 0 for none as a config does."""
    assert lines_of(lambda: config_from_dict(settings({"model": {"experts": {"count": 0}}})))[1] == []
    assert new_value("model.experts.count", 0) == 0 and new_value("model.head_dim", False) is False
    model = config_from_dict(settings({})).model
    line = "model.sliding_window=0 is now null; 0 is read until version 0.3"
    assert lines_of(lambda: replace(model, sliding_window=0)) == (model, [line])
    types = {"local": {"sliding_window": "none"}}
    mixed = {"model": {"sliding_window": 4, "layers": "local,full", "layer_types": types}}
    model = config_from_dict(settings(mixed)).model
    assert [model.of_type(name).sliding_window for name in ("local", "full")] == [None, 4]


@pytest.mark.parametrize("name", OLD)
def test_a_run_and_its_checkpoint_load_in_silence(name, tmp_path):
    """Both hold every setting, as version 0.1 named them; an evaluation may change some."""
    wanted = config_from_dict(settings(OLD[name][1]))
    saved = as_saved(wanted)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    assert lines_of(lambda: load_config(tmp_path / "config.yaml")) == (wanted, [])
    assert lines_of(lambda: config_from_dict(saved)) == (wanted, [])
    assert lines_of(lambda: saved_config({"config": saved}, [])) == (wanted, [])
    changed, none = lines_of(lambda: saved_config({"config": saved}, ["mesh.data=1"]))
    assert none == [] and changed.model == wanted.model


def as_saved(config) -> dict:
    """Returns a config as a run of version 0.1 wrote it."""
    saved = to_dict(config)
    for each in RENAMED:
        saved[each.section][each.old] = saved[each.section].pop(each.new)
    for name in ZEROS:
        *path, last = name.split(".")
        section = reduce(lambda found, part: found.get(part, {}), path, saved)
        if section.get(last, 1) == ZEROS[name]:
            section[last] = 0
    assert saved["sequence"]["per_step"] == saved["model"]["logit_cap"] == saved["model"]["delta"]["key_size"] == 0
    return saved


def test_a_plan_of_schema_16_has_the_settings_of_today(tmp_path):
    config = config_from_dict(settings(OLD["model.kinds"][1] | {"train": {"steps": 1, "devices": "cpu:1"}}))
    plan = make_plan(config)
    assert plan.schema_version == SCHEMA_VERSION and "layer_types.local.sliding_window" in plan.model
    older = plan.to_dict() | {"schema_version": 16}
    older["model"] = {name.replace("layer_types.", "kinds."): size for name, size in older["model"].items()}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(older))
    assert lines_of(lambda: Plan.from_json(path.read_text())) == (plan, [])
    assert lines_of(lambda: read_plan(path, config)) == (plan, [])


def test_an_override_of_either_name_replaces_the_value_of_the_other():
    old, new = settings(OLD["sequence.kind"][0]), settings(OLD["sequence.kind"][1])
    assert config_from_dict(old, ["sequence.split=hybrid"]).sequence.split == "hybrid"
    assert config_from_dict(new, ["sequence.kind=hybrid"]).sequence.split == "hybrid"
    assert config_from_dict(old, ["sequence.kind="]).sequence.split == "auto"
    mixed = settings(OLD["model.kinds"][1])
    config, lines = lines_of(lambda: config_from_dict(mixed, ["model.kinds.local.sliding_window=4"]))
    assert config.model.layer_types["local"].sliding_window == 4 and lines == said("model.kinds")


def test_both_names_are_refused():
    with pytest.raises(ConfigError, match="sequence.kind is now sequence.split, got both; remove sequence.kind"):
        config_from_dict(settings({"sequence": {"kind": "ring", "split": "ring"}}))


def test_only_whole_names_are_old_ones():
    assert new_name("model.kinds.local.head_dim") == "model.layer_types.local.head_dim"
    assert find_renamed("model.kindness") is None and new_name("stash.kind") == "stash.kind"
    assert said("model.kinds") == ["model.kinds is now model.layer_types; the old name is read until version 0.3"]
    assert said("sequence.kind") == []


def test_a_plan_of_schema_16_has_no_zero_for_none():
    experts = {"count": 4, "chosen": 2, "size": 8}
    config = config_from_dict(settings({"model": {"experts": experts}, "train": {"steps": 1, "devices": "cpu:1"}}))
    plan = make_plan(config)
    older = plan.to_dict() | {"schema_version": 16}
    assert older["model"]["experts.shared_size"] is None
    older["model"] = older["model"] | {"experts.shared_size": 0}
    assert lines_of(lambda: Plan.from_dict(older)) == (plan, [])
