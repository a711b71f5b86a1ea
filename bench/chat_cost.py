"""Rendering, checks and masks of conversations as a share of tokenizing, and tokens a second beside datasets.map.

    python bench/chat_cost.py [--write]    about 5 minutes on 2 cores; needs transformers and datasets

A tokenizer of 32,768 tokens is trained on Python's standard library. Conversations are lines of the library, half of
the answers with a call of a tool. Tokenizing is the call of the tokenizers library that gives no places of tokens; what
the places cost, inside that library, is a figure of its own, and so is the check that the text has all words of the
messages. With short answers this check renders the template once more. All figures are seconds of the processor on one
thread, medians of rounds in which all sides take turns.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sppo_jax.config import config_from_dict
from sppo_jax.data.chat.roles import Chat
from sppo_jax.data.chat.spans import overlaps
from sppo_jax.data.chat.template import ChatTemplate
from sppo_jax.data.chat.words import check_words
from sppo_jax.data.open import open_data
from sppo_jax.data.tokens.encoding import FileEncoder

RESULT = Path(__file__).parent / "results" / "chat_cost.json"
VOCABULARY, ROUNDS = 32_768, 5
# Turns of a conversation, and conversations.
SIZES = ((2, 600), (24, 60), (96, 15), (320, 5))
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}REGION{{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}
{{- '<|im_end|>\\n' }}ENDREGION
{%- else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
PLAIN = TEMPLATE.replace("ENDREGION", "").replace("REGION", "")
MARKED = TEMPLATE.replace("ENDREGION", "{% endgeneration %}").replace("REGION", "{% generation %}")


def library() -> list[str]:
    """Returns lines of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line]


def write_tokenizer(folder: Path, lines: list[str]) -> Any:
    """Trains the tokenizer and writes it; returns it as transformers has it."""
    import tokenizers
    import transformers

    level = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(lines, trainer)
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    found.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(MARKED)
    return found


def draw(rng: random.Random, lines: list[str], turns: int, *, short: bool = False) -> list[dict[str, Any]]:
    """Draws a conversation of some turns; with short answers half of them are "ok"."""

    def text() -> str:
        at = rng.randrange(len(lines) - 40)
        return "\n".join(lines[at : at + rng.randint(4, 30)])

    found: list[dict[str, Any]] = []
    while len(found) < turns:
        found.append({"role": "user", "content": text()})
        call = {"type": "function", "function": {"name": "f", "arguments": {"line": rng.choice(lines)}}}
        found.append({"role": "assistant", "content": text()} | ({"tool_calls": [call]} if rng.random() < 0.5 else {}))
        if short and rng.random() < 0.5:
            found[-1]["content"] = "ok"
    return found


def seconds(call: Callable[[], object]) -> float:
    """Returns seconds of the processor, which other programs on the machine change little."""
    start_s = time.process_time()
    call()
    return time.process_time() - start_s


