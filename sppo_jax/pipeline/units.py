"""What a unit of a tick needs of its sequence: its tokens, positions and tags, and how it attends.

Letters: M sequences of this pipeline, S tokens, T tokens of a tick on one device.
"""

import jax
import jax.numpy as jnp

from sppo_jax.arrays import buffers
from sppo_jax.attention.spans import Known
from sppo_jax.attention.spreading import sequence, teams
from sppo_jax.attention.spreading.sequence import Chunk, Split
from sppo_jax.attention.tags import Tags
from sppo_jax.pipeline import vocabulary
from sppo_jax.pipeline.layers.stage import UnitOnDevice
from sppo_jax.pipeline.mechanism import TickOnDevice
from sppo_jax.pipeline.pasts import states as mixing
from sppo_jax.pipeline.pasts import tails
from sppo_jax.pipeline.run import Run


def own(run: Run, tick: TickOnDevice, array_MS: jax.Array, stage) -> jax.Array:
    """Cuts the tokens [T] of the chunk that `stage` works on out of this device's share of its sequence."""
    where = (tick.mine("sequence", stage), buffers.quotient(tick.mine("start", stage), run.seq))
    return buffers.read(array_MS, where, (tick.spec.tokens,))


def real(run: Run, tick: TickOnDevice, stage) -> jax.Array:
    """Returns of each token [T] whether it is one of the chunk, and no padding."""
    return jnp.arange(tick.spec.tokens, dtype=jnp.int32) < buffers.quotient(tick.mine("length", stage), run.seq)


def split(run: Run, passes: str) -> Split:
    """Returns how `seq` is divided, what travels on the ring, and what the plan says of every chunk."""
    plan = run.plan
    known = Known(len(plan.chunk_lengths) > 1, plan.has_one_document, plan.backward_queries)
    return Split(plan.ulysses, plan.ring, passes, plan.kernel, target=run.target, known=known)


def write_tags(run: Run, tick: TickOnDevice, tags: Tags) -> Tags:
    """Puts the tags of this stage's chunk behind those of the chunks before it."""
    me = vocabulary.stage_index(run.num_stages)
    mine = [own(run, tick, x, me) for x in (run.sequences.positions, run.sequences.documents)]
    place = tick.mine("sequence_slot", me), buffers.quotient(tick.mine("start", me), run.plan.ring)
    return sequence.write_tags(tags, Tags(*mine), *place, split(run, tick.spec.passes.forward))


def unit(run: Run, tick: TickOnDevice, passes: str, tags: Tags) -> UnitOnDevice:
    """Returns this device's unit."""
    me = vocabulary.stage_index(run.num_stages)
    positions_T = own(run, tick, run.sequences.positions, me)
    slots = (tick.mine(name, me) for name in ("group", "weights.slot", "weights.sum_slot"))
    found = UnitOnDevice(
        *slots, chunks(run, tick, passes, tags), positions_T, tick.mine("stash.slot", me), pattern=tick.row["pattern"]
    )
    if run.stage.layers.states:
        found = found._replace(mixed=_state_unit(run, tick, tags))
    if run.stage.shares is None or not run.train:
        return found
    is_real_T = real(run, tick, me) & (own(run, tick, run.sequences.documents, me) >= 0)
    if not run.stage.shares.is_moved:
        return found._replace(sequence=tick.mine("sequence", me), is_real_T=is_real_T)
    packed_rows_T = own(run, tick, run.sequences.packed_rows, me)
    return found._replace(sequence=jnp.int32(0), is_real_T=is_real_T, packed_rows_T=packed_rows_T)


def _state_unit(run: Run, tick: TickOnDevice, tags: Tags) -> mixing.StateUnit:
    me = vocabulary.stage_index(run.num_stages)
    documents_RS, start = buffers.pick(tags.documents, tick.mine("sequence_slot", me)), tick.mine("start", me)
    place = documents_RS, start, tick.mine("length", me), tick.spec.tokens * run.plan.ulysses
    reaches = sorted(
        {run.stage.layers.blocks[one].mixer.reach for layer_types in run.stage.layers.states for one in layer_types}
    )
    return mixing.StateUnit(
        {reach: mixing.chunk_place(*place, reach) for reach in reaches},
        tick.mine("prefixes.slot", me),
        tick.mine("prefixes.grad_slot", me),
        start == 0,
        tick.mine("active", me) == 1,
    )


def chunks(run: Run, tick: TickOnDevice, passes: str, tags: Tags) -> dict[int, Chunk]:
    """Returns this device's chunk, with the masks of each window of its layers."""
    windows, how = dict.fromkeys(run.stage.layers.windows.values()), split(run, passes)
    return {window: _chunk(run, tick, how._replace(window=window), tags) for window in windows}


def _chunk(run: Run, tick: TickOnDevice, how: Split, tags: Tags) -> Chunk:
    me, ring = vocabulary.stage_index(run.num_stages), run.plan.ring
    start, length = (buffers.quotient(tick.mine(name, me), ring) for name in ("start", "length"))
    size, resident = tick.spec.tokens * run.plan.ulysses, tags.take(tick.mine("sequence_slot", me))
    chosen = None
    if run.modes is not None:
        chosen = _teams(run, tick, resident, (start, length, size), how)
        length = jnp.where(chosen.is_stream, length, 0)
    bound, tail = tick.spec.passes.bound, how.window // ring if run.stage.layers.tails else 0
    keys = resident
    if tail:
        room = run.program.max_tokens * run.plan.ulysses
        keys, start, bound = tails.near_keys(resident, start, room, tail), jnp.int32(tail), tail + size
    masks = sequence.chunk_tags(keys, start, length, size, how, bound=bound)
    return Chunk(tick.mine("prefixes.slot", me), start, length, masks, chosen, tick.mine("prefixes.grad_slot", me))


def _teams(run: Run, tick: TickOnDevice, resident: Tags, place: tuple, how: Split) -> teams.Teams:
    """Finds out how a tick attends, from its row of numbers; all devices have the same row."""
    me, (start, length, size), row = vocabulary.stage_index(run.num_stages), place, tick.row
    assert run.modes is not None, "chunks choose their teams"
    later_starts = jnp.asarray(run.plan.table().chunk_starts[1:], jnp.int32)
    number = (row["start"][:, None] >= later_starts).sum(1, dtype=jnp.int32)
    tags = Tags(*(buffers.read(x, (0, start), (x.shape[0], size)) for x in resident))
    mine = (tick.mine("sequence", me), buffers.pick(number, me))
    of_tick = (row["sequence"], number, row["active"])
    return teams.chunk_teams(run.modes, mine, of_tick, (tags, buffers.quotient(length, how.ulysses)), how)
