"""Files of questions: the three forms of rows, and a line with the place of each that is wrong."""

import json

import pytest

from sppo_jax.data.tasks.prompts import Prompter
from sppo_jax.data.tokens.encoding import BytesEncoder
from sppo_jax.evaluation.question_rows import read_questions

PROMPTER = Prompter(encoder=BytesEncoder())


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def answers(question):
    return [bytes(one.tokens).decode() for one in question.sample(PROMPTER).answers]


def test_rows_of_ruler(tmp_path):
    row = {"index": 0, "input": "Hay. Which?", "outputs": ["12", "34"], "answer_prefix": " It is", "length": 9}
    (question,), _ = read_questions(write(tmp_path / "niah_single_1.jsonl", row), None)
    assert bytes(question.sample(PROMPTER).prompt[1:].tolist()) == b"Hay. Which? It is"
    assert answers(question) == [" 12", "12", " 34", "34"] and question.right is None


def test_rows_of_prompts(tmp_path):
    rows = {"prompt": "a", "answer": "b"}, {"prompt": "a\n", "answer": ["b", "c"]}
    (one, other), _ = read_questions(write(tmp_path / "a.jsonl", *rows), None)
    assert answers(one) == [" b", "b"] and answers(other) == ["b", "c"]


def test_rows_of_choices(tmp_path):
    row = {"prompt": "a", "choices": ["b", " c", "dd"], "answer": 2}
    (question,), _ = read_questions(write(tmp_path / "a.jsonl", row), None)
    sample = question.sample(PROMPTER)
    assert answers(question) == [" b", " c", " dd"] and sample.right == 2 and sample.sizes == (1, 2, 2)


def test_the_first_rows_are_read_and_a_digest_is_of_the_whole_file(tmp_path, recwarn):
    rows = [{"prompt": str(number), "answer": "b"} for number in range(3)]
    found, digest = read_questions(write(tmp_path / "a.jsonl", *rows), 2)
    assert [one.asked for one in found] == ["0", "1"] and not recwarn.list
    again, other = read_questions(write(tmp_path / "a.jsonl", *rows[:2]), 2)
    assert again == found and other != digest
    with pytest.warns(UserWarning, match=r"a.jsonl has 2 rows, and all are scored, not 9"):
        assert len(read_questions(str(tmp_path / "a.jsonl"), 9)[0]) == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "a row must be a JSON object, got"),
        ("[1]", "a row must be a JSON object, got"),
        ({"input": "a", "answer": "b"}, "a row must have input and outputs, .* got answer, input in"),
        ({}, "got no keys in"),
        ({"input": "a", "outputs": "b"}, "outputs must be a list of texts, got str in"),
        ({"input": "a", "outputs": [1, "b"]}, "outputs must be a list of texts, got a list of int, str in"),
        ({"input": "a", "outputs": []}, "outputs must be a list of texts, got a list of nothing in"),
        ({"input": 1, "outputs": ["b"]}, "input must be a text, got int in"),
        ({"input": "a", "outputs": ["b"], "answer_prefix": 1}, "answer_prefix must be a text, got int in"),
        ({"prompt": "a", "answer": " "}, "answer must not have an empty text, got one in"),
        ({"prompt": "a", "answer": 1}, "answer must be a list of texts, got a list of int in"),
        (
            {"prompt": "a", "choices": ["b"], "answer": 1},
            "answer must be the number of a choice .* below 1, got 1 in",
        ),
        ({"prompt": "a", "choices": ["b"], "answer": True}, "below 1, got True in"),
        ({"prompt": "a", "choices": "b", "answer": 0}, "choices must be a list of texts, got str in"),
    ],
)
def test_a_wrong_row_is_one_line_with_its_place(tmp_path, row, said):
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "answer": "b"}, row)
    with pytest.raises(ValueError, match=said) as error:
        read_questions(path, None)
    assert f"{path} row 2" in str(error.value) and "\n" not in str(error.value)


def test_a_wrong_file_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"must be a readable file of JSON lines, got .*gone.jsonl"):
        read_questions(str(tmp_path / "gone.jsonl"), None)
    with pytest.raises(ValueError, match=r"must have a row, got none in"):
        read_questions(write(tmp_path / "none.jsonl"), None)
    (tmp_path / "latin.jsonl").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="JSON lines in UTF-8"):
        read_questions(str(tmp_path / "latin.jsonl"), None)
    both = {"prompt": "a", "answer": "b"}, {"prompt": "a", "choices": ["b"], "answer": 0}
    with pytest.raises(ValueError, match="must have choices or none, got both"):
        read_questions(write(tmp_path / "both.jsonl", *both), None)
    for name in ("vt.jsonl", "niah_multivalue/validation.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        path = write(tmp_path / name, {"input": "a", "outputs": ["b", "c"]})
        with pytest.raises(ValueError, match="answers of one value, got .* of RULER's task"):
            read_questions(path, None)
