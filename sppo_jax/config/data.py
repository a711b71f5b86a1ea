"""The settings of the data: sources, tokens, packing, and the recall task; imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from sppo_jax.config.group import ConfigError, Group


@dataclass(frozen=True, kw_only=True)
class RecallConfig(Group):
    """The recall task (`data.source: recall`): keys with a value each, asked for later; chance is 1 / values.

    Args:
        pairs: keys of a sequence, each asked for once.
        values: what may stand behind a key, and everywhere else.
        distances: how many tokens before a question its answer stands, each as often as every other.
    """

    group: ClassVar[str] = "data.recall"
    pairs: int = 8
    values: int = 16
    distances: tuple[int, ...] = (129, 193, 257, 321, 385)

    def _check(self) -> None:
        self._at_least(1, "pairs")
        self._at_least(2, "values")
        if len(set(self.distances)) != len(self.distances) or min(self.distances, default=0) < 1:
            raise ConfigError(
                f"data.recall.distances must be different numbers of at least 1, got {list(self.distances)}; "
                "write e.g. [129, 257]"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig(Group):
    """Where the documents come from and how they fill sequences.

    Args:
        source: a file, a directory or a pattern of .txt, .jsonl, .jsonl.gz, .parquet, .bin or .npy files, or "stdlib"
            (the running Python's own standard library); or a mapping of several of these to their weights; or
            "recall" (sequences drawn at random, see `recall`).
        tokenizer: a tokenizer.json, or a directory with one, for text; None: that of model.hf, else text is bytes.
        text_key: key of the text in a JSON line, column of the text in a Parquet file.
        start_token: what every document of text begins with; "auto": what the tokenizer puts there; None: nothing.
        end_token: what every document of text ends with; as before.
        token_dtype: element type of a .bin file.
        separator: token id that ends a document in a .npy or .bin file; None: the file is one document.
        pack: "whole": documents packed into sequences by best fit, cut only where they are longer than a sequence;
            "stream": end to end, cut wherever a sequence ends; "none": every document in sequences of its own.
        validation_source: documents to validate on, given like `source`; None: some are held out of `source`.
        validation_fraction: share of each source's documents held out, by a hash of their names, where no
            validation_source is given.
        seed: which documents share a sequence, and the order of the sequences.
        cache: directory for what is tokenized once; None: the user's cache directory.
        recall: the task of `source: recall`.
    """

    group: ClassVar[str] = "data"
    source: str | dict[str, float] = "stdlib"
    tokenizer: str | None = None
    text_key: str = "text"
    start_token: str | None = "auto"
    end_token: str | None = "auto"
    token_dtype: Literal["uint8", "uint16", "uint32", "int32"] = "uint16"
    separator: int | None = None
    pack: Literal["whole", "stream", "none"] = "whole"
    validation_source: str | dict[str, float] | None = None
    validation_fraction: float = 0.05
    seed: int = 0
    cache: str | None = None
    recall: RecallConfig = field(default_factory=RecallConfig)

    def _check(self) -> None:
        self._fraction("validation_fraction")
        self._at_least(0, "seed", *(["separator"] if self.separator is not None else []))
        self._at_most(2**31 - 1, "seed")
        self._check_weights("source", self.sources)
        if self.validation_source is not None:
            self._check_weights("validation_source", self.validation_sources)

    def _check_weights(self, name: str, sources: Mapping[str, float]) -> None:
        wrong = {source: weight for source, weight in sources.items() if not weight > 0}
        if wrong or not sources:
            got = ", ".join(f"{source}: {weight:g}" for source, weight in wrong.items()) or "no source"
            raise ConfigError(f"data.{name} must give every source a weight above 0, got {got}; leave such sources out")
        if "recall" in sources and (isinstance(getattr(self, name), dict) or name != "source"):
            raise ConfigError(
                f"recall must be the only data.source (it draws its own validation), got it in data.{name}; "
                f"write data.source: recall alone"
            )

    @property
    def sources(self) -> dict[str, float]:
        """Weights by source, in the order of their names."""
        return _weights(self.source)

    @property
    def validation_sources(self) -> dict[str, float]:
        """Weights by source of documents that are for validation alone."""
        return _weights(self.validation_source or {})


def _weights(source: str | dict[str, float]) -> dict[str, float]:
    return dict(sorted(source.items())) if isinstance(source, dict) else {source: 1.0}
