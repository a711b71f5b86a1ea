"""Tokens for which a model has no row: what can be changed depends on whether its weights are given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sppo_jax.config import Config

P = ParamSpec("P")
T = TypeVar("T")


class VocabularyTooSmall(ValueError):
    """Tokens are beyond the vocabulary of a model.

    Args:
        must: the rule.
        got: the token, or the size that was found.
        needed: the smallest `model.vocab_size` that would do.
        other: another change, with which the sentence ends; may be empty.
    """

    def __init__(self, must: str, got: object, needed: int, other: str = "") -> None:
        super().__init__(must, got, needed, other)
        self.must, self.got, self.needed, self.other = must, got, needed, other

    def __str__(self) -> str:
        return f"{self.must}, got {self.got}; use model.vocab_size={self.needed} or more{self.other}"


def knows_the_model(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function of a config say of a model with given weights what can be changed beside its vocabulary."""

    @functools.wraps(function)
    def told(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except VocabularyTooSmall as error:
            config = args[0]
            assert isinstance(config, Config)
            if config.model.hf is None:
                raise
            raise ValueError(
                f"{error.must}, got {error.got}: the tokenizer has more tokens than the model in {config.model.hf}; "
                f"use the tokenizer of the same model, or train a new model from scratch{error.other}"
            ) from None

    return told
