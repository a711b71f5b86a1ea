"""What the ticks of a run change: the registers, the mechanisms' parts, and sums; and their first values.

Letters: M sequences of this pipeline, S tokens, R seq members, T tokens of a tick on one device, D hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.attention.tags import Tags
from sppo_jax.pipeline import vocabulary
from sppo_jax.pipeline.mechanism import Mechanism
from sppo_jax.pipeline.mechanisms.prefixes import Prefixes
from sppo_jax.pipeline.mechanisms.stash import Stash
from sppo_jax.pipeline.mechanisms.waiting import WaitingRoom
from sppo_jax.pipeline.mechanisms.weights import LayerWeights
from sppo_jax.pipeline.params.layout import Physical
from sppo_jax.pipeline.run import Run
from sppo_jax.pipeline.stash.buffers import Pieces
from sppo_jax.program.program import Mechanisms
from sppo_jax.program.stash import StashClass


class EvaluationState(NamedTuple):
    """Everything that a tick of an evaluation may change.

    Args:
        x_TD: register that carries activations to the next stage.
        tags: tags of the sequences in flight.
        weights, prefixes, waiting: the mechanisms' parts.
        losses_MS: each token's loss.
        hits_MS: whether each token's target is the most likely token.
        states: states behind the last chunks of the sequences in flight, of each shape a tree of arrays
            [slots, layers, ...].
    """

    x_TD: jax.Array
    tags: Tags
    weights: LayerWeights
    prefixes: Prefixes
    waiting: WaitingRoom
    losses_MS: jax.Array
    hits_MS: jax.Array
    states: tuple[Any, ...]

    @property
    def dx_TD(self) -> None:
        """No cotangents travel."""


class TrainingState(NamedTuple):
    """Everything that a tick of a training step may change.

    Args:
        x_TD, tags, weights, prefixes, waiting: as in an evaluation.
        stash: the stash.
        dx_TD: register that carries cotangents to the stage before.
        head_dx: this stage's share of the cotangents from the head, by slot.
        grads: gradients of vocabulary tables and final norm; where weights are gathered this device's shares of the
            sums. Those of layers are in `weights`.
        loss: sum of the losses of all tokens.
        num_hits: number of targets that are the most likely token.
        over_entropy: sum over all tokens of the loss minus the entropy, times the scale; this stage's part.
        shares_MvnW: sums of the shares that layers return; None where they return none.
        order: 0, known only once the last backward is done. Where a forward writes depends on it.
        states: as in an evaluation.
        dstates: their cotangents.
    """

    x_TD: jax.Array
    tags: Tags
    weights: LayerWeights
    stash: Stash
    prefixes: Prefixes
    waiting: WaitingRoom
    dx_TD: jax.Array
    head_dx: jax.Array
    grads: Physical
    loss: jax.Array
    num_hits: jax.Array
    over_entropy: jax.Array
    order: jax.Array
    shares_MvnW: jax.Array | None
    states: tuple[Any, ...]
    dstates: tuple[Any, ...]


State = EvaluationState | TrainingState


def mechanisms_of(state: State) -> dict[str, Mechanism]:
    """Returns the mechanisms' parts of a state, in the order in which a tick calls them."""
    return {name: getattr(state, name) for name in Mechanisms._fields if name in state._fields}


def changed(state: State, change: Callable[[str, Mechanism], Mechanism]) -> State:
    """Returns the state with each mechanism's part changed; `change` gets the name and the part."""
    return state._replace(**{name: change(name, part) for name, part in mechanisms_of(state).items()})


def evaluation_state(run: Run, cache_shapes: Sequence[tuple[int, ...]]) -> EvaluationState:
    """Allocates everything that the ticks of an evaluation write to.

    Args:
        run: gives all other shapes.
        cache_shapes: [layers, K, S, E] of one slot of each cache of one device.
    """
    shape, register = run.sequences.tokens.shape, _register(run)
    return EvaluationState(
        x_TD=register,
        tags=_tags(run),
        weights=LayerWeights.begin(run, train=False),
        prefixes=Prefixes.begin(run, cache_shapes),
        waiting=WaitingRoom.begin(run, register),
        losses_MS=jnp.zeros(shape, accumulator(run.vocabulary_tables.dtype)),
        hits_MS=jnp.zeros(shape, bool),
        states=_states(run, run.program.prefixes.num_slots),
    )


def training_state(
    run: Run,
    cache_shapes: Sequence[tuple[int, ...]],
    kv_grad_dtype,
    host: dict[StashClass, Pieces] | None = None,
) -> TrainingState:
    """Allocates everything that the ticks of a training step write to.

    Args:
        run: gives all other shapes.
        cache_shapes: [layers, K, S, E] of one slot of each cache of one device.
        kv_grad_dtype: dtype in which dK and dV are gathered.
        host: the stash on the host where the step is given it.
    """
    program, tables, register = run.program, run.vocabulary_tables, _register(run)
    share = vocabulary.share_tokens(program.max_tokens, run.num_stages)
    norm = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulator(x.dtype)), run.final_norm)
    return TrainingState(
        x_TD=register,
        tags=_tags(run),
        weights=LayerWeights.begin(run, train=True),
        stash=Stash.begin(run, host),
        prefixes=Prefixes.begin(run, cache_shapes, kv_grad_dtype),
        waiting=WaitingRoom.begin(run, register),
        dx_TD=register,
        head_dx=jnp.zeros((program.num_head_slots, share, tables.hidden_size), tables.dtype),
        # Constants have no gradient.
        grads=Physical(layers=(), final_norm=norm, **{"head_VD": None} | tables.totals()),
        loss=jnp.zeros((), accumulator(tables.dtype)),
        num_hits=jnp.zeros((), jnp.int32),
        over_entropy=jnp.zeros((), accumulator(tables.dtype)),
        order=jnp.zeros((), jnp.int32),
        shares_MvnW=run.stage.shares.zeros() if run.stage.shares else None,
        states=_states(run, program.prefixes.num_slots),
        dstates=_states(run, program.prefixes.num_grad_slots),
    )


def _states(run: Run, num_slots: int) -> tuple[Any, ...]:
    """Returns zeros for the states, or their cotangents, of each shape."""
    layers = run.stage.layers

    def zeros(layer_types: Sequence[str | None]) -> Any:
        lead = num_slots, layers.count(layer_types)
        return jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), x.dtype), layers.state_shapes[layer_types[0]].state)

    return tuple(map(zeros, layers.states))


def _register(run: Run) -> jax.Array:
    return jnp.zeros((run.program.max_tokens, run.vocabulary_tables.hidden_size), run.vocabulary_tables.dtype)


def _tags(run: Run) -> Tags:
    shape = (run.program.num_sequence_slots, run.plan.ring, run.member_tokens)
    return Tags(*(jnp.zeros(shape, jnp.int32) for _ in range(2)))
