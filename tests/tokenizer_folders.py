"""Folders with a small tokenizer, in which any of the places may say something about tokens and templates."""

import functools
import json

import pytest

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

START, END, OTHER = "<|im_start|>", "<|im_end|>", "<|other|>"
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


PAIRS = "th he el ll lo wo or rl ld an us se er as si is st ta qu ui ck".split()


@functools.cache
def _plain() -> str:
    """Returns a tokenizer of bytes with a few joined letters: 280 tokens, the same in every version of the library."""
    level = tokenizers.pre_tokenizers.ByteLevel
    tokens = ["<s>", "</s>", "<pad>", *sorted(level.alphabet()), *PAIRS]
    vocab = {token: number for number, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [tuple(pair) for pair in PAIRS]))
    made.pre_tokenizer, made.decoder = level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    made.add_special_tokens(tokens[:3])
    return made.to_str()


def make_folder(folder, *, added=(), ends_with=None, settings=None, files=None):
    """Writes a folder with a tokenizer.

    Args:
        folder: to make.
        added: special tokens that tokenizer.json has.
        ends_with: the token that its post-processor ends a text with.
        settings: of tokenizer_config.json, over SETTINGS; None: there is no such file.
        files: further files by name, text or JSON.

    Returns:
        The number of tokens of tokenizer.json.
    """
    made = tokenizers.Tokenizer.from_str(_plain())
    made.add_tokens([tokenizers.AddedToken(token, special=True) for token in added])
    if ends_with:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"$A {ends_with}", special_tokens=[(ends_with, made.token_to_id(ends_with))]
        )
    folder.mkdir(exist_ok=True, parents=True)
    made.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return made.get_vocab_size(with_added_tokens=True)
