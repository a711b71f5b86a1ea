"""Settings of the data: sources, tokens, packing, and the recall task; imports no jax."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from sppo_jax.config.section import ConfigError, Section

BYTES = "bytes"  # as data.tokenizer: no tokenizer
# Sources that are drawn, each the only one of its run: they hold no documents.
DRAWN = ("recall", "needles")
NEEDLE_TASKS = ("needle", "needle-keys", "needle-uuid")
# The beginnings of addresses that data.cache may have.
BUCKETS = ("s3://", "gs://", "abfs://", "abfss://")


@dataclass(frozen=True, kw_only=True)
class RecallConfig(Section):
    """The recall task (`data.source: recall`): each key has a value, which the sequence asks for later.

    Args:
        pairs: number of keys of a sequence; the sequence asks for each key once; at least 1.
        values: number of different values, so that a guess is right with probability 1 / values; at least 2.
        distances: tokens between a question and its answer, all distances equally frequent; a list of different whole
            numbers, each at least 1.
    """

    section: ClassVar[str] = "data.recall"
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
class NeedlesConfig(Section):
    """The needle tasks (`data.source: needles`): a text in which sentences with numbers hide ends with a question.

    Args:
        tasks: tasks whose samples take turns: "needle" (one number), "needle-keys" (four numbers, one is asked for) and
            "needle-uuid" (the same with uuids); a list of different names.
        haystack: path of a text in which the sentences hide; null: sentences of drawn words.
    """

    section: ClassVar[str] = "data.needles"
    tasks: tuple[Literal["needle", "needle-keys", "needle-uuid"], ...] = ("needle",)
    haystack: str | None = None

    def _check(self) -> None:
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ConfigError(
                f"data.needles.tasks must be different names, at least one, got {list(self.tasks)}; write e.g. [needle]"
            )
        self._local("haystack")


@dataclass(frozen=True, kw_only=True)
class ChatConfig(Section):
    """Conversations: how they become text, and which of their tokens are trained.

    Args:
        messages_key: key of the messages in a row; `conversations` of ShareGPT is recognized as well.
        tools_key: key of the tools in a row that has any.
        template: path of a chat template; "auto": the template in the tokenizer's directory.
        train_on: tokens that are trained: "assistant": those of the assistant's turns, "last": those of the last of
            these turns, "all": all tokens; a message may say "train": false.
        too_long: treatment of a conversation longer than a sequence: "newest" keeps the newest turns, from a user's
            turn on, and the system message; "turns" keeps whole leading turns, "cut" cuts the conversation into pieces,
            "drop" leaves it out, "refuse" stops; "auto": "newest" with `train_on` "last", else "turns".
        date: the date that a template writes as today's, such as 2026-01-31; null: a template may not write a date.
        values: further variables of the template, such as {enable_thinking: false}.
    """

    section: ClassVar[str] = "data.chat"
    messages_key: str = "messages"
    tools_key: str = "tools"
    template: str = "auto"
    train_on: Literal["assistant", "last", "all"] = "assistant"
    too_long: Literal["auto", "newest", "turns", "cut", "drop", "refuse"] = "auto"
    date: str | None = None
    values: dict[str, bool | int | float | str] = field(default_factory=dict, hash=False)

    def _check(self) -> None:
        try:
            datetime.date.fromisoformat(self.date or "2026-01-31")
        except ValueError:
            raise ConfigError(f"data.chat.date must be a day, got {self.date!r}; write it as in 2026-01-31") from None

    def resolved(self) -> ChatConfig:
        """Returns these settings with the treatment of long conversations that "auto" chooses."""
        if self.too_long != "auto":
            return self
        return dataclasses.replace(self, too_long="newest" if self.train_on == "last" else "turns")


@dataclass(frozen=True, kw_only=True)
class SourceConfig(Section):
    """A source with its own settings; a null setting has the value of `data`.

    Args:
        weight: share of the sequences relative to the other sources; above 0.
        format: content of the rows, see `data.format`.
        text_key: key of the text, see `data.text_key`.
        ignore_keys: keys that are ignored, see `data.ignore_keys`.
        messages_key: key of the messages, see `data.chat.messages_key`.
        tools_key: key of the tools, see `data.chat.tools_key`.
        train_on: tokens of a conversation that are trained, see `data.chat.train_on`.
        min_tokens: documents with fewer tokens are left out; at least 1.
        max_tokens: documents with more tokens are left out; at least 1; null: no limit.
    """

    section: ClassVar[str] = "data.source.NAME"
    weight: float = 1.0
    format: Literal["auto", "text", "chat", "tokens", "prompt", "alpaca"] | None = None
    text_key: str | None = None
    ignore_keys: tuple[str, ...] | None = None
    messages_key: str | None = None
    tools_key: str | None = None
    train_on: Literal["assistant", "last", "all"] | None = None
    min_tokens: int = 1
    max_tokens: int | None = None

    def _check(self) -> None:
        self._at_least(1, "min_tokens", *(["max_tokens"] if self.max_tokens is not None else []))
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ConfigError(
                f"data.source.NAME.max_tokens must be at least min_tokens, {self.min_tokens}, got {self.max_tokens}; "
                "raise max_tokens"
            )


Sources = dict[str, float | SourceConfig]


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Where the documents come from and how they fill sequences.

    Args:
        source: a file, a directory or a pattern, local or with an address (s3://, gs://, abfs://, hf://), in one of the
            forms of docs/data.md; "stdlib": the source files of the running Python's standard library; "recall":
            sequences of the recall task; "needles": sequences of the needle tasks; or a mapping of several sources (all
            but "recall" and "needles") to their weights, which are shares of the sequences relative to each other, each
            above 0; instead of a weight, a source may have its own settings.
        tokenizer: path of a tokenizer.json, or of a directory with one, for text; "bytes": bytes as tokens; null: the
            tokenizer of `model.hf`, or bytes where no model is imported.
        format: content of the rows: "text", "chat" (conversations), "tokens" (`input_ids`, with `labels` or a mask of
            the trained tokens), "prompt" (`prompt` and `completion`), "alpaca" (`instruction`, `input` and `output`),
            or "auto": decided by the keys of the first row of a file, each of whose rows must have one form.
        text_key: key of the text in a JSON line, or column of the text in a Parquet file.
        ignore_keys: keys of rows and of messages that are ignored, although they may say what is trained; a list.
        start_token: token that begins every document of text; "auto": the tokenizer's own; null: none.
        end_token: token that ends every document of text; "auto": `eos_token` of the tokenizer's folder, or what the
            tokenizer adds if this stops generation or no `eos_token` is named; null: none.
        token_dtype: dtype of the tokens in a .bin file.
        separator: token id that ends a document in a .npy or .bin file; at least 0; null: the file is one document.
        pack: how documents fill sequences: "whole" packs them by best fit and cuts only those longer than a sequence,
            "stream" puts them end to end and cuts wherever a sequence ends, "none" gives each its own sequences.
        fill: share of a sequence that packing fills, above 0, at most 1; the rest is padding, which
            `sequence.groups=flex` needs in order to move documents.
        validation_source: documents to validate on, given like `data.source` but never "recall" or "needles"; null:
            some documents of `data.source` are held out.
        validation_fraction: share of the documents of each source that is held out, where `data.validation_source` is
            null; at least 0 (none), below 1.
        seed: seed of the packing and of the order of the sequences; 0 to 2147483647.
        cache: directory of the tokenized text, or a bucket (s3://, gs://, abfs://) with parts that `sppo data --part`
            writes; null: the user's cache directory.
        chat: settings of conversations.
        recall: settings of the recall task.
        needles: settings of the needle tasks.
    """

    section: ClassVar[str] = "data"
    source: str | Sources = "stdlib"
    tokenizer: str | None = None
    format: Literal["auto", "text", "chat", "tokens", "prompt", "alpaca"] = "auto"
    text_key: str = "text"
    ignore_keys: tuple[str, ...] = ()
    start_token: str | None = "auto"
    end_token: str | None = "auto"
    token_dtype: Literal["uint8", "uint16", "uint32", "int32"] = "uint16"
    separator: int | None = None
    pack: Literal["whole", "stream", "none"] = "whole"
    fill: float = 1.0
    validation_source: str | Sources | None = None
    validation_fraction: float = 0.05
    seed: int = 0
    cache: str | None = None
    chat: ChatConfig = field(default_factory=ChatConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)
    needles: NeedlesConfig = field(default_factory=NeedlesConfig)

    @property
    def is_drawn(self) -> bool:
        """Whether the sequences are drawn, and no documents are read."""
        return self.source in DRAWN

    @property
    def has_one_document(self) -> bool:
        """Whether each sequence holds one document at most, whatever the documents are."""
        return self.pack == "none" or self.is_drawn

    def _check(self) -> None:
        self._fraction("validation_fraction")
        if not (self.cache or "").startswith(BUCKETS):
            self._local("cache")  # written; what is read is looked at where it is read
        if not 0 < self.fill <= 1:
            raise ConfigError(
                f"data.fill must be above 0 and at most 1, got {self.fill}; use 1, or 0.98 for sequence.groups=flex"
            )
        self._at_least(0, "seed", *(["separator"] if self.separator is not None else []))
        self._at_most(2**31 - 1, "seed")
        self._check_weights("source", self.sources)
        if self.validation_source is not None:
            self._check_weights("validation_source", self.validation_sources)

    def _check_weights(self, name: str, sources: Mapping[str, float]) -> None:
        wrong = {source: weight for source, weight in sources.items() if not weight > 0}
        if wrong or not sources:
            got = ", ".join(f"{source}: {weight:g}" for source, weight in wrong.items()) or "no source"
            change = "leave the source out or raise the weight" if wrong else "name a source"
            raise ConfigError(f"data.{name} must give every source a weight above 0, got {got}; {change}")
        drawn = next((source for source in DRAWN if source in sources), None)
        if drawn and (isinstance(getattr(self, name), dict) or name != "source"):
            raise ConfigError(
                f"{drawn} must be the only data.source (the task draws its own validation sequences), "
                f"got {drawn} in data.{name}; set data.source={drawn}, and no other source"
            )

    def settings_of(self, name: str, source: str | Sources) -> SourceConfig:
        """Returns the settings of a source of `source`, which is `self.source` or `self.validation_source`."""
        found = source[name] if isinstance(source, dict) else 1.0
        return SourceConfig(weight=found) if isinstance(found, float) else found

    def with_settings(self, own: SourceConfig) -> DataConfig:
        """Returns the settings with those that a source has of its own."""

        def given(*names: str) -> dict[str, Any]:
            return {name: getattr(own, name) for name in names if getattr(own, name) is not None}

        chat = dataclasses.replace(self.chat, **given("messages_key", "tools_key", "train_on"))
        return dataclasses.replace(self, chat=chat, **given("format", "text_key", "ignore_keys"))

    def too_long_rules(self) -> list[str]:
        """Returns the treatments of long conversations that the sources have, each once, in order."""
        given = [(name, source) for source in (self.source, self.validation_source or {}) for name in _weights(source)]
        return sorted(
            {self.with_settings(self.settings_of(name, source)).chat.resolved().too_long for name, source in given}
        )

    @property
    def sources(self) -> dict[str, float]:
        """Weights by source, in the order of their names."""
        return _weights(self.source)

    @property
    def validation_sources(self) -> dict[str, float]:
        """Weights by source of the documents that are used only for validation."""
        return _weights(self.validation_source or {})


def _weights(source: str | Sources) -> dict[str, float]:
    if not isinstance(source, dict):
        return {source: 1.0}
    return {name: one if isinstance(one, float) else one.weight for name, one in sorted(source.items())}
