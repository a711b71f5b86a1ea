"""The recall task: what every sequence holds, for any number of pairs, distances and length."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo_jax.config import ConfigError, RecallConfig, config_from_dict
from sppo_jax.data.open import open_data
from sppo_jax.data.rows.recall import TRAINING, VALIDATION, RecallRows, with_distances

TASKS = st.builds(
    lambda pairs, values, distances: RecallConfig(pairs=pairs, values=values, distances=tuple(distances)),
    st.integers(1, 12),
    st.integers(2, 9),
    st.lists(st.integers(1, 60), min_size=1, max_size=5, unique=True),
)


def least_length(task):
    return max(task.distances) + 8 * (task.pairs - 1) + 2


def make_rows(task, room=0, spare=0, **changes):
    settings = dict(length=least_length(task) + room, vocab_size=task.pairs + task.values + spare, seed=0)
    return RecallRows(task, **{**settings, **changes})


@settings(max_examples=60)
@given(TASKS, st.integers(0, 40), st.integers(0, 3), st.integers(0, 2**40), st.integers(0, 9))
def test_every_key_has_a_value_and_is_asked_for_the_given_distance_later(task, room, spare, index, seed):
    rows, pairs = make_rows(task, room, spare, seed=seed), task.pairs
    row, distances = rows[index], rows.distances(index)
    assert all(value.dtype == np.int32 and value.shape == (rows.length,) for value in (*row.values(), distances))
    tokens, questions = row["tokens"], np.flatnonzero(row["targets"] >= 0)
    np.testing.assert_array_equal(questions, np.flatnonzero(distances))
    facts = questions - distances[questions] - 1
    np.testing.assert_array_equal(tokens[questions], tokens[facts])
    np.testing.assert_array_equal(row["targets"][questions], tokens[facts + 1])
    assert (facts >= 0).all() and facts.max() + 1 < rows.length - max(task.distances)
    assert (np.bincount(tokens, minlength=pairs)[:pairs] == 2).all()
    assert tokens.max() < pairs + task.values and (row["targets"][questions] >= pairs).all()
    np.testing.assert_array_equal(np.sort(tokens[questions]), np.arange(pairs))
    shares = np.unique(distances[questions], return_counts=True)[1]
    assert set(shares) <= {pairs // len(task.distances), pairs // len(task.distances) + 1}
    np.testing.assert_array_equal(row["positions"], np.arange(rows.length))
    assert not row["document_ids"].any()


def test_a_sequence_is_a_function_of_seed_stream_and_number_alone():
    task = RecallConfig(pairs=4, distances=(9, 21))

    def read(index, stream=TRAINING, seed=0):
        return make_rows(task, 10, seed=seed, stream=stream)[index]["tokens"].tolist()

    rows = make_rows(task, 10)
    later, first = rows[7]["tokens"].tolist(), rows[0]["tokens"].tolist()
    assert (first, later) == (read(0), read(7))
    others = [read(0, VALIDATION), read(0, seed=1), read(1), read(len(rows))]
    assert first not in others and len(set(map(tuple, others))) == len(others)


def test_every_key_has_every_value_alike_so_a_guess_is_right_once_in_values():
    rows = make_rows(RecallConfig(pairs=4, values=5, distances=(9, 21)))
    counts = np.zeros((4, 5))
    for index in range(600):
        row = rows[index]
        asked = row["targets"] >= 0
        np.add.at(counts, (row["tokens"][asked], row["targets"][asked] - 4), 1)
    assert rows.chance == 0.2
    np.testing.assert_allclose(counts / 600, 0.2, atol=0.06)


def test_distances_come_with_the_sequence_where_evaluation_asks():
    rows = make_rows(RecallConfig(pairs=4, distances=(9, 21)))
    marked = with_distances(rows)
    assert len(marked) == len(rows)
    np.testing.assert_array_equal(marked[3]["distances"], rows.distances(3))
    np.testing.assert_array_equal(marked[3]["tokens"], rows[3]["tokens"])
    assert with_distances([1]) == [1]


CONFIG = {
    "model": {"vocab_size": 9, "hidden_size": 8, "num_layers": 2, "num_heads": 1, "mlp_size": 8},
    "data": {"source": "recall", "recall": {"pairs": 4, "values": 5, "distances": [9, 21]}},
    "sequence": {"length": 64},
    "train": {"steps": 1},
}


def test_a_config_opens_it_with_training_and_validation_apart():
    data = open_data(config_from_dict(CONFIG))
    assert isinstance(data.training, RecallRows) and isinstance(data.validation, RecallRows)
    assert data.training[0]["tokens"].tolist() != data.validation[0]["tokens"].tolist()
    assert data.decode(np.array([0, 5, 8, 3])) == "k0 v1 v4 k3"
    other = config_from_dict(CONFIG | {"data": CONFIG["data"] | {"seed": 1}})
    assert open_data(other).fingerprint != data.fingerprint


@pytest.mark.parametrize(
    "changes,words",
    [
        (
            {"sequence": {"length": 46}},
            "sequence.length must be at least 47 for 4 pairs with answers up to 21 tokens back, got 46",
        ),
        (
            {"model": CONFIG["model"] | {"vocab_size": 8}},
            "model.vocab_size must be at least 9 for 4 keys and 5 values, got 8",
        ),
    ],
)
def test_a_task_that_does_not_fit_is_refused(changes, words):
    open_data(config_from_dict(CONFIG | {"sequence": {"length": 47}}))
    with pytest.raises(ValueError, match=words) as error:
        open_data(config_from_dict(CONFIG | changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes", [{"pairs": 0}, {"values": 1}, {"distances": ()}, {"distances": (3, 0)}, {"distances": (3, 3)}]
)
def test_a_task_that_asks_nothing_is_refused(changes):
    (name,) = changes
    with pytest.raises(ConfigError, match=f"data.recall.{name} must be"):
        dataclasses.replace(RecallConfig(), **changes)
