"""Parts of parameters cut straight from tensors: any part of any layout is what cutting the whole gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo_jax.config import DeltaConfig, ModelConfig
from sppo_jax.config.experts import ExpertsConfig
from sppo_jax.models.hf.experts import form_of
from sppo_jax.models.hf.form import Form, folder_form
from sppo_jax.models.hf.tensor_rules import read_parameter, to_tensor
from sppo_jax.models.hf.tensors import parameter_shapes, places, rules_for, sizes_of, tensor_shapes

SHAPE = dict(
    vocab_size=11, hidden_size=6, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=10, qkv_bias=True, qk_norm=True
)
# Neither the size of an expert nor twice the size is the hidden size, so that no transposed tensor fits.
EXPERTS = dict(count=5, size=4, chosen=2)
SHARED = dict(shared_size=7, shared_gate=True, choice_bias=True)
# All sizes are unlike, so that no part fits in the place of another.
DELTA = DeltaConfig(value_heads=6, key_heads=2, key_size=5, value_size=4, taps=3)
CASES = {
    "mlp": (ModelConfig(**SHAPE, mlp_size=7), Form()),
    "norms": (ModelConfig(**SHAPE, mlp_size=7, norms="both", qk_norm_over_heads=True), Form()),
    "norms behind": (ModelConfig(**SHAPE, mlp_size=7, norms="behind"), Form()),
    "separate": (ModelConfig(**SHAPE, experts=ExpertsConfig(**EXPERTS, **SHARED)), Form()),
    "halves": (ModelConfig(**SHAPE, experts=ExpertsConfig(**EXPERTS, **SHARED)), Form("halves")),
    "interleaved": (
        ModelConfig(**SHAPE, experts=ExpertsConfig(**EXPERTS, bias=True, mlp="clamped")),
        Form("interleaved"),
    ),
    "gated": (ModelConfig(**SHAPE, mlp_size=7, output_gate=True), Form()),
    "apart": (ModelConfig(**SHAPE, mlp_size=7, mixer="delta", delta=DELTA), Form()),
    "joined": (ModelConfig(**SHAPE, mlp_size=7, mixer="delta", delta=DELTA), Form(delta="joined")),
}
TENSORS = {
    case: {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * number
        for number, (name, shape) in enumerate(tensor_shapes(*CASES[case]).items())
    }
    for case in CASES
}
# How a tensor of a layer becomes a parameter of the layer, written out for those that are not the same.
SPLIT = {"query": 4, "key": 2, "value": 2}
SEPARATE = ("gate", "up", "down")
BY_HAND = {
    **{name: lambda x, n=n: x.T.reshape(6, n, 10) for name, n in SPLIT.items()},
    **{f"{name}_bias": lambda x, n=n: x.reshape(n, 10) for name, n in SPLIT.items()},
    "output": lambda x: x.T.reshape(4, 10, 6),
    **{name: np.transpose for name in (*SEPARATE, "head")},
    **{f"experts/{name}": np.transpose for name in ("router", "shared_gate", "shared_up", "shared_down")},
    "experts/shared_router": lambda x: x[0],
}
HALVES = {
    "experts/gate": lambda x: x[:, :4].swapaxes(1, 2),
    "experts/up": lambda x: x[:, 4:].swapaxes(1, 2),
    "experts/down": lambda x: x.swapaxes(1, 2),
}
INTERLEAVED = {
    "experts/gate": lambda x: x[..., ::2],
    "experts/up": lambda x: x[..., 1::2],
    "experts/gate_bias": lambda x: x[:, ::2],
    "experts/up_bias": lambda x: x[:, 1::2],
}
GATED = {
    "query": lambda x: x.reshape(4, 2, 10, 6)[:, 0].transpose(2, 0, 1),
    "output_gate": lambda x: x.reshape(4, 2, 10, 6)[:, 1].transpose(2, 0, 1),
}
# Of 2 key heads of 5 and 6 value heads of 4.
DELTA_NET = {
    "query_taps": lambda x: x[:10, 0].reshape(2, 5, 3),
    "key_taps": lambda x: x[10:20, 0].reshape(2, 5, 3),
    "value_taps": lambda x: x[20:, 0].reshape(6, 4, 3),
    "output": lambda x: x.T.reshape(6, 4, 6),
}
APART = DELTA_NET | {
    "query": lambda x: x[:10].T.reshape(6, 2, 5),
    "key": lambda x: x[10:20].T.reshape(6, 2, 5),
    "value": lambda x: x[20:].T.reshape(6, 6, 4),
    "output_gate": lambda x: x.T.reshape(6, 6, 4),
    "write": np.transpose,
    "decay": np.transpose,
}


def of_key_heads(start, stop, *size):
    """Returns what cuts rows of each key head, which a tensor has behind one another."""
    return lambda x: np.concatenate([head[start:stop] for head in np.split(x, 2)]).T.reshape(6, *size)


JOINED = DELTA_NET | {
    "query": of_key_heads(0, 5, 2, 5),
    "key": of_key_heads(5, 10, 2, 5),
    "value": of_key_heads(10, 22, 6, 4),
    "output_gate": of_key_heads(22, 34, 6, 4),
    "write": of_key_heads(0, 3, 6),
    "decay": of_key_heads(3, 6, 6),
}
OF_CASE = dict(halves=HALVES, interleaved=INTERLEAVED, gated=GATED, apart=APART, joined=JOINED)


def by_hand(case, rule):
    """The whole parameter from whole tensors."""
    name, tensors = rule.ours.removeprefix("layers/"), TENSORS[case]
    forms = BY_HAND | OF_CASE.get(case, {})
    change = forms.get(name, lambda x: x)
    if not rule.stack:
        return change(tensors[rule.theirs])
    if case == "separate" and name in [f"experts/{part}" for part in SEPARATE]:
        return np.stack(
            [np.stack([tensors[rule.theirs.format(layer, expert)].T for expert in range(5)]) for layer in range(3)]
        )
    return np.stack([change(tensors[rule.theirs.format(layer)]) for layer in range(3)])


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        pytest.param(case, rule, id=f"{case}-{rule.ours}")
        for case in CASES
        for rule in rules_for(*CASES[case]).values()
        if case in ("mlp", "gated", "apart", "joined") or "experts" in rule.ours
    ],
)
@settings(max_examples=25)
@given(data=st.data())
def test_a_part_is_cut_from_the_whole(case, rule, data):
    model, _ = CASES[case]
    want = by_hand(case, rule)
    assert want.shape == parameter_shapes(*CASES[case])[rule.ours]
    ends = [sorted((data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, size)))) for size in want.shape]
    index = tuple(slice(start, max(stop, start + 1)) for start, stop in ends)
    got = read_parameter(rule, lambda name, part: TENSORS[case][name][part], index, sizes_of(model), np.dtype("f8"))
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, want[index])


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_comes_back_from_its_parameters(case):
    seen = []
    for name, rules, index in places(*CASES[case]):
        values = [by_hand(case, rule)[index] for rule in rules]
        np.testing.assert_array_equal(to_tensor(rules, values, sizes_of(CASES[case][0])), TENSORS[case][name])
        seen.append(name)
    assert seen == list(TENSORS[case])
    num_elements = sum(np.prod(shape) for shape in parameter_shapes(*CASES[case]).values())
    assert sum(x.size for x in TENSORS[case].values()) == num_elements


def test_only_the_wanted_experts_and_halves_are_read():
    name, whole = "model.layers.1.mlp.experts.", (slice(0, 4), slice(0, 6))
    for case, want in {
        "halves": [(name + "gate_up_proj", (slice(2, 4), slice(4, 8), slice(0, 6)))],
        "separate": [(f"{name}{expert}.up_proj.weight", whole) for expert in (2, 3)],
    }.items():
        model, reads = CASES[case][0], []

        def read(name, part, case=case, reads=reads):
            reads.append((name, part))
            return TENSORS[case][name][part]

        index = (slice(1, 2), slice(2, 4), slice(0, 6), slice(0, 4))
        rule = rules_for(*CASES[case])["layers/experts/up"]
        read_parameter(rule, read, index, sizes_of(model), np.dtype("f4"))
        assert reads == want


def test_names_alone_tell_the_form():
    assert form_of(TENSORS["separate"], "halves") == form_of(TENSORS["mlp"], "halves") == "separate"
    assert form_of(TENSORS["halves"], "halves") == form_of(TENSORS["interleaved"], "halves") == "halves"
    assert form_of(TENSORS["interleaved"], "interleaved") == "interleaved"
    assert {folder_form(TENSORS[case], "halves").delta for case in ("mlp", "apart")} == {"apart"}
    assert folder_form(TENSORS["joined"], "halves") == Form("separate", "joined")
