"""Small corpora whose tokens are all different, so that each token can be followed."""

import numpy as np
import pytest
from hypothesis import strategies as st

from sppo_jax.data.rows.corpus import Corpus

SIZES = st.lists(st.integers(1, 23), min_size=1, max_size=12)
PACKS = st.sampled_from(["whole", "stream", "none"])


def make_corpus(sizes, num_parts=1, first=0) -> Corpus:
    """Makes documents of some sizes, counting upwards from `first`, spread over several arrays."""
    ends = np.cumsum(np.array(sizes, np.int64))
    tokens = first + np.arange(ends[-1], dtype=np.int32)
    cuts = sorted({int(ends[len(sizes) * part // num_parts - 1]) for part in range(1, num_parts)} - {int(ends[-1])})
    return Corpus(
        parts=tuple(np.split(tokens, cuts)), starts=ends - sizes, ends=ends, hashes=np.arange(len(sizes)) / len(sizes)
    )


def stack(rows) -> dict[str, np.ndarray]:
    """Makes a batch of sequences."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def real_tokens(rows) -> list[int]:
    """Returns what sequences hold, without padding, sorted."""
    batch = stack(rows)
    return sorted(batch["tokens"][batch["document_ids"] >= 0].tolist())


def write_tokenizer(path):
    """Writes a tokenizer of six words that begins texts with <s>, and would truncate and pad them."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<s>", "</s>", "<unk>", "the", "cat", "dog"]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", words.index("<s>"))]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding()
    tokenizer.save(str(path))
    return path
