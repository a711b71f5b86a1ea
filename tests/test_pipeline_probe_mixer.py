"""Which rule a mixer with a state breaks is named when its layer is first used."""

import jax
import jax.numpy as jnp
import pytest
from exactness import small_model
from state_cases import STATE_MLP, Decay, StateLayer

from sppo_jax.mixers.mixer import Operands
from sppo_jax.models.layer_classes import layer_of
from sppo_jax.pipeline.probe.layer import check_block

SIZES = dict(num_layers=1, mlp_size=STATE_MLP, hidden_size=8, num_heads=4, num_kv_heads=2, vocab_size=7)


class Shortsighted(Decay):
    """Hands no value on to the next chunk."""

    def mix(self, operands, state, place):
        out, new = super().mix(operands, state, place)
        return out, new | {"tail": jnp.zeros_like(new["tail"])}


class Undocumented(Decay):
    """Sees no documents."""

    def mix(self, operands, state, place):
        zeros = jax.tree.map(jnp.zeros_like, (place.documents_T, place.before_W))
        return super().mix(operands, state, place._replace(documents_T=zeros[0], before_W=zeros[1]))


class Padded(Decay):
    """Takes padding for tokens."""

    def mix(self, operands, state, place):
        return super().mix(operands, state, place._replace(num_real=jnp.int32(place.documents_T.size)))


class Mixed(Decay):
    """Mixes heads."""

    def mix(self, operands, state, place):
        out, new = super().mix(operands, state, place)
        return out - out.mean(1, keepdims=True), new


class Flat(Decay):
    """Gives no heads."""

    def mix(self, operands, state, place):
        out, new = super().mix(operands, state, place)
        return out.reshape(out.shape[0], -1), new


class Incomplete:
    """Lacks methods."""

    reach = 0


def check(mixer=Decay, before=None, dtype="float32"):
    class Layer(StateLayer):
        mixer_class = mixer

        def before_attention(self, x_TD, positions_T):
            operands = super().before_attention(x_TD, positions_T)
            return operands if before is None else before(operands)

    model = small_model(dtype=dtype, layer=Layer, **SIZES)
    check_block(model.layers, model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_good_mixer_passes(dtype):
    check(dtype=dtype)


def test_the_gated_delta_rule_passes():
    model = small_model(dtype="float32", mixer="delta", **SIZES)
    assert type(model.layers) is layer_of(model.config)
    check_block(model.layers, model)


@pytest.mark.parametrize(
    ("mixer", "rule"),
    [
        (Shortsighted, "Shortsighted.mix must give in two parts what it gives as a whole"),
        (Undocumented, "Undocumented.mix must keep documents apart"),
        (Padded, "Padded.mix must let padding change nothing"),
        (Mixed, "Mixed.mix must give each share of the heads what it gives to all"),
        (Flat, r"Flat.mix must return its output as \[tokens, heads, size\]"),
        (
            Incomplete,
            "must be an Attention, or have empty_state, mix, flops_per_token and a whole reach, got a Incomplete",
        ),
    ],
)
def test_a_broken_rule_is_named(mixer, rule):
    with pytest.raises(ValueError, match=rule):
        check(mixer)


@pytest.mark.parametrize(
    ("before", "rule"),
    [
        (lambda operands: tuple(operands), "must return Operands for a mixer with a state, got a tuple"),
        (lambda operands: operands._replace(heads=operands.heads["v"][:, 0, 0]), "with heads as floating-point arrays"),
        (lambda operands: Operands(operands.heads, {"tap": jnp.ones(3)}), "must be a multiple of the heads of each"),
    ],
)
def test_operands_are_checked(before, rule):
    with pytest.raises(ValueError, match=rule):
        check(Total if "multiple" in rule else Decay, before)


class Total(Decay):
    """Reads no constants."""

    def mix(self, operands, state, place):
        tap = jnp.zeros(operands.heads["v"].shape[1:], operands.heads["v"].dtype)
        return super().mix(operands._replace(constants={"tap": tap}), state, place)
