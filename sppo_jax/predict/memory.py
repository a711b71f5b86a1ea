"""Device and host bytes of a step, from the slots of its table; every device pays alike, as all run one program."""

from dataclasses import dataclass

from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import Cluster, usable_bytes, usable_host_bytes
from sppo_jax.plan.parts import StashPlan
from sppo_jax.predict import waiting
from sppo_jax.predict.fitted import NUMBERS, Numbers
from sppo_jax.predict.holders import MOMENTS, Held, Holder, holders_of, optimizer_bytes, state_bytes, sums
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.stash_bytes import stash_bytes
from sppo_jax.schedule.table import Table


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes a device.

    Args:
        hbm: of device memory at the peak of a step, by what they hold.
        host: of host memory.
        host_optimizer: of these, those of parameters, moments and gradients that wait there.
        host_stash: of these, those of the stash.
        save: of host memory for the copy of parameters and moments that an asynchronous save writes; not in `host`.
        holders: what holds device memory, and when.
    """

    hbm: dict[str, int]
    host: int
    host_optimizer: int = 0
    host_stash: int = 0
    save: int = 0
    holders: tuple[Holder, ...] = ()

    @property
    def hbm_bytes(self) -> int:
        return sum(self.hbm.values())

    @property
    def moments(self) -> dict[str, dict[str, int]]:
        """Bytes of device memory by holder, in each moment of a step."""
        found = {moment: dict.fromkeys(self.hbm, 0) for moment in MOMENTS}
        for name, size_bytes, moments in self.holders:
            for moment in moments:
                found[moment][name] += int(size_bytes)
        return found

    def most(self, name: str) -> int:
        """Returns the most bytes that a holder has in any moment."""
        return max((of_moment[name] for of_moment in self.moments.values()), default=self.hbm.get(name, 0))

    def fits(self, cluster: Cluster) -> bool:
        """Returns whether a device, with a small reserve, has this much."""
        return self.hbm_bytes <= usable_bytes(cluster) and self.host <= usable_host_bytes(cluster)

    def saves(self, cluster: Cluster) -> str:
        """Returns how checkpoints could be saved, by the bytes alone; see `plan.plan.Plan` and `pinned.pinned_of`."""
        return "async" if self.host + self.save <= usable_host_bytes(cluster) else "blocking"

    def excess(self, cluster: Cluster) -> float:
        """Returns by how much this is over a limit, as a share of it; at most 0 if it fits."""
        return max(self.hbm_bytes / usable_bytes(cluster) - 1, self.host / usable_host_bytes(cluster) - 1)

    def describe(self) -> str:
        """Returns the parts, largest first."""
        parts = sorted(self.hbm.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)


def predict_memory(table: Table, shape: MemoryShape, stash: StashPlan, numbers: Numbers = NUMBERS) -> Memory:
    """Predicts the bytes of one device: those of its holders in the fullest moment."""
    held = held_by_table(table, shape, stash)
    holders = tuple(holders_of(shape, stash, held, numbers))
    of_moment = sums(holders)
    peak = max(of_moment, key=of_moment.__getitem__)
    hbm = dict.fromkeys((holder.name for holder in holders), 0)
    for name, size_bytes, moments in holders:
        if peak in moments:
            hbm[name] += int(size_bytes)
    host_optimizer = optimizer_bytes(shape, table.num_groups, table.num_stages)[1]
    return Memory(
        hbm=hbm,
        host=held.stash.host + waiting.host_bytes(table, shape, stash) + host_optimizer,
        host_optimizer=host_optimizer,
        host_stash=held.stash.host,
        save=state_bytes(shape, table.num_groups, table.num_stages),
        holders=holders,
    )


def held_by_table(table: Table, shape: MemoryShape, stash: StashPlan) -> Held:
    """Returns what one device of a stage holds at once, by the slots of a table."""
    tokens, most, peaks = sum(table.chunk_lengths), table.most_tokens, table.prefix_peaks
    local = -(-most // shape.seq)
    return Held(
        num_stages=table.num_stages,
        num_groups=table.num_groups,
        num_parts=max(table.num_stages, table.wave * table.num_chunks),
        tick_tokens=local,
        # Under ulysses a device has its heads of all tokens of its ring neighbours, elsewhere all heads of its tokens.
        prefix_tokens=(tokens + most) * shape.ulysses // shape.seq,
        kv_prefixes=peaks.kept if stash.kv == "keep" else peaks.rebuilt,
        grad_prefixes=peaks.grads,
        waiting_tokens=waiting.device_tokens(table, shape, stash),
        head_tokens=table.head_peak * -(-local // table.num_stages),
        batch_bytes=batch_bytes(table.num_sequences, tokens, most, table.kv_peak, shape.seq),
        stash=stash_bytes(table, shape, stash),
        heads_first=not table.heads_among_backwards,
        is_one_chunk=table.num_sequences == table.num_chunks == 1,
    )


def batch_bytes(num_sequences: int, length: int, most: int, in_flight: int, seq: int) -> int:
    """Returns the bytes of a pipeline's sequences on one device.

    Four int32 of each of the device's own tokens come in. They are held a second time, with space for a longest tick
    behind each sequence. Of the sequences in flight the device holds the positions and documents of all tokens.

    Args:
        num_sequences: of a pipeline.
        length: tokens of each.
        most: tokens of the longest tick, over all devices of a stage.
        in_flight: sequences that a stage has begun and not ended.
        seq: devices of a stage.
    """
    own = num_sequences * (2 * length + most) // seq
    return 4 * (4 * own + 2 * in_flight * (length + most))
