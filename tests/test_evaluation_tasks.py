"""Tasks by name: needle tasks and files, their lengths, and what does not fit."""

import json

import pytest

from sppo_jax.data.tasks.prompts import Prompter
from sppo_jax.data.tokens.encoding import BytesEncoder
from sppo_jax.evaluation.tasks import FileTask, NeedleTask, open_tasks

PROMPTER = Prompter(encoder=BytesEncoder())


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a" * size, "answer": "bcd"}) + "\n" for size in (9, 300)))
    return str(path)


def test_names_and_files(rows):
    tasks = open_tasks(["needle,needle-uuid", rows, "needle"], None, None)
    assert [(type(task), task.name, task.num_samples) for task in tasks] == [
        (NeedleTask, "needle", 50),
        (NeedleTask, "needle-uuid", 50),
        (FileTask, rows, 2),
    ]
    assert [task.num_samples for task in open_tasks(["needle", rows], 1, None)] == [1, 1]
    with pytest.raises(ValueError, match=r"got needle-uid; the nearest task is needle-uuid"):
        open_tasks(["needle-uid"], None, None)
    with pytest.raises(ValueError, match=r"--tasks must name a task, got none"):
        open_tasks([","], None, None)


def test_all_models_get_the_same_needles():
    first, again = (open_tasks(["needle"], count, None)[0].samples(PROMPTER, 512) for count in (3, 12))
    assert [one.prompt.tolist() for one in first] == [one.prompt.tolist() for one in again[:3]]
    assert [int(one.depth * 10) for one in again] == [*range(10), 0, 1]
    assert all(one.num_tokens == 512 for one in again)


def test_what_decides_the_samples_is_in_the_key(rows):
    needle, other = (open_tasks(["needle"], 3, haystack)[0].key for haystack in (None, "a b"))
    assert needle != other and needle["seed"] == 0
    assert open_tasks([rows], None, None)[0].key.keys() == {"file"}


def test_a_file_has_the_length_of_its_longest_row(rows):
    (task,) = open_tasks([rows], None, None)
    assert task.length(PROMPTER) == 512
    assert [one.num_tokens for one in task.samples(PROMPTER, 305)] == [14, 305]
    with pytest.raises(ValueError, match=r"rows.jsonl row 2: prompt and answer must fit the length, got 305 tokens"):
        task.check(PROMPTER, 304)
    with pytest.raises(
        ValueError, match="row 1: the answer alone must fit the length, got 14 tokens and a length of 4"
    ):
        task.check(PROMPTER, 4)


def test_a_length_too_short_for_needles_says_how_many_tokens(rows):
    with pytest.raises(ValueError, match=r"--tasks needle-keys: a length must hold .* got 64 tokens where they alone"):
        open_tasks(["needle-keys"], 5, None)[0].check(PROMPTER, 64)
