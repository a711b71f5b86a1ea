"""Decoders with the gated delta rule, and with a user's own mixer: definitions, documents, parameters, counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_cases import Total, plain_mix, worst
from exactness import dense_step, small_model
from flax import nnx
from jax.tree_util import DictKey

from sppo_jax.config import ModelConfig
from sppo_jax.mixers import dense
from sppo_jax.mixers.delta import GatedDelta
from sppo_jax.mixers.mixer import Operands
from sppo_jax.models import Decoder, num_params
from sppo_jax.models.leaves import is_matrix

HYBRID = dict(layers="2x(delta,full)", num_layers=4)
KINDS = {
    "hybrid": HYBRID,
    "delta alone": dict(mixer="delta", num_layers=2),
    "experts": HYBRID | dict(experts=dict(count=4, chosen=2, size=20, shared_size=12, shared_gate=True)),
    "sizes of its own, norms behind": dict(
        mixer="delta",
        num_layers=1,
        delta=dict(value_heads=6, key_heads=2, key_size=5, value_size=7, taps=3),
        norms="behind",
        output_bias=True,
        unit_norm=True,
    ),
    "four norms": HYBRID | dict(norms="both", mlp="geglu", output_gate=True, qk_norm=True),
}


def draw_batch(rng, rows=2, length=70, padding=6):
    tokens = rng.integers(0, 53, (rows, length)).astype(np.int32)
    documents = np.sort(rng.integers(0, 4, (rows, length)), axis=1).astype(np.int32)
    documents[1:, length - padding :] = -1
    starts = np.maximum.accumulate(
        np.where(np.diff(documents, axis=1, prepend=-9) != 0, np.arange(length, dtype=np.int32), 0), axis=1
    )
    positions = (np.arange(length, dtype=np.int32) - starts).astype(np.int32)
    targets = np.where((documents >= 0) & (np.roll(documents, -1, 1) == documents), np.roll(tokens, -1, 1), -1)
    return dict(tokens=tokens, targets=targets, positions=positions, document_ids=documents)


@pytest.mark.parametrize(
    "name",
    [
        "sizes of its own, norms behind",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("experts", "hybrid", "four norms")),
    ],
)
def test_the_dense_model_is_that_of_the_recurrence(x64, name, monkeypatch):
    """Loss and every gradient, with the mixer's definition in its place."""
    model, batch = small_model(1, **KINDS[name]), draw_batch(np.random.default_rng(0))
    params = nnx.state(model, nnx.Param)
    got = dense_step(model)(params, batch)
    monkeypatch.setattr(GatedDelta, "mix", lambda self, *args: plain_mix(*args))
    want = dense_step(model)(params, batch)
    assert worst(got, want) < 1e-9 and float(want[0]) > 1
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(want[1]) if x.size)


@pytest.mark.slow
def test_documents_of_a_sequence_are_as_alone(x64):
    model, batch = small_model(2, layers="delta,full", num_layers=2), draw_batch(np.random.default_rng(1))
    packed = jax.jit(lambda b: model(b["tokens"], b["positions"], b["document_ids"]))(batch)
    for document in (0, 2):
        at = np.flatnonzero(batch["document_ids"][1] == document)
        assert worst(packed[1][at], model(batch["tokens"][1][None, at])[0]) < 1e-12


@pytest.mark.parametrize("name", KINDS)
def test_parameters_are_counted(name):
    config = ModelConfig(**dict(vocab_size=53, hidden_size=24, num_heads=4, num_kv_heads=2, mlp_size=40) | KINDS[name])
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))) == num_params(config)


def test_taps_and_decays_are_no_matrices():
    model = small_model(mixer="delta", num_layers=2, dtype="float32")
    layers = nnx.state(model, nnx.Param)["layers"]
    matrices = {name for name in layers if is_matrix((DictKey("layers"), DictKey(name)), _own(layers[name]))}
    assert matrices == {
        "query", "key", "value", "output_gate", "output", "write", "decay", "gate", "up", "down",
    }  # fmt: skip


def _own(leaf):
    return jax.tree.leaves(leaf)[0]


