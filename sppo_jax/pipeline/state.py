"""What the ticks of a run change: registers, buffers and sums, and their first values.

Letters: M sequences of this pipeline, S tokens, R seq members, T tokens of a tick on one device, D hidden size.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sppo_jax import buffers
from sppo_jax.attention.sequence import Cache
from sppo_jax.attention.tags import Tags
from sppo_jax.compat import to_host
from sppo_jax.dtypes import accumulator
from sppo_jax.pipeline import stash, vocabulary
from sppo_jax.pipeline.layout import Physical
from sppo_jax.pipeline.run import Run
from sppo_jax.program.stash import StashClass


class EvaluationState(NamedTuple):
    """Everything that a tick of an evaluation may change; training changes the first three fields too.

    Args:
        x_TD: register that carries activations to the next stage.
        waiting: waiting room [slots, T, D] of chunks between two groups of layers, forward and backward.
        cache: keys and values of the sequences in flight.
        tags: tags of the sequences in flight.
        gathered: weights [slots, layers, elements] of the groups of layers whose turn it is; None where all layers are
            resident.
        losses_MS: each token's loss.
        hits_MS: whether each token's target is the most likely token.
    """

    x_TD: jax.Array
    waiting: jax.Array
    cache: Cache
    tags: Tags
    gathered: Any
    losses_MS: jax.Array
    hits_MS: jax.Array


class TrainingState(NamedTuple):
    """Everything that a tick of a training step may change.

    Args:
        x_TD, waiting, cache, tags, gathered: as in an evaluation.
        dx_TD: register that carries cotangents to the stage before.
        dcache: dK and dV of the cache.
        kept, host: the stash of each class, on the device and on the host; there in the pieces of the plan.
        part: a forward's stash on its way to the host.
        fetched: stash that came back from the host for the next backward.
        refetched: layer inputs, or keys and values, that came back for the next rebuild of keys and values.
        room: waiting room [rows, T, D] on the host; of no rows where chunks wait on the device.
        taken: what came back from there for the next tick.
        head_dx: this stage's share of the cotangents from the head, by slot.
        grads: gradients of tables and final norm; where weights are gathered this device's shares of the sums, and of
            the layers' sums too.
        incoming, leaving: weights of a group on their way from the host, gradients of one on their way there; None
            where parameters are on the device.
        sums: gradient sums of the layers: of all, or [slots, layers, elements] of the groups whose turn it is.
        loss: sum of the losses of all tokens.
        shares_MvnW: sums of the shares that layers return; None where they return none.
        order: 0, known only once the last backward is done. Where a forward writes depends on it.
    """

    x_TD: jax.Array
    dx_TD: jax.Array
    waiting: jax.Array
    cache: Cache
    tags: Tags
    gathered: Any
    dcache: Cache
    kept: dict[StashClass, stash.Arrays]
    host: dict[StashClass, stash.Pieces]
    part: stash.Pieces | None
    fetched: stash.Pieces | None
    refetched: stash.Pieces | None
    room: jax.Array
    taken: jax.Array | None
    incoming: Any
    leaving: Any
    head_dx: jax.Array
    grads: Physical
    sums: Any
    loss: jax.Array
    order: jax.Array
    shares_MvnW: jax.Array | None


State = EvaluationState | TrainingState


class Coming(NamedTuple):
    """What is under way between host and device in a tick; None for what is not.

    Args:
        fetched, refetched, taken: as in `TrainingState`.
        weights: a part of the next group's weights.
        sums: all groups' gradient sums on the host, one part of which is being written.
    """

    fetched: stash.Pieces | None = None
    refetched: stash.Pieces | None = None
    taken: jax.Array | None = None
    weights: Any = None
    sums: Any = None


def begun(state: TrainingState) -> jax.Array:
    """Returns 0, but only once the tick before is done."""
    return buffers.after(state.x_TD) + buffers.after(state.dx_TD)


def evaluation_state(run: Run, cache_shape: tuple[int, ...]) -> EvaluationState:
    """Allocates everything that the ticks of an evaluation write to.

    Args:
        run: gives all other shapes.
        cache_shape: [layers, K, S, H] of one slot of one device.
    """
    shape = run.sequences.tokens.shape
    return EvaluationState(
        **_in_every_run(run, cache_shape),
        losses_MS=jnp.zeros(shape, accumulator(run.tables.dtype)),
        hits_MS=jnp.zeros(shape, bool),
    )


def training_state(run: Run, cache_shape: tuple[int, ...], kv_grad_dtype, host=None) -> TrainingState:
    """Allocates everything that the ticks of a training step write to.

    Args:
        run: gives all other shapes.
        cache_shape: [layers, K, S, H] of one slot of one device.
        kv_grad_dtype: dtype in which dK and dV are gathered.
        host: the stash on the host where the step is given it.
    """
    program, tables, sharded = run.program, run.tables, run.sharded
    in_every_run = _in_every_run(run, cache_shape)
    share = vocabulary.share_tokens(program.max_tokens, run.num_stages)
    layouts = {name: run.layout(name) for name in program.classes}

    def sums(tree) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, accumulator(x.dtype)), tree)

    return TrainingState(
        **in_every_run,
        loss=jnp.zeros((), accumulator(tables.dtype)),
        dx_TD=in_every_run["x_TD"],
        order=jnp.zeros((), jnp.int32),
        shares_MvnW=run.stage.shares.zeros(run.stage.num_layers) if run.stage.shares else None,
        dcache=_zero_cache((program.num_grad_slots, *cache_shape), kv_grad_dtype),
        kept={name: layout.kept_buffers() for name, layout in layouts.items()},
        host={
            name: layout.host_buffer(program.host_rows[name], program.short_rows.get(name, 0))
            for name, layout in layouts.items()
            if name.uses_host
        }
        if host is None
        else host,
        part=None,
        fetched=None,
        refetched=None,
        room=_waiting_room(program.num_waiting_rows, in_every_run["x_TD"]),
        taken=None,
        incoming=sharded.incoming() if program.num_parts else None,
        leaving=sharded.leaving() if program.num_parts else None,
        head_dx=jnp.zeros((program.num_head_slots, share, tables.hidden_size), tables.dtype),
        # Constants have no gradient.
        grads=Physical(
            layers=sharded.totals() if sharded else (),
            final_norm=sums(run.final_norm),
            **{"head_VD": None} | tables.totals(),
        ),
        sums=sharded.sums(program.num_sum_slots) if sharded else sums(run.stage.weights.params),
    )


def _waiting_room(num_rows: int, register_TD: jax.Array) -> jax.Array:
    room = jnp.zeros((num_rows, *register_TD.shape), register_TD.dtype)
    return to_host(room) if num_rows else room


def _in_every_run(run: Run, cache_shape: tuple[int, ...]) -> dict[str, Any]:
    """Allocates the fields that both states have."""
    program, tokens, ring = run.program, cache_shape[-2], run.plan.ring
    dtype = run.tables.dtype
    register = jnp.zeros((program.max_tokens, run.tables.hidden_size), dtype)
    # The last slot is trash.
    room = program.num_waiting_slots + 1 if program.num_waiting_slots else 0
    return {
        "x_TD": register,
        "waiting": jnp.zeros((room, *register.shape), dtype),
        "tags": Tags(*(jnp.zeros((program.num_sequence_slots, ring, tokens), jnp.int32) for _ in range(2))),
        "cache": _zero_cache((program.num_kv_slots, *cache_shape), dtype),
        "gathered": run.sharded.slots(program.num_weight_slots) if run.sharded else None,
    }


def _zero_cache(shape: tuple[int, ...], dtype) -> Cache:
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
