"""The schedules of `zero_bubble.py` in one setting: the papers' orders, our tables, and what ticks of W gain."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from sppo_jax.plan.generators import make_table
from sppo_jax.plan.table import Table
from studies.zero_bubble_costs import DEVICE, SEQ, Setting, shape_of, token_bytes
from studies.zero_bubble_orders import (
    OFFSETS,
    Costs,
    Orders,
    compute_ticks,
    of_ticks,
    one_f_one_b,
    reorder,
    reorder_in_ticks,
    v_schedule,
    with_weight_ticks,
    zb1p,
)
from studies.zero_bubble_simulate import (
    free_running,
    given_ticks,
    peak,
    ticks_of_any_kind,
    ticks_of_one_kind,
    waiting_weights,
)

SEQUENCES, WAVE = 16, 4
CHUNKS = {2**12: 2, 2**14: 4, 2**17: 16, 2**20: 64}  # by tokens of a sequence
# Tokens of a sequence, chunks and sequences of the steps that are asked whether ticks of W pay.
ASKED = (
    (2**14, 1, 16),
    (2**14, 1, 8),
    (2**14, 4, 16),
    (2**17, 16, 4),
    (2**17, 16, 1),
    (2**17, 32, 1),
    (2**20, 64, 4),
    (2**20, 64, 1),
)
ASKED_STAGES = 8
MEGATRON, CUT = "1F1B, Megatron's order", "Seq1F1B, N chunks"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One schedule in one setting.

    Args:
        name: the schedule.
        one_kind: the bubble in lock-step ticks of one kind, as our executor has them.
        any_kind: the bubble in lock-step ticks in which each stage runs a unit of any kind; None for our tables.
        free: the bubble if stages run freely.
        peak_all: activations of a stage in those of a sequence, if all are kept.
        peak_stash: the same if layer inputs and attention outputs are kept.
    """

    name: str
    one_kind: float
    any_kind: float | None
    free: float
    peak_all: float
    peak_stash: float


def rows(setting: Setting) -> Iterator[Row]:
    """Yields the papers' schedules, then ours."""
    stages, sequences = setting.stages, setting.sequences
    yield _of_orders(MEGATRON, setting, [one_f_one_b(stages, sequences)])
    plain = zb1p(stages, sequences)
    yield _of_orders("ZB1P", setting, [plain, reorder_in_ticks(plain)])
    for name in OFFSETS:
        yield _of_orders(name, setting, [*_v_orders(setting, name)])
    for groups in (1, 2, 4):
        if shape_of(setting.length).num_layers % (stages * groups) == 0:
            yield from _own(setting, groups)


def _own(setting: Setting, groups: int) -> Iterator[Row]:
    """Yields the tables that our executor runs, or could run if it had ticks of W."""
    depth = f", v = {groups}" if groups > 1 else ""
    whole, cut = own_table(setting, 1, groups), own_table(setting, setting.chunks, groups)
    yield _of_table(f"1F1B{depth}", setting, whole)
    yield _of_table(f"1F1B, ticks of W{depth}", setting, whole, weight_ticks=True)
    yield _of_table(f"{CUT}{depth}", setting, cut)
    yield _of_table(f"{CUT}, ticks of W{depth}", setting, cut, weight_ticks=True)
    wave = own_table(setting, setting.chunks, groups, WAVE)
    yield _of_table(f"waves of {WAVE}, N chunks{depth}", setting, wave)


def own_table(setting: Setting, chunks: int, groups: int, wave: int = 1) -> Table:
    """Returns the table of (interleaved) Seq1F1B in waves of so many sequences."""
    name = "interleaved-seq1f1b" if groups > 1 else "seq1f1b"
    lengths = (setting.length // chunks,) * chunks
    return make_table(name, setting.stages, setting.sequences, lengths, groups, wave)


def _v_orders(setting: Setting, name: str) -> Iterator[Orders]:
    """Yields orders, of which the shortest counts: the repeated block, as it is and reordered in several ways."""
    repeated, *others = _equal_orders(name, setting.stages, setting.sequences)
    yield from (repeated, *others)
    for last in (False, True):
        yield reorder(repeated, setting.costs(repeated), last)


@cache
def _equal_orders(name: str, stages: int, sequences: int) -> tuple[Orders, ...]:
    repeated = v_schedule(name, stages, sequences)
    equal = [reorder(repeated, lambda unit: 1.0, last) for last in (False, True)]
    return repeated, *equal, reorder_in_ticks(repeated)


def _of_orders(name: str, setting: Setting, choices: list[Orders]) -> Row:
    """Returns the row of the shortest order, for each way to run it; the peak is that of the shortest free-running."""
    costs = setting.costs(choices[0])

    def bubble(run: Callable[[Orders, Costs], float]) -> float:
        return min(run(orders, costs) for orders in choices) / setting.work_s - 1

    return _row(
        name,
        min(choices, key=lambda orders: free_running(orders, costs)),
        one_kind=bubble(ticks_of_one_kind),
        any_kind=bubble(ticks_of_any_kind),
        free=bubble(free_running),
    )


def _of_table(name: str, setting: Setting, table: Table, *, weight_ticks: bool = False) -> Row:
    ticks = with_weight_ticks(table) if weight_ticks else compute_ticks(table)
    orders = of_ticks(table, ticks)
    costs = setting.costs(orders)
    return _row(
        name,
        orders,
        one_kind=given_ticks(ticks, costs) / setting.work_s - 1,
        any_kind=None,
        free=free_running(orders, costs) / setting.work_s - 1,
    )


def _row(name: str, orders: Orders, *, one_kind: float, any_kind: float | None, free: float) -> Row:
    kept = token_bytes()
    whole, stash = (peak(orders, kept.weights / held) for held in (kept.all, kept.stash))
    return Row(name=name, one_kind=one_kind, any_kind=any_kind, free=free, peak_all=whole, peak_stash=stash)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What ticks of W gain for one of our tables.

    Args:
        setting: the setting, cut into its chunks.
        groups: virtual stages of a stage.
        saved: the time saved, as a share of the step without ticks of W; a tick's own time is charged.
        waiting_bytes: bytes of a device that wait for W, at most.
        overhead_s: what each tick takes besides its units.
    """

    setting: Setting
    groups: int
    saved: float
    waiting_bytes: float
    overhead_s: float = DEVICE.overhead_s


def gain(setting: Setting, groups: int) -> Gain:
    """Compares a table in ticks of F and B with the same one in ticks of F, B and W."""
    table = own_table(setting, setting.chunks, groups)
    seconds = []
    for ticks in (compute_ticks(table), with_weight_ticks(table)):
        orders = of_ticks(table, ticks)
        seconds.append(given_ticks(ticks, setting.costs(orders)) + len(ticks) * DEVICE.overhead_s)
    layers = shape_of(setting.length).num_layers / (setting.stages * groups)
    tokens = setting.length / setting.chunks / SEQ
    held = waiting_weights(orders) * tokens * layers * token_bytes().weights
    return Gain(setting=setting, groups=groups, saved=1 - seconds[1] / seconds[0], waiting_bytes=held)


def gains() -> Iterator[Gain]:
    """Yields the gains of all asked settings, for 1, 2 and 4 virtual stages a stage."""
    for length, chunks, sequences in ASKED:
        for groups in (1, 2, 4):
            setting = Setting(length=length, stages=ASKED_STAGES, chunks=chunks, sequences=sequences)
            yield gain(setting, groups)