def test_decays_begin_between_a_step_and_a_thousand():
    """Some heads forget a token at once and others keep it: rates and steps as they are drawn."""
    config = ModelConfig(vocab_size=5, hidden_size=8, num_layers=8, num_heads=64, head_dim=2, mlp_size=4, mixer="delta")
    layers = Decoder(config, rngs=nnx.Rngs(0)).layers
    halves = np.log(2) / (np.exp(layers.decay_log[...]) * jax.nn.softplus(layers.decay_bias[...]))
    assert halves.min() < 1 and halves.max() > 100
    assert all(abs(taps[...]).max() <= 0.5 for taps in (layers.query_taps, layers.key_taps, layers.value_taps))


def test_a_layer_takes_any_leading_dims(x64):
    model = small_model(3, **KINDS["delta alone"])
    layer = nnx.merge(*nnx.split(jax.tree.map(lambda x: x[0], model.layers)))
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 5, 24)))
    whole = layer.before_attention(x, jnp.zeros((2, 5), jnp.int32))
    row = layer.before_attention(x[1], jnp.zeros(5, jnp.int32))
    assert worst(jax.tree.map(lambda a: a[1], whole.heads), row.heads) < 1e-14
    assert worst(whole.constants, row.constants) == 0
    out = jnp.asarray(np.random.default_rng(3).normal(size=whole.heads.v.shape))
    assert worst(layer.after_attention(x, out)[1], layer.after_attention(x[1], out[1])) < 1e-14


def test_an_output_gate_multiplies_attention(x64):
    model = small_model(4, num_layers=1, output_gate=True)
    layer = nnx.merge(*nnx.split(jax.tree.map(lambda x: x[0], model.layers)))
    rng = np.random.default_rng(4)
    x, out = (jnp.asarray(rng.normal(size=shape)) for shape in ((5, 24), (5, 4, 6)))
    gate = jnp.einsum("td,dnh->tnh", layer.attention_norm(x), layer.output_gate[...])
    want = layer._add_attention(x, out)
    got = x + jnp.einsum("tnh,nhd->td", out / (1 + jnp.exp(-gate)), layer.output[...])
    assert worst(want, got) < 1e-14


class Summed(nnx.Module):
    """A user's own layer with a user's own mixer."""

    mixer = Total()

    def __init__(self, config, *, rngs):
        self.value = nnx.Param(jax.random.normal(rngs.params(), (config.hidden_size, 2, 3), jnp.float64))
        self.output = nnx.Param(jax.random.normal(rngs.params(), (2, 3, config.hidden_size), jnp.float64))

    def before_attention(self, x, positions):
        return Operands(jnp.einsum("...td,dnv->...tnv", x, self.value[...]), ())

    def after_attention(self, x, out):
        return x + jnp.einsum("...tnv,nvd->...td", out, self.output[...]) / 30


def test_a_decoder_runs_the_mixer_of_a_users_layer(x64):
    model = small_model(5, layer=Summed, num_layers=2)
    batch = draw_batch(np.random.default_rng(5))
    packed = model(*(jnp.asarray(batch[name]) for name in ("tokens", "positions", "document_ids")))
    at = np.flatnonzero(batch["document_ids"][0] == batch["document_ids"][0, -1])
    assert worst(packed[0][at], model(batch["tokens"][0][None, at])[0]) < 1e-12
    loss, grads = dense_step(model)(nnx.state(model, nnx.Param), batch)
    assert np.isfinite(loss) and all(np.abs(x).max() > 0 for x in jax.tree.leaves(grads) if x.size)


@pytest.mark.slow
def test_the_dense_model_needs_the_documents(x64, monkeypatch):
    """Documents that are not told apart change the loss."""
    model, batch = small_model(6, **KINDS["delta alone"]), draw_batch(np.random.default_rng(6))
    params = nnx.state(model, nnx.Param)
    want = dense_step(model)(params, batch)[0]
    own = dense.mix_sequences
    monkeypatch.setattr(
        "sppo_jax.models.decoder.mix_sequences",
        lambda mixer, operands, documents: own(mixer, operands, jnp.minimum(documents, 0)),
    )
    assert abs(float(dense_step(model)(params, batch)[0] - want)) > 1e-3
