"""Text, ids and masks are transformers', for every construct of a template, with regions and without."""

import datetime
import random

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
from chat_cases import (
    BLOCKS,
    CHANGED,
    PLAIN,
    TEMPLATES,
    TOOLS,
    WORDS,
    draw,
    make_tokenizer,
    replaced,
    without_regions,
    without_words,
)

from sppo_jax.data.chat.roles import Chat
from sppo_jax.data.chat.spans import overlaps
from sppo_jax.data.chat.template import ChatTemplate
from sppo_jax.data.tokens.encoding import BytesEncoder, FileEncoder

DAY = "2026-01-31"


class Today:
    """The clock of transformers, stopped."""

    @staticmethod
    def now():
        return datetime.datetime.fromisoformat(DAY)


FEW, MANY = 20, 200


@pytest.fixture(autouse=True)
def today(monkeypatch):
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Today)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    made = make_tokenizer(folder)
    return made, FileEncoder(folder / "tokenizer.json", start_token=None, end_token=None)


def wanted_of(tokenizer, messages, source, tools=None):
    """Returns what transformers gives: ids and mask; None where the template refuses."""
    try:
        found = tokenizer.apply_chat_template(
            messages,
            chat_template=source,
            tools=tools,
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
    except Exception as error:
        assert "too many" in str(error)
        return None
    return found["input_ids"], found["assistant_masks"]


def check(made, construct, count):
    """Draws conversations; returns how many were compared, and how many both refused."""
    source = (TEMPLATES | BLOCKS)[construct]
    templates = [ChatTemplate(text, name="t", variables={}, date=DAY) for text in (source, without_regions(source))]
    assert [template.has_generation for template in templates] == [True, False]
    tokenizer, encoder = made
    rng, refused, learned = random.Random(construct), 0, 0
    for _ in range(count):
        messages = without_words(draw(rng), construct)
        if construct in BLOCKS:
            other = replaced(messages, "tree", "evergreen") if construct in CHANGED else messages
            wanted = wanted_of(tokenizer, other, PLAIN)
        else:
            wanted = wanted_of(tokenizer, messages, source, TOOLS.get(construct))
        for template in templates:
            if wanted is None:
                refused += 1
                with pytest.raises(ValueError, match="too many"):
                    template.render(Chat(messages=messages, tools=TOOLS.get(construct)))
                continue
            rendered = template.render(Chat(messages=messages, tools=TOOLS.get(construct)))
            (located,) = encoder.locate([rendered.text])
            assert located.tokens.tolist() == wanted[0]
            mask = overlaps(located, rendered.trained)
            assert mask.astype(int).tolist() == wanted[1]
            learned += mask.sum()
    assert learned and (refused > 0) == (construct == "raise")


@pytest.mark.parametrize("construct", [*TEMPLATES, *BLOCKS])
def test_ids_and_masks_are_those_of_transformers(tokenizer, construct):
    check(tokenizer, construct, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("construct", [*TEMPLATES, *BLOCKS])
def test_ids_and_masks_of_four_thousand_conversations(tokenizer, construct):
    check(tokenizer, construct, MANY)


@pytest.mark.parametrize("kind", ["tokens", "bytes"])
def test_a_search_by_halves_finds_the_tokens_that_share_a_character(tokenizer, kind):
    encoder = tokenizer[1] if kind == "tokens" else BytesEncoder()
    rng = random.Random(kind)
    for _ in range(200):
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12)))
        cuts = sorted(rng.sample(range(len(text) + 1), 2 * min(len(text) // 2, rng.randint(0, 3))))
        spans = list(zip(cuts[::2], cuts[1::2], strict=True))
        (located,) = encoder.locate([text])
        wanted = [any(a < last and first < b for first, last in spans) for a, b in located.offsets().tolist()]
        assert overlaps(located, spans).tolist() == wanted
        assert [located.span(at) for at in range(len(wanted))] == [tuple(pair) for pair in located.offsets().tolist()]
