"""A layer of a user's own whose mixer has a state, and programs of models that have such layers."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from combinations import Draws, draw, draw_by_groups, with_norms  # noqa: F401
from exactness import small_model
from jax import lax
from programs import Case, batches

from sppo_jax.mixers.mixer import Operands, Place
from sppo_jax.models.layers import DecoderLayer, layer_of, normal_param

# What tells the layers with a state from others: the size of their MLP.
STATE_MLP = 11


class Decay:
    """S = decay S + k v', out = q S, in each document, where v' = v + tap times the value of the token before.

    Heads: q, k [T, K, A]; v [T, N, V]; decay [T, N], before a sigmoid. Constants: tap [N, V].
    """

    reach = 1

    def __eq__(self, other):
        return type(self) is type(other)

    def __hash__(self):
        return hash(type(self))

    def empty_state(self, operands: Operands):
        k, v = operands.heads["k"], operands.heads["v"]
        return {
            "sum": jnp.zeros((v.shape[1], k.shape[2], v.shape[2]), v.dtype),
            "tail": jnp.zeros(v.shape[1:], v.dtype),
        }

    def mix(self, operands: Operands, state, place: Place):
        heads, tap_NV = operands.heads, operands.constants["tap"]
        times = heads["v"].shape[1] // heads["k"].shape[1]
        q, k = (jnp.repeat(heads[name], times, axis=1) for name in "qk")
        documents = place.documents_T
        goes_on_T = documents == jnp.concatenate([place.before_W, documents[:-1]])
        is_real_T = jnp.arange(documents.size) < place.num_real

        def step(state, token):
            q_NA, k_NA, v_NV, decay_N, goes_on, is_real = token
            own_NV = v_NV + jnp.where(goes_on, tap_NV * state["tail"], 0)
            kept = jnp.where(goes_on, jax.nn.sigmoid(decay_N)[:, None, None] * state["sum"], 0)
            new = {"sum": kept + k_NA[:, :, None] * own_NV[:, None, :], "tail": v_NV}
            out_NV = jnp.einsum("na,nav->nv", q_NA, new["sum"])
            new = jax.tree.map(lambda a, b: jnp.where(is_real, a, b), new, state)
            return new, jnp.where(is_real, out_NV, 0)

        state, out = lax.scan(step, state, (q, k, heads["v"], heads["decay"], goes_on_T, is_real_T))
        return out, state

    def flops_per_token(self, operands: Operands) -> float:
        k, v = operands.heads["k"], operands.heads["v"]
        return 5.0 * v.shape[1] * k.shape[2] * v.shape[2]


class StateLayer(DecoderLayer):
    """A decoder layer whose attention is a decayed sum; heads as those of attention."""

    mixer_class = Decay

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.mixer = self.mixer_class()
        self.decay = normal_param(rngs, (config.hidden_size, config.num_heads), config.init_scale, self.query.dtype)
        self.tap = normal_param(rngs, (config.num_heads, config.head_dim), config.init_scale, self.query.dtype)

    def before_attention(self, x_TD, positions_T):
        q, k, v, *_ = super().before_attention(x_TD, positions_T)
        times = self.config.num_heads // self.config.num_kv_heads
        q = q.reshape(*q.shape[:-2], -1, times, q.shape[-1]).mean(-2)
        h_TD = x_TD if self.config.norms == "behind" else self.attention_norm(x_TD)
        decay = h_TD @ self._cast(self.decay)
        return Operands(
            {"q": q, "k": k, "v": jnp.repeat(v, times, axis=-2), "decay": decay}, {"tap": self._cast(self.tap)}
        )


def state_layer(config, *, rngs):
    """Makes a layer: one with a state where the MLP has the size that tells it."""
    return (StateLayer if config.mlp_size == STATE_MLP else layer_of(config))(config, rngs=rngs)


@dataclass(frozen=True)
class StateCase(Case):
    """A program of a model that has layers with a state."""

    layer: object = field(default=staticmethod(state_layer))

    def make_model(self, dtype=None):
        return small_model(dtype=dtype or self.dtype, layer=state_layer, **self.model)


def packed_batches(rng, plan, vocab_size, count):
    """Draws batches as `programs.batches` does; padding lies behind all documents."""
    return batches(rng, replace(plan, kernel="cudnn"), vocab_size, count)
