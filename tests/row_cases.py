"""Small files of rows, opened, and what of them is trained."""

import json

from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data
from sppo_jax.data.tokens.mask_bit import split_words

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_SHAPE = {"vocab_size": 257, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8}


def opened(tmp_path, rows, length=256, train_on="assistant", **data):
    """Opens rows as bytes, conversations by a plain template."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    settings = {
        "source": str(path),
        "tokenizer": "bytes",
        "validation_fraction": 0,
        "cache": str(tmp_path / "cache"),
        "chat": {"template": str(tmp_path / "t.jinja"), "train_on": train_on},
    }
    sections = {"model": _SHAPE, "data": settings | data, "sequence": {"length": length}, "train": {"steps": 1}}
    return open_data(config_from_dict(sections))


def documents(data):
    """Returns the tokens of each document to train on, and which of them are trained."""
    corpus = data.sources[0].training.corpus
    return [split_words(corpus.read(start, end)) for start, end in zip(corpus.starts, corpus.ends, strict=True)]


def trained(data):
    """Returns what is trained of each document, as text."""
    return ["".join(map(chr, tokens[learned])) for tokens, learned in documents(data)]
