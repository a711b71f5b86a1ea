"""Numbers of all ticks by field. Fields have the names of their mechanisms before a dot. No jax here."""

from collections.abc import Sequence

import numpy as np

from sppo_jax.schedule.table import Table

# For each field an int32 array [ticks, stages].
Rows = dict[str, np.ndarray]


def zeros(fields: Sequence[str], table: Table) -> Rows:
    """Returns zeros of some fields for all ticks of a table."""
    return {name: np.zeros((len(table.ticks), table.num_stages), np.int32) for name in fields}
