"""The needle tasks: samples hold their needles and fit to the token; answers follow the tokens of prompts."""

import re

import numpy as np
import pytest
from tokenizer_folders import CHATML, END, START, make_folder

from sppo_jax.config import ConfigError, config_from_dict
from sppo_jax.config.data import NEEDLE_TASKS, DataConfig, NeedlesConfig
from sppo_jax.data.held_out import num_held_out
from sppo_jax.data.open import prepare_data
from sppo_jax.data.rows.needles import row_of
from sppo_jax.data.tasks.fit import fit_needles
from sppo_jax.data.tasks.haystack import DrawnSentences, GivenText, read_haystack
from sppo_jax.data.tasks.needles import EVALUATION, draw_needles
from sppo_jax.data.tasks.prompts import Prompter, chat_template
from sppo_jax.data.tokens.encoding import BytesEncoder, open_encoder

STATED = re.compile(r"The (?:code|number) of ([\w -]+) is ([0-9a-f-]+)\.")
OWN_WORDS = "one two three. " * 60


def drawn(task, number=0, seed=0, stream=EVALUATION, haystack=None):
    return draw_needles(task, seed=seed, stream=stream, number=number, haystack=haystack)


def config(length=256, **needles):
    return config_from_dict(
        {
            "model": {"vocab_size": 257, "hidden_size": 16, "num_layers": 1, "num_heads": 1, "mlp_size": 16},
            "data": {"source": "needles", "needles": needles},
            "sequence": {"length": length},
            "train": {"steps": 1},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("needles") / "tokenizer"
    make_folder(place, added=(START, END), settings={"chat_template": CHATML})
    return place


@pytest.fixture(scope="module", params=["bytes", "words", "chat"])
def prompter(request, folder):
    if request.param == "bytes":
        return Prompter(encoder=BytesEncoder())
    data = DataConfig(tokenizer=str(folder))
    template = chat_template(data) if request.param == "chat" else None
    return Prompter(encoder=open_encoder(data, vocab_size=1000), template=template)


@pytest.mark.parametrize("task", NEEDLE_TASKS)
@pytest.mark.parametrize("number", range(12))
def test_the_text_states_the_answer_once_and_no_other_number(task, number):
    sample = drawn(task, number)
    text = sample.text(3000)
    stated = dict(STATED.findall(text))
    assert len(stated) == len(set(stated.values())) == (1 if task == "needle" else 4)
    asked = sample.question.split(" of ", 1)[1].rstrip("?")
    assert stated[asked] == sample.answer.strip() and text.count(sample.answer) == 1
    assert text.endswith(sample.question) and f"{sample.prefix.strip()}{sample.answer}." in text
    assert sum(len(needle) for _, needle in sample.hidden) + 3000 <= len(text)
    words = STATED.sub("", text.split("\n\n")[1])
    assert not re.search(r"\d", words)


@pytest.mark.parametrize("task", NEEDLE_TASKS)
def test_the_depth_is_where_the_needle_lies(task):
    for number in range(20):
        sample = drawn(task, number)
        place = sample.text(20_000).index(sample.hidden[0][1])
        assert place / 20_000 == pytest.approx(sample.depth, abs=0.03)
        assert int(sample.depth * 10) == number % 10


def test_a_sample_is_a_function_of_task_seed_stream_and_number():
    def text(**changes):
        return drawn(**{"task": "needle-keys", "number": 3} | changes).text(500)

    others = [text(), text(number=4), text(seed=1), text(stream=0), text(task="needle")]
    assert text() == others[0] and len(set(others)) == 5


def test_a_haystack_never_changes_its_first_characters():
    for make in (DrawnSentences, lambda rng: GivenText(OWN_WORDS, rng)):
        hay = make(np.random.default_rng(0))
        first = hay.take(100)
        assert hay.take(100_000)[:100] == first == make(np.random.default_rng(0)).take(100)
        assert len(hay.take(100_000)) == 100_000


@pytest.mark.parametrize("haystack", [None, OWN_WORDS])
@pytest.mark.parametrize("length", [700, 1024, 4096])
def test_a_sample_fits_to_the_token(prompter, length, haystack):
    for task in NEEDLE_TASKS:
        for number in range(3):
            sample = drawn(task, number, haystack=haystack)
            fitted = fit_needles(sample, prompter, length)
            total = len(fitted.prompt) + max(len(one.tokens) for one in fitted.answers)
            # Two characters may be one token where either alone is one, so a token may be left over.
            assert length - (prompter.encoder.name != "bytes") <= total <= length
            text = prompter.encoder.decode(np.append(fitted.prompt, fitted.answers[0].tokens))
            assert all(needle in text for _, needle in sample.hidden)
            assert sample.question in text and text.endswith(sample.prefix.strip() + sample.answer)


def test_a_length_that_is_too_short_says_how_many_tokens_are_needed(prompter):
    sample = drawn("needle")
    with pytest.raises(ValueError, match=r"a length must hold needles, question and answer, got 20 tokens") as error:
        fit_needles(sample, prompter, 20)
    least = int(re.search(r"use a length of (\d+)", str(error.value))[1])
    assert len(fit_needles(sample, prompter, least).prompt) < least
    with pytest.raises(ValueError, match=f"use a length of {least} or more"):
        fit_needles(sample, prompter, least - 1)


def test_a_chat_has_the_generation_prompt_before_the_given_words(prompter):
    text = prompter.text("Which?", " It is")
    if prompter.template is None:
        assert text == "Which? It is"
        assert tuple(prompter.tokens(text)[: len(prompter.encoder.start)]) == prompter.encoder.start
    else:
        assert text == f"{START}user\nWhich?{END}\n{START}assistant\nIt is"
        assert prompter.tokens(text)[0] == prompter.encoder.encode([START])[0][0]


def test_an_answer_goes_on_with_the_tokens_of_its_prompt(folder):
    encoder = open_encoder(DataConfig(tokenizer=str(folder)), vocab_size=1000)
    prompter = Prompter(encoder=encoder)

    def forms(text, answer):
        return [(encoder.decode(np.array(one.tokens)), one.joins) for one in prompter.continuations(text, answer)]

    assert forms("a b", " c") == [(" c", True)]  # the answer has its own space
    assert forms("a\n", "c") == [("c", True)]
    assert forms("a", "b") == [(" b", True), ("b", True)]
    # "t" and "h" are one token, so the prompt's last token changes: the answer alone counts, also with a space.
    assert forms("at", "he") == [(" he", True), ("he", False)]


def test_rows_have_targets_on_the_answer_alone():
    rows = prepare_data(config(tasks=["needle"])).training
    row = rows[5]
    at = np.flatnonzero(row["targets"] >= 0)
    answer = bytes(row["targets"][at].astype(np.uint8)).decode()
    assert re.fullmatch(r" \d{7}", answer) and np.array_equal(np.diff(at), [1] * 7)
    np.testing.assert_array_equal(row["tokens"][at + 1], row["targets"][at])
    text = bytes(row["tokens"][1:].astype(np.uint8)).decode()
    assert f" is{answer}." in text and text.endswith(f" is{answer}") and row["tokens"][0] == 256
    np.testing.assert_array_equal(row["positions"], np.arange(256))
    assert not row["document_ids"].any()


def test_a_sequence_may_hold_several_documents():
    row = row_of([(np.array([5, 6]), (7,)), (np.array([8]), (9, 10))], 8)
    assert row["tokens"].tolist() == [5, 6, 7, 8, 9, 10, 0, 0]
    assert row["targets"].tolist() == [-1, 7, -1, 9, 10, -1, -1, -1]
    assert row["positions"].tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert row["document_ids"].tolist() == [0, 0, 0, 1, 1, 1, -1, -1]


def test_tasks_take_turns_and_held_out_sequences_are_others():
    data = prepare_data(config(600, tasks=["needle", "needle-uuid"]))
    texts = [data.decode(data.training[index]["tokens"]) for index in range(4)]
    assert ["code" in text for text in texts] == [False, True, False, True] and len(set(texts)) == 4
    assert data.decode(data.validation[0]["tokens"]) != texts[0]
    assert num_held_out(data.validation) is None and data.has_one_document
    assert data.fingerprint != prepare_data(config(600, tasks=["needle-uuid"])).fingerprint


def test_a_haystack_of_the_users(tmp_path):
    path = tmp_path / "hay.txt"
    path.write_text("alpha  beta\ngamma. " * 20)
    data = prepare_data(config(400, haystack=str(path)))
    assert "alpha beta gamma. alpha" in data.decode(data.training[0]["tokens"])
    for content, said in ((b"", "must hold text"), (b" \n", "must hold text"), (b"\xff", "must be UTF-8")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"data.needles.haystack {said}, got .*hay.txt"):
            read_haystack(str(path))
    with pytest.raises(ValueError, match=r"data.needles.haystack must be a readable file, got .*gone.txt"):
        read_haystack(str(tmp_path / "gone.txt"))


def test_wrong_settings_are_one_line():
    with pytest.raises(ValueError, match=r"data.source=needles with needle: a length must hold .* got 64 tokens"):
        prepare_data(config(64))
    with pytest.raises(ConfigError, match=r"data.needles.tasks must be different names, at least one, got \[\]"):
        NeedlesConfig(tasks=())
    with pytest.raises(ConfigError, match="got .*needel"):
        config(tasks=["needel"])
    with pytest.raises(ConfigError, match="needles must be the only data.source"):
        config_from_dict({**_settings(), "data": {"source": {"needles": 1.0}}})
    with pytest.raises(ConfigError, match="got needles in data.validation_source"):
        config_from_dict({**_settings(), "data": {"validation_source": "needles"}})


def _settings():
    return {
        "model": {"vocab_size": 257, "hidden_size": 16, "num_layers": 1, "num_heads": 1, "mlp_size": 16},
        "sequence": {"length": 256},
        "train": {"steps": 1},
    }
