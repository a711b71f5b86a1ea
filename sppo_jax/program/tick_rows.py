"""The rows of a program: numbers that say for each tick and stage who does what, and in which slot or host row.

A field of a mechanism is in the mechanism's file, and has its name before a dot. No jax here.
"""

from collections.abc import Sequence

import numpy as np

from sppo_jax.program import prefixes, stash, waiting, weights
from sppo_jax.program.rows import Rows, zeros
from sppo_jax.schedule.table import Table

UNIT_FIELDS = (
    "active",  # 1 where the stage has a unit in this tick
    "sequence",
    "start",  # first token of the chunk, over the whole seq axis
    "length",  # tokens of the chunk, over the whole seq axis
    "group",  # which of the stage's groups of layers
    "first",  # 1 where the virtual stage is the first one (takes the embedding)
    "last",  # 1 where it is the last one (gives to the head)
    "sequence_slot",  # of what a sequence in flight has once: its tags
    "head_slot",
)
PATTERNS = {
    "pattern": "group",  # which of the patterns of layers the unit's group has
    "again_pattern": "prefixes.again_group",  # the same of the group whose keys and values are made again
}
FIELDS = (*UNIT_FIELDS, *PATTERNS, *weights.FIELDS, *stash.FIELDS, *prefixes.FIELDS, *waiting.FIELDS)
# Rows on the host, and how many rows before them are short.
HOST_ROWS = (*stash.HOST_ROWS, *prefixes.HOST_ROWS, *waiting.HOST_ROWS)
FLAGS = (*PATTERNS, *weights.FLAGS, *stash.FLAGS)  # the same for all stages


def unit_rows(table: Table, sequences: dict[tuple[int, int], int], heads: dict[tuple[int, int], int]) -> Rows:
    """Returns the numbers of units, for each of UNIT_FIELDS.

    Args:
        table: a whole table.
        sequences: slot of each (stage, sequence).
        heads: slot of the head's gradient of each (sequence, chunk).
    """
    rows = zeros(UNIT_FIELDS, table)
    # An idle stage writes behind the sequence, where there is space for it.
    rows["start"][:] = sum(table.chunk_lengths)
    for index, tick in enumerate(table.ticks):
        for stage, unit in enumerate(tick.units):
            if unit is None:
                continue
            values = {
                "active": 1,
                "sequence": unit.sequence,
                "start": table.chunk_starts[unit.chunk],
                "length": table.chunk_lengths[unit.chunk],
                "group": unit.virtual_stage // table.num_stages,
                "first": unit.virtual_stage == 0,
                "last": unit.virtual_stage == table.num_virtual_stages - 1,
                "sequence_slot": sequences[stage, unit.sequence],
                "head_slot": heads[unit.sequence, unit.chunk],
            }
            for name, value in values.items():
                rows[name][index, stage] = value
    return rows


def pattern_rows(rows: Rows, patterns: Sequence[int]) -> Rows:
    """Returns the numbers of `PATTERNS`; where groups differ there is one stage.

    Args:
        rows: of units and mechanisms.
        patterns: of each group of a stage.
    """
    return {name: np.asarray(patterns, np.int32)[rows[of_group]] for name, of_group in PATTERNS.items()}
