"""How full sequences are where every document has its own, and how full if documents shared them; imports no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from sppo_jax.config import Config
from sppo_jax.data.open import pack_corpus
from sppo_jax.data.rows.corpus import Corpus

# Below this share of filled places a line says what packing would save.
_FULL_ENOUGH = 0.5


@dataclass(frozen=True, kw_only=True)
class Fill:
    """Shares of the places of sequences that hold a token: with every document by itself, and with documents packed."""

    apart: float
    packed: float

    def warning(self, num_steps: int, step_s: float | None) -> str:
        """Returns what packing would save in a line; "" where most places are filled, or packing changes nothing.

        Args:
            num_steps: steps of the run.
            step_s: simulated seconds of a step; None: not known.
        """
        saved = 1 - self.apart / self.packed
        if self.apart >= _FULL_ENOUGH or saved <= 0:
            return ""
        run_s = num_steps * (step_s or 0.0)
        spared = f"{run_s * saved:,.0f} of {run_s:,.0f} s (simulated)" if step_s else f"{saved:.0%} of the steps"
        return (
            f"data.pack=none leaves {1 - self.apart:.0%} of the places of sequences empty; data.pack=whole would leave "
            f"{1 - self.packed:.0%}, and save {spared} for the same documents"
        )


def fill_of(config: Config, corpora: Iterable[tuple[float, Corpus]]) -> Fill | None:
    """Returns how full sequences are; None where documents share sequences already.

    Args:
        config: all settings.
        corpora: the share of the training sequences, and the documents, of each source.
    """
    if config.data.pack != "none":
        return None
    packing = dataclasses.replace(config, data=dataclasses.replace(config.data, pack="whole", fill=1.0))
    shares = [
        [weight * _filled(each, number, corpus) for each in (config, packing)]
        for number, (weight, corpus) in enumerate(corpora)
    ]
    return Fill(apart=sum(apart for apart, _ in shares), packed=sum(packed for _, packed in shares)) if shares else None


def _filled(config: Config, number: int, corpus: Corpus) -> float:
    """Returns the share of the places of a source's sequences that hold a token."""
    rows = pack_corpus(config, number, corpus)
    assert rows is not None
    return corpus.num_tokens / (len(rows) * rows.length)
