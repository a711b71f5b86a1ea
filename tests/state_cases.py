"""A layer of a user's own whose mixer has a state, and programs of models that have such layers."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from combinations import Draws, draw, draw_by_groups
from exactness import small_model
from jax import lax
from programs import Case, batches

from sppo_jax.mixers.mixer import Operands, TokenRun
from sppo_jax.models.layer_classes import layer_of
from sppo_jax.models.layers import DecoderLayer, ExpertsLayer, normal_param

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

    def mix(self, operands: Operands, state, place: TokenRun):
        heads, tap_NV = operands.heads, operands.constants["tap"]
        times = heads["v"].shape[1] // heads["k"].shape[1]
        q, k = (jnp.repeat(heads[name], times, axis=1) for name in "qk")
        documents = place.documents_T
        goes_on_T = documents == jnp.concatenate([place.before_W, documents[:-1]])
        is_real_T = jnp.arange(documents.size, dtype=jnp.int32) < place.num_real

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


class Unaware(Decay):
    """The same without an eye on documents; where a chunk has no token, it spoils the state."""

    reach = 0

    def mix(self, operands: Operands, state, place: TokenRun):
        # As if the tokens before the run were of the document of the run.
        out, new = super().mix(operands, state, place._replace(before_W=place.documents_T[:1]))
        return out, jax.tree.map(lambda x: jnp.where(place.num_real == 0, 2 * x + 1, x), new)


class _WithState:
    """What a layer with a state has in place of attention; its heads are those of the attention."""

    mixer_class: type = Decay

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
        heads = {"q": q, "k": k, "v": jnp.repeat(v, times, axis=-2), "decay": h_TD @ self._cast(self.decay)}
        return Operands(heads, {"tap": self._cast(self.tap)})


class StateLayer(_WithState, DecoderLayer):
    """A decoder layer whose attention is a decayed sum."""


class UnawareLayer(StateLayer):
    """The same with the mixer that sees no documents."""

    mixer_class = Unaware


class StateExpertsLayer(_WithState, ExpertsLayer):
    """The same with experts."""


def state_layer(config, *, rngs):
    """Makes a layer: one with a state where the MLP has the size that tells it."""
    if config.mlp_size != STATE_MLP:
        return layer_of(config)(config, rngs=rngs)
    return (StateExpertsLayer if config.experts.count else StateLayer)(config, rngs=rngs)


@dataclass(frozen=True)
class StateCase(Case):
    """A program of a model that has layers with a state."""

    def make_model(self, dtype=None):
        return small_model(dtype=dtype or self.dtype, layer=state_layer, **self.model)


def packed_batches(rng, plan, vocab_size, count):
    """Draws batches as `programs.batches` does; padding lies behind all documents."""
    return batches(rng, replace(plan, kernel="cudnn"), vocab_size, count)


def draw_states(seed: int) -> StateCase:
    """Draws a program of layers with a state and others: even seeds a depth-first one, odd seeds a breadth-first one.

    Args:
        seed: the same seed gives the same program.
    """
    case, draws = (draw_by_groups if seed % 2 else draw)(seed), Draws(seed + 9000)
    plan, seq = case.plan | {"kv_grad_dtype": "float32"}, case.plan["mesh"][2]
    model = {name: value for name, value in case.model.items() if name != "qkv_bias"}
    groups = plan["mesh"][1] * plan["interleave"]
    kinds = {"state": _draw_state(draws, seq)}
    others = draws.pick((("full",), ("full", "delta"), ("full", "turned"), ("full", "other"), ("delta",), ()))
    if "turned" in others:
        kinds["turned"] = kinds["state"] | {"rope": {"theta": 50.0}}
    if "delta" in others:
        kinds["delta"] = {"delta": _draw_delta(draws, seq)}
    if "other" in others:
        kinds["other"] = _draw_state(draws, seq)
    extra = draws.number(0, 2) if groups < 3 else 0  # or the program takes minutes to compile
    of_group = ["state", *others[:1], *[draws.pick(("state", *others)) for _ in range(extra)], *others[1:]]
    order = sorted(of_group, key=lambda _: draws.number(0, 99))
    if others and draws.chance(0.3):
        model["experts"] = dict(count=4, chosen=2, size=5, balance=0.3, shared_size=None)
        kinds["state"] |= draws.pick(({}, {"experts": {"count": 0}}))
    if "full" not in others:
        plan["kv"] = "keep"
        if plan["places"][:2] == ("keep", "host"):
            plan["places"] = ("host", "host", plan["places"][2])
    model |= dict(num_layers=groups * len(order), layers=f"{groups}x({','.join(order)})", layer_types=kinds)
    return StateCase(plan, model, blocks=case.blocks, optimised=case.optimised)


def _draw_delta(draws: Draws, seq: int) -> dict:
    heads = seq * draws.number(1, 2)
    of_keys = draws.pick([count for count in range(1, heads + 1) if heads % count == 0])
    sizes = dict(key_size=draws.number(2, 5), value_size=draws.number(2, 5))
    return dict(value_heads=heads, key_heads=of_keys, taps=draws.number(1, 4)) | sizes


def _draw_state(draws: Draws, seq: int) -> dict:
    heads = seq * draws.number(1, 2)
    of_keys = draws.pick([count for count in range(1, heads + 1) if heads % count == 0])
    sizes = dict(num_heads=heads, num_kv_heads=of_keys, head_dim=2 * draws.number(1, 3))
    return sizes | dict(mlp_size=STATE_MLP, norms=draws.pick(("before", "behind", "both")))
