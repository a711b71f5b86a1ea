"""Rearranged rows hold what the rows held, window by window, whatever the rows are and however many threads read."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from data_cases import make_corpus, stack
from flex_cases import make_shape, same

from sppo_jax.config.data import RecallConfig
from sppo_jax.data.loader import Loader
from sppo_jax.data.rows import flex
from sppo_jax.data.rows.flex import FlexRows
from sppo_jax.data.rows.mixture import Mixture
from sppo_jax.data.rows.packing import PackedRows
from sppo_jax.data.rows.recall import RecallRows
from sppo_jax.flex.contract import check_columns
from sppo_jax.flex.rows import PACKED_ROWS

# Little linear work, so that the planner rearranges.
SHAPE = make_shape(4, (32, 32), ring=4, hidden=1)
SIZES = [3, 40, 5, 9, 1, 7, 30, 2, 70, 4, 4, 11, 6, 6, 8, 21, 13, 5] * 3


class Plain:
    """Rows as another kind of `Rows` gives them: padding between documents, positions that do not begin at 0."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        rng = np.random.default_rng(index % 5)
        row = {name: np.full(64, -1, np.int32) for name in ("targets", "document_ids")}
        row |= {name: np.zeros(64, np.int32) for name in ("tokens", "positions")}
        at, document = 0, 3
        while (size := int(rng.integers(1, 14))) + at + 2 <= 64:
            span = slice(at, at + size)
            row["tokens"][span] = 100 * index + np.arange(at, at + size)
            row["targets"][span] = rng.integers(-1, 50, size)
            row["positions"][span] = 17 + np.arange(size)
            row["document_ids"][span] = document
            at, document = at + size + int(rng.integers(0, 3)), document + 2
        return row


def packed(sizes=SIZES, pack="whole", first=0):
    return PackedRows(make_corpus(sizes, num_parts=2, first=first), length=64, pack=pack, seed=1)


KINDS = {
    "whole": packed(),
    "stream": packed(pack="stream"),
    "none": packed(pack="none"),
    "mixture": Mixture([packed(), packed([5, 9, 64, 12] * 7, first=10_000)], [2, 1]),
    "recall": RecallRows(RecallConfig(pairs=2, values=8, distances=(8, 16)), length=64, vocab_size=10, seed=0),
    "plain": Plain(),
}


def made(rows, **changes):
    return FlexRows(rows, **({"window": 4, "shape": SHAPE, "per_step": 8} | changes))


