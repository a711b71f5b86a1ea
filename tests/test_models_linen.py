"""Linen through the bridge: parameters there and back, and what cannot be a layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_cases import Total
from flax import linen, nnx

from sppo_jax.config import ModelConfig
from sppo_jax.mixers.mixer import Operands
from sppo_jax.models import Decoder
from sppo_jax.models.linen import LinenLayer, linen_decoder, linen_layer, params_from_linen, params_to_linen

SHAPE = ModelConfig(vocab_size=11, hidden_size=8, num_layers=2, num_heads=2, mlp_size=12)
TOKENS = jnp.arange(6, dtype=jnp.int32)[None]


def test_a_decoder_under_linen_gives_the_logits_of_the_same_parameters():
    module, model = linen_decoder(SHAPE), Decoder(SHAPE, rngs=nnx.Rngs(params=0))
    variables = module.init(jax.random.key(1), TOKENS)
    like = nnx.state(model, nnx.Param)
    params = params_from_linen(variables, like)
    assert jax.tree.structure(params) == jax.tree.structure(like)
    want = nnx.merge(nnx.graphdef(model), params)(TOKENS)
    np.testing.assert_allclose(module.apply(variables, TOKENS), want, rtol=1e-6)
    again = params_to_linen(params)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(linen.unbox(variables)), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(module.apply(again, TOKENS), module.apply(variables, TOKENS))


def test_parameters_of_another_decoder_are_refused():
    other = ModelConfig(vocab_size=11, hidden_size=8, num_layers=2, num_heads=2, mlp_size=12, mlp="gelu")
    like = nnx.state(Decoder(SHAPE, rngs=nnx.Rngs(params=0)), nnx.Param)
    with pytest.raises(ValueError, match="those of the same decoder") as error:
        params_from_linen(linen_decoder(other).init(jax.random.key(0), TOKENS), like)
    assert "\n" not in str(error.value)


class Summing(linen.Module):
    """A block whose mixer has a state."""

    mixer = Total()

    def setup(self):
        self.value, self.back = linen.Dense(8), linen.Dense(8)

    def before_attention(self, x, positions):
        return Operands(self.value(x).reshape(*x.shape[:-1], 2, 4), ())

    def after_attention(self, x, out):
        return x + self.back(out.reshape(x.shape))


def test_a_linen_block_brings_a_mixer_with_a_state():
    model = Decoder(SHAPE, rngs=nnx.Rngs(0), layer=linen_layer(lambda _: Summing()))
    assert model.layers.mixer == Total()
    want = model(TOKENS)
    np.testing.assert_allclose(model(TOKENS[:, :4]), want[:, :4], rtol=1e-5)
    changed = model(TOKENS.at[0, 0].set(7))
    assert all(np.abs(changed - want).max(-1)[0] > 0), "every token sees the first"


class OneMethod(linen.Module):
    def before_attention(self, x, positions):
        return x, x, x


class Counting(linen.Module):
    """Keeps a count beside its parameters."""

    def setup(self):
        self.count = self.variable("counts", "calls", lambda: jnp.zeros(()))

    def before_attention(self, x, positions):
        return (x[..., None, :] * self.count.value.astype(x.dtype),) * 3

    def after_attention(self, x, out):
        return x + out[..., 0, :]


@pytest.mark.parametrize(
    "module,words",
    [
        (OneMethod(), "must have the method after_attention, got OneMethod without"),
        (Counting(), "must hold parameters only"),
    ],
)
def test_what_is_no_layer_is_refused(module, words):
    with pytest.raises(ValueError, match=words):
        LinenLayer(module, 8, rngs=nnx.Rngs(params=0))
