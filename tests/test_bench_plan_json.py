"""The comparison of the plans of shipped configs before and now."""

import copy

from bench import plan_json

PLAN = {"schema_version": 16, "kind": "ring", "parts": [{"step_s": 1.0}], "search": {"seconds": 2.0, "considered": 3}}


def test_only_what_is_left_out_may_differ():
    other = copy.deepcopy(PLAN) | {"schema_version": 17}
    other["search"]["seconds"] = 5.0
    assert plan_json.differences(PLAN, other) == []
    other["parts"][0]["step_s"] = 1.5
    assert plan_json.differences(PLAN, other) == ["parts.0.step_s: 1.0 -> 1.5"]


def test_types_absent_keys_and_the_order_of_keys_count():
    assert plan_json.differences({"a": 1, "b": []}, {"a": 1.0, "c": {}}) == [
        "a: 1 -> 1.0",
        "b: [] -> absent",
        "c: absent -> {}",
    ]
    assert plan_json.differences({"a": 1, "b": 2}, {"b": 2, "a": 1}) == ["the order of keys"]


def test_settings_of_the_model_are_compared_under_their_names_of_today():
    old = PLAN | {"model": {"num_layers": 4, "kinds.local.experts.shared_size": 0, "mlp_size": 0}}
    new = PLAN | {"model": {"num_layers": 4, "layer_types.local.experts.shared_size": None, "mlp_size": None}}
    assert plan_json.differences(old, new) == []
    new["model"]["mlp_size"] = 8
    assert plan_json.differences(old, new) == ["model.mlp_size: null -> 8"]
    assert plan_json.differences(PLAN, PLAN | {"kind": "hybrid"}) == ['kind: "ring" -> "hybrid"']


def test_both_versions_plan_the_same_configs():
    names = plan_json.configs(plan_json.HERE)
    assert len(names) >= 25 and all((plan_json.HERE / name).exists() for name in names)
