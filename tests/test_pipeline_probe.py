"""Blocks that break the contract of a layer are refused in a line that names what they do."""

import jax.numpy as jnp
import pytest
from exactness import small_model, small_plan
from flax import nnx

from sppo_jax.models.layers import DecoderLayer, ExpertsLayer
from sppo_jax.pipeline.api import evaluate, value_and_grad


class Plain(DecoderLayer):
    """Keeps the contract, without being the layer itself."""


class MixesAfter(DecoderLayer):
    def after_attention(self, x_TD, out_TNH):
        y = super().after_attention(x_TD, out_TNH)
        return y + 1e-3 * y.mean(0, keepdims=True)


class MixesBefore(DecoderLayer):
    def before_attention(self, x_TD, positions_T):
        return super().before_attention(x_TD - jnp.roll(x_TD, 1, axis=0), positions_T)


class CountsTokens(DecoderLayer):
    def after_attention(self, x_TD, out_TNH):
        return super().after_attention(x_TD, out_TNH) * jnp.asarray(x_TD.shape[0], x_TD.dtype)


class Drops(DecoderLayer):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def after_attention(self, x_TD, out_TNH):
        return self.dropout(super().after_attention(x_TD, out_TNH))


class DropsNothing(Drops):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True)


class Counts(DecoderLayer):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def before_attention(self, x_TD, positions_T):
        self.calls[...] = self.calls[...] + 1
        return super().before_attention(x_TD, positions_T)


class Float32(DecoderLayer):
    def after_attention(self, x_TD, out_TNH):
        return super().after_attention(x_TD, out_TNH).astype(jnp.float32)


class Wide(DecoderLayer):
    def after_attention(self, x_TD, out_TNH):
        return jnp.concatenate([super().after_attention(x_TD, out_TNH)] * 2, axis=-1)


class Flat(DecoderLayer):
    def before_attention(self, x_TD, positions_T):
        q, k, v = super().before_attention(x_TD, positions_T)
        return q.reshape(q.shape[0], -1), k, v


class OddHeads(DecoderLayer):
    def before_attention(self, x_TD, positions_T):
        q, k, v = super().before_attention(x_TD, positions_T)
        return q[:, :3], k[:, :2], v[:, :2]


class Shares(DecoderLayer):
    """Keeps the contract, and returns a share of each token."""

    def after_attention(self, x_TD, out_TNH):
        y = super().after_attention(x_TD, out_TNH)
        return y, jnp.mean(jnp.square(y.astype(jnp.float32)), axis=-1)


class SharesOfAll(DecoderLayer):
    def after_attention(self, x_TD, out_TNH):
        y = super().after_attention(x_TD, out_TNH)
        return y, jnp.sum(y.astype(jnp.float32))


class ChoosesByNeighbours(ExpertsLayer):
    def choose(self, x_TD, out_TNH):
        return super().choose(-jnp.roll(x_TD, 1, axis=0), jnp.roll(out_TNH, 1, axis=0))


REFUSED = {
    MixesAfter: r"MixesAfter.after_attention must treat every token by itself, .* on the tokens next to it",
    MixesBefore: r"MixesBefore.before_attention must treat every token by itself",
    CountsTokens: r"CountsTokens.after_attention must treat every token by itself",
    Drops: r"Drops must do the same to a token every time, .* random numbers; .*deterministic=True",
    Counts: r"Counts must do the same to a token every time, .* changes its own state",
    Float32: r"Float32.after_attention must return the next layer's input, \[2, 16\] in bfloat16, got .* float32",
    Wide: r"Wide.after_attention must return the next layer's input, \[2, 16\] .* got \[2, 32\]",
    Flat: r"Flat.before_attention must return q as \[tokens, heads, size\], got \[2, 24\]",
    SharesOfAll: r"SharesOfAll.after_attention must return shares as .* \[tokens, ...\], got \[\] in float32",
    ChoosesByNeighbours: r"ChoosesByNeighbours.after_attention must treat every token by itself",
    OddHeads: r"a multiple of this number for q, got heads of q, k and v: 3, 2 and 2",
}


def model_of(layer, dtype="bfloat16"):
    experts = dict(count=8, chosen=2, size=5) if issubclass(layer, ExpertsLayer) else {}
    sizes = dict(hidden_size=16, head_dim=6, num_heads=4, num_kv_heads=4, experts=experts)
    return small_model(layer=layer, dtype=dtype, **sizes)


@pytest.mark.parametrize("layer", REFUSED)
@pytest.mark.parametrize("make", [value_and_grad, evaluate])
def test_a_block_that_breaks_the_contract_is_refused(layer, make):
    with pytest.raises(ValueError, match=REFUSED[layer]) as refused:
        make(small_plan((8, 8)), model_of(layer))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("layer", [Plain, DropsNothing, Shares])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_block_that_keeps_it_is_taken(layer, dtype):
    value_and_grad(small_plan((8, 8)), model_of(layer, dtype))
    value_and_grad(small_plan((8, 8)), nnx.eval_shape(lambda: model_of(layer, dtype)))


def test_a_shape_alone_is_probed_too():
    with pytest.raises(ValueError, match="must treat every token by itself"):
        value_and_grad(small_plan((8, 8)), nnx.eval_shape(lambda: model_of(MixesAfter)))
