"""What the exactness tests share: plans and batches of a few choices, and the comparison with the dense model."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sppo_jax import __version__
from sppo_jax.config import ModelConfig
from sppo_jax.models.decoder import Decoder
from sppo_jax.models.dense import dense_value_and_grad
from sppo_jax.pipeline.api import value_and_grad
from sppo_jax.plan.parts import MeshShape, Predicted, SchedulePlan, StashPlan
from sppo_jax.plan.plan import Plan
from sppo_jax.schedule.csv_format import from_csv
from sppo_jax.schedule.generators import make_table
from sppo_jax.schedule.table import MIN_HOST_GAP

TINY = dict(vocab_size=53, hidden_size=24, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=6, mlp_size=40)


def small_model(seed=0, dtype="float64", layer=None, **changes) -> Decoder:
    """Makes a small decoder with every parameter random (norm scales and biases too)."""
    config = ModelConfig(**{**TINY, "compute_dtype": dtype, "init_scale": 0.3, **changes})

    def make():
        return Decoder(config, rngs=nnx.Rngs(seed), **({} if layer is None else {"layer": layer}))

    graph, params, others = nnx.split(nnx.eval_shape(make), nnx.Param, ...)  # nothing is compiled
    if jax.tree.leaves(others):
        graph, params, others = nnx.split(make(), nnx.Param, ...)  # what is no parameter keeps its values
    rng = np.random.default_rng(seed)
    depth = np.sqrt(2 * config.num_layers)

    def fill(path, like):
        name = jax.tree_util.keystr(path)
        small = "scale" in name or "bias" in name
        size = 0.05 if small else config.init_scale / (depth if "output" in name or "down" in name else 1)
        return jnp.asarray(float("scale" in name) + size * rng.normal(size=like.shape), like.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(fill, params), others)


def small_plan(
    chunks,
    *,
    mesh=(1, 1, 1),
    kind="ulysses",
    ulysses=None,
    sequences=1,
    schedule="sppo",
    interleave=1,
    csv=None,
    places=("keep", "keep", "recompute"),
    alpha=0.0,
    kv_grad_dtype="float32",
    kv="keep",
    ring_pass="auto",
    kernel="blockwise",
    backward_queries=0,
    groups="static",
    sequence_documents="many",
    wave=1,
    shapes=(),
    weights="resident",
    attention_from=0,
    waiting="keep",
    optimizer="device",
) -> Plan:
    """Makes a plan by hand; `alpha` is a number or several, one after the other for the bundles that may leave."""
    data, pipe, seq = mesh
    ulysses = ulysses or {"ulysses": seq, "ring": 1}[kind]
    table = from_csv(csv) if csv else make_table(schedule, pipe, sequences, tuple(chunks), interleave, wave)
    of_diagonal, gaps = table.diagonal_bundles, table.bundle_gaps
    shares = alpha if isinstance(alpha, tuple) else (alpha,)
    return Plan(
        version=__version__,
        mesh=MeshShape(data=data, pipe=pipe, seq=seq),
        ulysses=ulysses,
        ring=seq // ulysses,
        sequence_kind=kind,
        sequence_length=sum(chunks),
        sequences_per_pipeline=sequences,
        chunk_lengths=tuple(chunks),
        schedule=SchedulePlan(
            name="table" if csv else schedule, interleave=interleave, csv=csv, wave=wave, shapes=shapes
        ),
        stash=StashPlan(
            inputs=places[0],
            attention=places[1],
            rest=places[2],
            alpha=tuple(shares[g % len(shares)] if gaps[g] >= MIN_HOST_GAP else 0.0 for g in of_diagonal),
            kv_grad_dtype=kv_grad_dtype,
            kv=kv,
            attention_from=attention_from,
            waiting=waiting,
        ),
        kv_slots=table.kv_peak,
        predicted=Predicted(step_s=0.0, bubble_fraction=0.0, hbm_bytes=(0,) * pipe, host_bytes=(0,) * pipe),
        ring_pass=ring_pass,
        kernel=kernel,
        backward_queries=backward_queries,
        groups=groups,
        sequence_documents=sequence_documents,
        weights=weights,
        optimizer=optimizer,
    )


def random_batch(rng, num_sequences, length, vocab_size, *, documents=4, padding=0, holes=0) -> dict:
    """Draws packed documents of any length; the last token of each has no target, nor has padding.

    Args:
        rng: numpy's generator.
        num_sequences: rows.
        length: columns, in tokens.
        vocab_size: tokens lie below it.
        documents: in a sequence.
        padding: tokens at the end of each sequence that belong to none; the length itself leaves nothing.
        holes: tokens elsewhere that belong to none; with any, document numbers and positions skip some values too.
    """
    rows = {name: np.zeros((num_sequences, length), np.int32) for name in ("targets", "positions", "document_ids")}
    tokens = rng.integers(0, vocab_size, (num_sequences, length)).astype(np.int32)
    for row in range(num_sequences):
        cuts = np.sort(rng.choice(np.arange(1, length), size=documents - 1, replace=False))
        ids = np.searchsorted(cuts, np.arange(length), side="right")
        positions = np.arange(length) - np.concatenate([[0], cuts])[ids]
        targets = np.roll(tokens[row], -1)
        targets[np.concatenate([cuts - 1, [length - 1]])] = -1
        if holes:
            positions = positions * 2 + 3
            ids = np.cumsum(rng.integers(1, 4, documents))[ids]
            where = rng.choice(length, size=holes, replace=False)
            ids[where], targets[where] = -1, -1
        if padding:
            ids[-padding:], targets[-padding:] = -1, -1
            targets[max(length - padding - 1, 0)] = -1
        rows["document_ids"][row], rows["targets"][row], rows["positions"][row] = ids, targets, positions
    return {"tokens": tokens, **rows}


def relative_errors(got, want) -> dict[str, float]:
    """Returns each leaf's largest difference over its largest value."""
    got, want = (jax.tree_util.tree_flatten_with_path(x)[0] for x in (got, want))
    assert [p for p, _ in got] == [p for p, _ in want]
    return {
        jax.tree_util.keystr(path): float(
            np.abs(np.asarray(a) - np.asarray(b)).max() / (np.abs(np.asarray(b)).max() + 1e-30)
        )
        for (path, a), (_, b) in zip(got, want, strict=True)
    }


