"""What an exported folder needs beside tensors: length, end tokens, the chat template, and a model card."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

from sppo_jax.config import Config
from sppo_jax.config.data import BYTES
from sppo_jax.data.encoding import FileEncoder
from sppo_jax.models.hf_tokenizer import TOKENIZER, add_end_tokens, set_template
from sppo_jax.report.run.card import CARD, CURVES, card_text, curves_svg
from sppo_jax.report.run.data import read_run_dir
from sppo_jax.report.run.figures import RunFigures, figures_of_run


def finish_folder(folder: Path, config: Config, source: Path, checkpoint: Path) -> None:
    """Adds the chat template and its stop tokens, and a model card.

    Args:
        folder: holds config.json, and the tokenizer if there is one.
        config: the config of the run.
        source: the run, or the checkpoint.
        checkpoint: the checkpoint that is exported.
    """
    _add_template(folder, config)
    figures = _figures(source, checkpoint)
    curves = curves_svg(figures) if figures else ""
    if curves:
        (folder / CURVES).write_text(curves, encoding="utf-8")
    step = int(checkpoint.name) if checkpoint.name.isdigit() else 0
    card = card_text(config, step, figures, has_template=(folder / "chat_template.jinja").is_file())
    (folder / CARD).write_text(card, encoding="utf-8")


def _add_template(folder: Path, config: Config) -> None:
    """Writes the template that the run was trained with, and adds the tokens that end its answers."""
    try:
        from sppo_jax.data.stop_tokens import has_chats, stop_tokens, template_of
    except ImportError:  # without jinja2 nothing was trained on conversations here
        return
    data = config.data
    if data.tokenizer is None and config.model.hf:
        data = dataclasses.replace(data, tokenizer=config.model.hf)
    if not has_chats(data):
        return
    try:
        text, template = template_of(data)
    except ValueError as error:
        warnings.warn(f"the chat template of the run is not written: {error}", stacklevel=2)
        return
    set_template(folder, text)
    if data.tokenizer not in (None, BYTES) and (folder / TOKENIZER).is_file():
        encoder = FileEncoder(folder / TOKENIZER, start_token=None, end_token=None)
        add_end_tokens(folder, stop_tokens(template, encoder))


def _figures(source: Path, checkpoint: Path) -> RunFigures | None:
    """Returns the figures of the run that a checkpoint lies in; None if it lies in none."""
    for place in (source, checkpoint.parent.parent, checkpoint.parent):
        if (place / "metrics.jsonl").is_file():
            return figures_of_run(read_run_dir(place))
    return None
