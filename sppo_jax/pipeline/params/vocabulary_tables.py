"""A stage's share of the vocabulary tables: whole on every device, or gathered in each tick that needs them.

The vocabulary tables are the embedding and the head. A gathered table exists in ticks with ends alone. Between these
ticks a device has its share of the table, and of the table's gradient sum. Slots of gathered tables, like those of
layers, would be gathered less often; but they would hold their bytes in every tick, and a table has as many parameters
as several layers.

Letters: V vocabulary entries of one stage, D hidden size.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from sppo_jax.arrays.dtypes import accumulator
from sppo_jax.pipeline.params.layout import Physical
from sppo_jax.pipeline.params.storage import Share, gather_whole, scatter_sum


@dataclass(frozen=True)
class VocabularyTables:
    """The vocabulary tables of a stage, by their fields in `Physical`. Call the methods inside `shard_map`.

    Args:
        arrays: each table, whole and in the compute dtype, or this device's share in the dtype of the parameters.
        shares: how the devices share each table; None where each device has all of it.
        wholes: shape [V, D] and compute dtype of each whole table.
    """

    arrays: dict[str, jax.Array]
    shares: dict[str, Share] | None
    wholes: dict[str, jax.ShapeDtypeStruct]

    @property
    def head_name(self) -> str:
        """The field of the head's table: with tied embeddings, the embedding's."""
        return "head_VD" if "head_VD" in self.arrays else "embedding_VD"

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype."""
        return self.wholes["embedding_VD"].dtype

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.wholes["embedding_VD"].shape[1]

    def whole(self, name: str, after: jax.Array) -> jax.Array:
        """Returns a whole table.

        Args:
            name: its field.
            after: what the tick begins with. XLA could otherwise gather before the loop of the ticks.
        """
        if self.shares is None:
            return self.arrays[name]
        mine, _ = lax.optimization_barrier((self.arrays[name], after))
        return gather_whole(mine, self.shares[name], self.wholes[name])

    def totals(self) -> dict[str, jax.Array]:
        """Returns zeros for the gradient sums of all ticks: whole ones, or this device's shares."""
        return {name: jnp.zeros(x.shape, accumulator(self.dtype)) for name, x in self.arrays.items()}

    def sum_of_tick(self, name: str, grads: Physical) -> jax.Array:
        """Returns what a tick adds a table's gradient to: the total itself, or zeros of the whole table."""
        if self.shares is None:
            return getattr(grads, name)
        return jnp.zeros(self.wholes[name].shape, accumulator(self.dtype))

    def with_sum(self, name: str, grads: Physical, added: jax.Array, leaving: jax.Array) -> tuple[Physical, jax.Array]:
        """Adds the sum that a tick began with `sum_of_tick`.

        Args:
            name: the table's field.
            grads: the gradients.
            added: the sum.
            leaving: what the tick hands on.

        Returns:
            The gradients; and what the tick hands on, which waits for a scatter. XLA could otherwise scatter ticks
            later, and hold the whole sums of several ticks.
        """
        if self.shares is not None:
            total = getattr(grads, name)
            added = total + scatter_sum(added, self.shares[name]).reshape(total.shape)
            added, leaving = lax.optimization_barrier((added, leaving))
        return grads._replace(**{name: added}), leaving