@lru_cache(maxsize=1)
def quick_options() -> dict:
    """Returns compiler options that make compiling quicker, because small programs spend most time in compiling."""
    options = {}
    for name, value in (("xla_cpu_use_fusion_emitters", False), ("xla_backend_optimization_level", 0)):
        try:
            jax.jit(lambda x: x, compiler_options={name: value})(0.0)
        except jax.errors.JaxRuntimeError:
            continue  # not every version of the compiler has every option
        options[name] = value
    return options


def quick_jit(f, **how):
    """Returns `f` jitted, as `how` says besides, so that it compiles soon and runs slowly."""
    return jax.jit(f, compiler_options=quick_options(), **how)


def dense_step(model):
    """Returns the dense model's jitted `f(params, batch) -> (loss, grads)`."""
    dense = quick_jit(dense_value_and_grad(model))
    return lambda params, batch: dense(params, {key: jnp.asarray(value) for key, value in batch.items()})


def assert_exact(plan, model, batch, *, tolerance=1e-9, step=None, dense=None):
    """Compares loss and every gradient of the pipeline with the dense model's.

    Args:
        plan, model, batch: what to run on what.
        tolerance: on the loss, and on a leaf's largest difference over its largest value.
        step, dense: both, already made, where several batches share them.
    """
    params = nnx.state(model, nnx.Param)
    loss, grads = (step or quick_jit(value_and_grad(plan, model)))(params, batch)
    want_loss, want = (dense or dense_step(model))(params, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=tolerance)
    assert jax.tree.map(lambda g: g.dtype, grads) == jax.tree.map(lambda p: p.dtype, params)
    errors = relative_errors(grads, want)
    assert max(errors.values()) < tolerance, errors
