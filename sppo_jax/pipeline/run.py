"""What every tick of a run needs; fixed while it is traced.

Letters: M sequences of this pipeline, S tokens, R seq members, T tokens of a tick on one device, D hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from sppo_jax.attention.pallas_blocks import LANES, Target
from sppo_jax.attention.spreading import teams
from sppo_jax.pipeline.layers import stage as stages
from sppo_jax.pipeline.params.sharded_layers import ShardedLayers
from sppo_jax.pipeline.params.vocabulary_tables import VocabularyTables
from sppo_jax.pipeline.stash import buffers as stash
from sppo_jax.plan.plan import Plan
from sppo_jax.program.program import Program
from sppo_jax.program.stash import StashClass


class Sequences(NamedTuple):
    """A pipeline's sequences on one device: its own tokens, [M, S / R + spare] each.

    `packed_rows` is there where a loss is of packed rows whose documents may have moved, `weights` where each token's
    loss has a weight.
    """

    tokens: jax.Array
    targets: jax.Array
    positions: jax.Array
    documents: jax.Array
    packed_rows: jax.Array | None = None
    weights: jax.Array | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every tick of a run needs.

    Args:
        plan: the plan.
        program: made from it.
        stage: this device's layers.
        vocabulary_tables: the embedding and the head.
        final_norm: weights of the final norm.
        sharded: the layers, where they are gathered group by group; None where `stage` has all of them.
        norm: `norm(weights, x)`, the final norm.
        vocab_size: of the whole model.
        embedding_scale: number by which embeddings are multiplied.
        logit_cap: number beyond which logits do not go; 0: none.
        sequences: this device's data.
        scale: 1 / number of targets in the global batch, or 1 / the divisor of the weights.
        penalty_weights: see `SharesLayout.weights`; None where layers return no shares.
        train: whether the state is a `TrainingState`; else an `EvaluationState`.
        modes: how each chunk of each sequence attends; None for a plan without teams.
        keeps_order: whether the platform runs collectives in the order of the program.
        target: what the kernel for TPUs is compiled for; None for another kernel.
    """

    plan: Plan
    program: Program
    stage: stages.Stage
    vocabulary_tables: VocabularyTables
    final_norm: nnx.State
    sharded: ShardedLayers | None
    norm: Callable
    vocab_size: int
    embedding_scale: float
    logit_cap: float
    sequences: Sequences
    scale: jax.Array
    penalty_weights: jax.Array | None
    train: bool
    modes: teams.Modes | None
    keeps_order: bool
    target: Target | None

    @property
    def num_stages(self) -> int:
        return self.plan.mesh.pipe

    @property
    def seq(self) -> int:
        return self.plan.mesh.seq

    @property
    def member_tokens(self) -> int:
        """Tokens of a sequence on one ring member, with space for the longest chunk behind them."""
        return self.plan.sequence_length // self.plan.ring + self.program.max_tokens * self.plan.ulysses

    def layout(self, name: StashClass) -> stash.StashLayout:
        """Lays out the stash of one class."""
        x_TD = jax.ShapeDtypeStruct((name.tokens, self.vocabulary_tables.hidden_size), self.vocabulary_tables.dtype)
        positions_T = jax.ShapeDtypeStruct((name.tokens,), jnp.int32)
        num_slots, num_short = self.program.stash.classes[name], self.program.stash.num_short.get(name, 0)
        layout = self.stage.layout(name, num_slots, x_TD, positions_T, has_short_rows=num_short > 0)
        return replace(layout, host_pieces=self.plan.host_pieces, lanes=LANES if self.target else 0)
