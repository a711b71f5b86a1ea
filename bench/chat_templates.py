"""Chat templates of others against transformers: the same text, ids and masks; and what is learned without regions.

    python bench/chat_templates.py FOLDER... [--draws 60] [--write]    all *.jinja below the folders, minutes

Needs transformers. No template is kept: `--write` writes names, hashes and counts to results/chat_templates.json.
For a template with `{% generation %}` regions the ids and masks must be transformers', and the twin without regions
shows where turns found in the template differ from what its author marked. For a template without regions the text must
be transformers', and each assistant's words must be learned and nobody else's. Templates that leave out words, such as
calls that they know nothing of, are refused and counted.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import random
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from sppo_jax.data.chat.roles import Chat
from sppo_jax.data.chat.spans import overlaps
from sppo_jax.data.chat.template import ChatTemplate
from sppo_jax.data.tokens.encoding import FileEncoder

RESULT = Path(__file__).parent / "results" / "chat_templates.json"
DAY = "2026-01-31"
REGION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
# No word is part of another, so that each place of a message's words is known.
WORDS = [
    f"{a}{b}" for a in "blorf crint dwabe fliim gronk snard trelp vuxit".split() for b in ("a", "\u00e9", "\U0001f600")
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Finds a word.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]


class Today:
    """The clock of transformers, stopped."""

    @staticmethod
    def now() -> datetime.datetime:
        return datetime.datetime.fromisoformat(DAY)


def draw(rng: random.Random, *, tools: bool) -> list[dict[str, Any]]:
    """Draws a conversation whose words all differ in kind by the message: number and role are part of each word."""
    found: list[dict[str, Any]] = []

    def say(role: str, **more: Any) -> None:
        mark = f"{role[0]}{len(found)}"
        text = " ".join(f"{mark}{rng.choice(WORDS)}" for _ in range(rng.randint(1, 6)))
        found.append({"role": role, "content": text} | more)

    if rng.random() < 0.5:
        say("system")
    for _ in range(rng.randint(1, 3)):
        say("user")
        if tools and rng.random() < 0.6:
            call = {"type": "function", "id": "call00000", "function": {"name": "look_up", "arguments": {"word": "w"}}}
            say("assistant", tool_calls=[call])
            found[-1]["content"] = ""
            say("tool", tool_call_id="call00000", name="look_up")
        thinking = {"reasoning_content": f"hm{len(found)}"} if rng.random() < 0.4 else {}
        say("assistant", **thinking)
    return found


def make_tokenizer() -> Any:
    """Returns a small tokenizer of bytes as transformers has it, with the special tokens that templates read."""
    import tokenizers
    import transformers

    level = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(special.values()), initial_alphabet=level.alphabet()
    )
    made.train_from_iterator([" ".join(WORDS), "assistant user system tool <|im_start|><|im_end|>\n"] * 9, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def compare(tokenizer: Any, encoder: FileEncoder, source: str, num_draws: int) -> dict[str, Any]:
    """Compares one template on drawn conversations; returns counts."""
    regions = bool(REGION.search(source))
    variables = dict(tokenizer.special_tokens_map)
    ours = ChatTemplate(source, name="t", variables=variables, date=DAY)
    twin = ChatTemplate(REGION.sub("", source), name="t", variables=variables, date=DAY) if regions else None
    counts: Counter[str] = Counter(drawn=num_draws)
    reasons: Counter[str] = Counter()
    rng = random.Random(0)
    for number in range(num_draws):
        tools = TOOLS if number % 2 else None
        messages = draw(rng, tools=bool(number % 2))
        # transformers gets the forms that the template takes, which it does not look for itself.
        theirs, error = _theirs(tokenizer, source, ours._forms.fitted(messages), tools, regions)
        try:
            rendered = ours.render(Chat(messages=messages, tools=tools))
        except ValueError as ours_error:
            leaves_out = "left out of message" in str(ours_error)
            kind = "refused, words are left out" if leaves_out else "only we refuse"
            counts["both refuse" if theirs is None else kind] += 1
            if theirs is not None:
                reasons[str(ours_error)[:160]] += 1
            continue
        if theirs is None:
            counts["only transformers refuses"] += 1
            reasons[error[:160]] += 1
            continue
        (located,) = encoder.locate([rendered.text])
        mask = overlaps(located, rendered.trained).astype(int).tolist()
        counts["rendered"] += 1
        counts["same ids"] += located.tokens.tolist() == theirs["input_ids"]
        if regions:
            counts["same masks"] += mask == theirs["assistant_masks"]
            counts["twin has the same masks"] += twin is not None and _same(twin, messages, tools, rendered.trained)
        else:
            counts["answers learned, nothing else"] += _learns_answers(messages, rendered.text, rendered.trained)
    return {"regions": regions} | dict(counts) | ({"reasons": dict(reasons.most_common(2))} if reasons else {})


def _theirs(tokenizer: Any, source: str, messages: list, tools: Any, regions: bool) -> tuple[dict | None, str]:
    try:
        found = tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=source, return_assistant_tokens_mask=regions, return_dict=True
        )
        return found, ""
    except Exception as error:  # a template is a program
        return None, f"transformers: {type(error).__name__} {' '.join(str(error).split())}"


def _same(twin: ChatTemplate, messages: list, tools: Any, trained: tuple) -> bool:
    try:
        return twin.render(Chat(messages=messages, tools=tools)).trained == trained
    except ValueError:
        return False


def _learns_answers(messages: list, text: str, trained: tuple) -> bool:
    """Returns whether all words of the assistant that are in the text are learned, and no words of others."""
    learned = [text[first:last] for first, last in trained]
    for number, message in enumerate(messages):
        words = f"{message['role'][0]}{number}"
        total = sum(text.count(f"{words}{word}") for word in WORDS)
        inside = sum(part.count(f"{words}{word}") for part in learned for word in WORDS)
        if inside != (total if message["role"] == "assistant" else 0):
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    import tokenizers
    import transformers
    from transformers.utils import chat_template_utils

    transformers.logging.set_verbosity_error()
    chat_template_utils.datetime = Today
    tokenizer, rows = make_tokenizer(), []
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        encoder = FileEncoder(Path(place), start_token=None, end_token=None)
    for folder in args.folders:
        for path in sorted(folder.rglob("*.jinja")):
            source = path.read_text(encoding="utf-8")
            try:
                found = compare(tokenizer, encoder, source, args.draws)
            except ValueError as error:
                found = {"reasons": {str(error)[:160]: args.draws}}
            name = {"from": folder.name, "name": path.name, "sha256": hashlib.sha256(source.encode()).hexdigest()[:16]}
            rows.append(name | found)
            print(path.name, {key: value for key, value in found.items() if key != "drawn"}, flush=True)
    total: Counter[str] = Counter()
    for row in rows:
        total.update({key: value for key, value in row.items() if type(value) in (int, bool)})
    versions = {module.__name__: module.__version__ for module in (transformers, tokenizers)}
    print(f"{len(rows)} templates", dict(total))
    if args.write:
        content = {"date": f"{datetime.date.today()}", **versions, "total": dict(total), "templates": rows}
        RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