def share(encoder: FileEncoder, rows: list[list[dict[str, Any]]], source: str) -> dict[str, float]:
    """Measures one size: tokenizing alone, and what conversations need beside tokenizing."""
    template = ChatTemplate(source, name="t", variables={})
    texts = [template.render(Chat(messages=row)).text for row in rows]
    own = encoder._tokenizer
    num_tokens = sum(len(one.ids) for one in own.encode_batch_fast(texts, add_special_tokens=False))

    def tokenize() -> None:
        for at in range(0, len(texts), 64):
            own.encode_batch_fast(texts[at : at + 64], add_special_tokens=False)

    def place() -> None:
        for at in range(0, len(texts), 64):
            own.encode_batch(texts[at : at + 64], add_special_tokens=False)

    def render() -> None:
        for row in rows:
            template.render(Chat(messages=row))

    learned = [template.render(Chat(messages=row)).trained for row in rows]
    located = encoder.locate(texts)

    def mask() -> None:
        for one, spans in zip(located, learned, strict=True):
            overlaps(one, spans)

    fitted = [template._forms.fitted(row) for row in rows]
    marked = [template._marks(row, None, prompt=False) for row in fitted]

    again = functools.partial(template._text, template._plain, tools=None, prompt=False)

    def check() -> None:
        for row, one in zip(fitted, marked, strict=True):
            check_words(row, one, again, template._frames)

    timed = [tuple(map(seconds, (tokenize, place, render, mask, check))) for _ in range(ROUNDS)]
    tokenize_s, place_s, render_s, mask_s, check_s = (statistics.median(column) for column in zip(*timed, strict=True))
    return {
        "tokens a conversation": round(num_tokens / len(rows)),
        "tokenizing, tokens/s": round(num_tokens / tokenize_s),
        "rendering and checks": round(render_s / tokenize_s, 3),
        "check of the words": round(check_s / tokenize_s, 3),
        "masks": round(mask_s / tokenize_s, 3),
        "rendering, checks and masks": round((render_s + mask_s) / tokenize_s, 3),
        "places of tokens, by the library": round((place_s - tokenize_s) / tokenize_s, 3),
    }


def beside_datasets(folder: Path, tokenizer: Any, rows: list[list[dict[str, Any]]]) -> dict[str, int]:
    """Measures whole files: from JSON lines to tokens and masks on the disk, here and by datasets.map."""
    import datasets

    datasets.disable_progress_bars()
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    counts: list[int] = []

    def ours(number: int) -> None:
        data = {"source": str(path), "tokenizer": str(folder), "cache": str(folder / f"cache{number}")}
        shape = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8}
        settings = {"model": shape, "data": data, "sequence": {"length": 1 << 20}, "train": {"steps": 1}}
        learned = open_data(config_from_dict(settings)).sources[0].training.corpus.learned
        counts.append(learned.tokens)

    def convert(batch: dict[str, Any]) -> dict[str, Any]:
        return tokenizer.apply_chat_template(
            batch["messages"], chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True
        )

    def theirs(number: int) -> None:
        made = datasets.load_dataset(
            "json", data_files=str(path), split="train", cache_dir=str(folder / f"datasets{number}")
        )
        made.map(convert, batched=True, batch_size=64, remove_columns=["messages"])

    timed = [(seconds(lambda n=n: ours(n)), seconds(lambda n=n: theirs(n))) for n in range(3)]
    ours_s, theirs_s = (statistics.median(column) for column in zip(*timed, strict=True))
    return {
        "tokens": counts[0],
        "this project, tokens/s": round(counts[0] / ours_s),
        "datasets.map, tokens/s": round(counts[0] / theirs_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import datasets
    import tokenizers
    import transformers

    lines, rng = library(), random.Random(0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tokenizer = write_tokenizer(folder, lines)
        encoder = FileEncoder(folder, start_token=None, end_token=None)
        drawn = {(turns, "long"): [draw(rng, lines, turns) for _ in range(count)] for turns, count in SIZES}
        short = {(turns, "short"): [draw(rng, lines, turns, short=True) for _ in range(n)] for turns, n in SIZES[:2]}
        rows = []
        for (turns, answers), conversations in (drawn | short).items():
            for name, source in (("regions", MARKED), ("no regions", PLAIN)):
                kind = {"turns": turns, "answers": answers, "template": name}
                rows.append(kind | share(encoder, conversations, source))
                print(rows[-1], flush=True)
        whole = beside_datasets(folder, tokenizer, drawn[24, "long"])
        print(whole)
    versions = {module.__name__: module.__version__ for module in (transformers, tokenizers, datasets)}
    machine = {"cpu": platform.processor() or platform.machine(), "vocabulary": encoder.num_ids}
    if args.write:
        content = {
            "date": f"{datetime.date.today()}",
            **versions,
            **machine,
            "share of tokenizing": rows,
            "files": whole,
        }
        RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