def held(rows):
    """Returns each token with its target and position, and with the packed row from which it comes."""
    batch = {PACKED_ROWS: np.repeat(np.arange(len(rows)), 64).reshape(-1, 64)} | stack(rows)
    real, names = batch["document_ids"] >= 0, ("tokens", "targets", "positions", PACKED_ROWS)
    return sorted(zip(*(batch[name][real].tolist() for name in names), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_holds_what_the_rows_hold(kind):
    rows, changed = KINDS[kind], made(KINDS[kind])
    assert len(changed) == len(rows)
    rearranged = 0
    # More windows than an epoch has, so that one lies in two epochs.
    for number in range(len(rows) // 4 + 3 if len(rows) < 100 else 6):
        new, old = ([of[number * 4 + row] for row in range(4)] for of in (changed, rows))
        batch = stack(new)
        assert all(array.dtype == np.int32 and array.shape == (4, 64) for array in batch.values())
        assert held(new) == held(old)
        check_columns(batch, SHAPE, dealing=True)
        assert changed.placement(number).winner == "packed" or not np.array_equal(batch["tokens"], stack(old)["tokens"])
        rearranged += changed.placement(number).winner != "packed"
    assert rearranged or kind == "recall"


def test_documents_stay_whole_with_their_own_positions():
    changed = made(KINDS["whole"])
    for row in range(12):
        batch = changed[row]
        for document in set(batch["document_ids"].tolist()) - {-1}:
            where = np.flatnonzero(batch["document_ids"] == document)
            tokens = batch["tokens"][where[np.argsort(batch["positions"][where])]]
            assert np.array_equal(tokens, tokens[0] + np.arange(len(where)))
            assert np.array_equal(np.sort(batch["positions"][where]), np.arange(len(where)))


def test_rows_that_no_plan_makes_faster_are_the_rows_themselves():
    rows = KINDS["recall"]
    changed = made(rows)
    assert changed.placement(0).winner == "packed"
    for row in range(4):
        assert all(np.array_equal(changed[row][name], array) for name, array in rows[row].items())


def test_rows_of_any_kind_keep_their_ids_where_no_plan_is_faster():
    class OneLong(Plain):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            row["document_ids"][:58], row["document_ids"][58:] = 9, -1
            return row

    changed = made(OneLong())
    assert changed.placement(0).winner == "packed"
    assert changed.placement(0).pieces.begin.tolist() == [0] * 4
    assert changed[1]["document_ids"].tolist() == [9] * 58 + [-1] * 6


def test_documents_are_found_behind_padding():
    begins, sizes = flex._row_pieces(Plain(), 2)
    ids = Plain()[2]["document_ids"]
    for begin, size, document in zip(begins, sizes, sorted(set(ids.tolist()) - {-1}), strict=True):
        assert ids[begin : begin + size].tolist() == [document] * size
    assert begins[-1] > sizes[:-1].sum()


def test_planning_needs_lengths_alone(monkeypatch):
    rows = KINDS["mixture"]
    changed = made(rows)
    monkeypatch.setattr(PackedRows, "read", None)
    monkeypatch.setattr(PackedRows, "read_piece", None)
    assert changed.placement(3).pieces.size.sum() > 0


def test_only_a_rows_own_documents_are_read(monkeypatch):
    changed, read = made(KINDS["whole"]), []
    placement = changed.placement(0)
    assert placement.winner != "packed"
    real = PackedRows.read_piece
    monkeypatch.setattr(
        PackedRows, "read_piece", lambda self, index, number: read.append((index, number)) or real(self, index, number)
    )
    row = changed[1]
    assert len(read) == len(set(read)) == row["document_ids"].max() + 1 == (placement.row == 1).sum()


def test_threads_plan_a_window_once(monkeypatch):
    planned, plan = [], flex.plan_cells

    def slow(pieces, shape):
        planned.append(threading.get_ident())
        threading.Event().wait(0.05)
        return plan(pieces, shape)

    monkeypatch.setattr(flex, "plan_cells", slow)
    changed, alone = made(KINDS["whole"]), made(KINDS["whole"])
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(changed.__getitem__, [row % 12 for row in range(48)]))
    assert len(planned) == 3
    monkeypatch.setattr(flex, "plan_cells", plan)
    for row, batch in enumerate(together):
        assert all(np.array_equal(array, alone[row % 12][name]) for name, array in batch.items())
    assert same(changed.placement(1), alone.placement(1))


def test_a_window_that_cannot_be_planned_is_tried_again(monkeypatch):
    changed, plan = made(KINDS["whole"]), flex.plan_cells

    def fails(pieces, shape):
        raise RuntimeError("no")

    monkeypatch.setattr(flex, "plan_cells", fails)
    with pytest.raises(RuntimeError):
        changed[0]
    monkeypatch.setattr(flex, "plan_cells", plan)
    assert len(changed[0]["tokens"]) == 64


def test_old_windows_are_forgotten():
    changed = made(KINDS["stream"])
    first = changed.placement(0)
    for number in range(1, 9):
        changed.placement(number)
    assert len(changed._kept) <= 4
    assert changed.placement(0) is not first and same(changed.placement(0), first)


def test_a_run_that_stops_at_a_step_goes_on_as_if_it_had_not():
    rows = KINDS["whole"]
    through = Loader(made(rows), num_sequences=8, local_rows=range(8))
    batches = [next(through) for _ in range(4)]
    stopped = Loader(made(rows), num_sequences=8, local_rows=range(8))
    next(stopped), next(stopped)
    start = stopped.state["sequence"]
    again = Loader(made(rows, start=start), num_sequences=8, local_rows=[1, 6], sequence=start)
    for batch in batches[2:]:
        assert all(np.array_equal(array, batch[name][[1, 6]]) for name, array in next(again).items())
    for loader in (through, stopped, again):
        loader.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 2}, "rows of its shape, 4, got 2; "),
        ({"per_step": 6}, "divide the rows of a step, 6, got 4; "),
        ({"start": 6}, "multiple of the 4 sequences of a step, got sequence 6; "),
    ],
)
def test_windows_that_do_not_fit_a_run_are_refused(changes, words):
    with pytest.raises(ValueError, match=words) as error:
        made(KINDS["whole"], **changes)
    assert "\n" not in str(error.value)
