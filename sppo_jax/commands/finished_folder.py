"""What an exported folder needs beside tensors: length, end tokens, the chat template, and a model card."""

from __future__ import annotations

import warnings
from pathlib import Path

from sppo_jax.config import Config
from sppo_jax.config.data import BYTES, DataConfig
from sppo_jax.data.ends import has_chats, has_content
from sppo_jax.data.open import with_tokenizer
from sppo_jax.data.tokens.encoding import FileEncoder
from sppo_jax.models.hf.tokenizer import TOKENIZER, add_end_tokens, set_template
from sppo_jax.report.run.card import CARD, CURVES, card_text, curves_svg
from sppo_jax.report.run.figures import RunFigures, figures_of_run
from sppo_jax.report.run.run_files import read_run_dir


def finish_folder(folder: Path, config: Config, source: Path, checkpoint: Path) -> None:
    """Adds the chat template, the tokens that end answers and texts, and a model card.

    Args:
        folder: holds config.json, and the tokenizer if there is one.
        config: the config of the run.
        source: the run, or the checkpoint.
        checkpoint: the checkpoint that is exported.
    """
    data = with_tokenizer(config)
    _add_template(folder, data)
    _add_end_of_texts(folder, data)
    figures = _figures(source, checkpoint)
    curves = curves_svg(figures) if figures else ""
    if curves:
        (folder / CURVES).write_text(curves, encoding="utf-8")
    step = int(checkpoint.name) if checkpoint.name.isdigit() else 0
    card = card_text(config, step, figures, has_template=(folder / "chat_template.jinja").is_file())
    (folder / CARD).write_text(card, encoding="utf-8")


def _add_template(folder: Path, data: DataConfig) -> None:
    """Writes the template that the run was trained with, and adds the tokens that end its answers."""
    try:
        from sppo_jax.data.chat.stop_tokens import stop_tokens
        from sppo_jax.data.chat.template_places import Templates, read_template
    except ImportError:  # without jinja2 nothing was trained on conversations here
        return
    if not has_chats(data):
        return
    try:
        found = read_template(data)
        templates = Templates(found, data)
    except ValueError as error:
        warnings.warn(f"the chat template of the run is not written: {error}", stacklevel=2)
        return
    set_template(folder, found.text, found.for_tools)
    if data.tokenizer not in (None, BYTES) and (folder / TOKENIZER).is_file():
        encoder = FileEncoder(folder, start_token=None, end_token=None)
        for template in filter(None, (templates.default, templates.for_tools)):
            add_end_tokens(folder, stop_tokens(template, encoder))


def _add_end_of_texts(folder: Path, data: DataConfig) -> None:
    """Adds the token that ends texts to those that end what the model writes."""
    if data.tokenizer in (None, BYTES) or not (folder / TOKENIZER).is_file():
        return
    try:
        if has_content(data, ["text", "prompts"], data.source, data.sources):
            encoder = FileEncoder(folder, start_token=None, end_token=data.end_token)
            add_end_tokens(folder, [token for token in encoder.end if token in encoder.special])
    except ValueError as error:
        warnings.warn(f"the token that ends the texts of the run is not written: {error}", stacklevel=2)


def _figures(source: Path, checkpoint: Path) -> RunFigures | None:
    """Returns the figures of the run that a checkpoint lies in; None if it lies in none."""
    for place in (source, checkpoint.parent.parent, checkpoint.parent):
        if (place / "metrics.jsonl").is_file():
            return figures_of_run(read_run_dir(place))
    return None
