"""The model card of an exported run: what it was trained from and with, its curves, and how to load it."""

from __future__ import annotations

from pathlib import Path

from sppo_jax.config import Config, OptimizerConfig
from sppo_jax.report.draw.chart import chart_svg
from sppo_jax.report.run.charts import loss_panel, rate_panel
from sppo_jax.report.run.figures import RunFigures
from sppo_jax.report.run.run_files import number
from sppo_jax.version import __version__

CARD, CURVES = "README.md", "training.svg"
_MOST_ROWS = 10


def card_text(config: Config, step: int, figures: RunFigures | None, *, has_template: bool) -> str:
    """Returns the text of a model card.

    Args:
        config: the config of the run.
        step: steps that the exported checkpoint has done.
        figures: figures of the run; None: its files are not there.
        has_template: whether the folder has a chat template.
    """
    base = Path(config.model.hf).name if config.model.hf else ""
    title = f"{base}, trained on to {config.sequence.length:,} tokens" if base else "A model trained with sppo_jax"
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [sppo_jax]\n---",
        f"# {title}",
        f"Trained with sppo_jax {__version__}" + (f" from the weights of {base}." if base else "."),
        f"## Recipe\n\n{_table(_recipe(config, step))}",
    ]
    if figures and figures.loss:
        parts.append(f"## Training\n\n![Loss and learning rate]({CURVES})\n\n{_progress(figures)}")
    parts.append(f"## Use\n\n{_use(config, has_template=has_template)}")
    return "\n\n".join(parts) + "\n"


def curves_svg(figures: RunFigures) -> str:
    """Returns loss and learning rate by step as a picture; "" where there is nothing to show."""
    panels = [panel for panel in (loss_panel(figures), rate_panel(figures)) if panel]
    return chart_svg(panels) if panels else ""


def _recipe(config: Config, step: int) -> list[tuple[str, str]]:
    optimizer, rope, data = config.optimizer, config.model.rope, config.data
    scaling = "" if rope.scaling == "none" else f", {rope.scaling} by {rope.factor:g}"
    rows = [
        ("sequence length", f"{config.sequence.length:,} tokens"),
        ("sequences per step", f"{config.num_sequences:,}"),
        ("steps", f"{step:,}" + (f" of {config.train.steps:,}" if step != config.train.steps else "")),
        ("places for tokens", f"{step * config.num_sequences * config.sequence.length:,}"),
        ("rotary base", f"{rope.theta:g}{scaling}"),
        ("optimizer", f"AdamW, betas {optimizer.b1:g} and {optimizer.b2:g}, weight decay {optimizer.weight_decay:g}"),
        ("learning rate", _rate(optimizer, config.train.steps)),
        ("gradient clipping", "none" if optimizer.clip_norm is None else f"{optimizer.clip_norm:g}"),
        ("packing", f"{data.pack}, documents do not attend to each other"),
    ]
    rows += [("source", f"{Path(name).name}, weight {weight:g}") for name, weight in data.sources.items()]
    return rows


def _rate(optimizer: OptimizerConfig, num_steps: int) -> str:
    """Returns the learning rate over a run in words."""
    from_zero = " from 0" if optimizer.warmup == "from_zero" else ""
    warm_up = f"{optimizer.lr:g}, {optimizer.num_warmup_steps(num_steps):,} warm-up steps{from_zero}"
    if optimizer.decay == "none":
        return f"{warm_up}, then constant"
    over = "" if optimizer.decay_steps == "auto" else f" over the last {optimizer.decay_steps:,} steps"
    return f"{warm_up}, {optimizer.decay} to {optimizer.min_lr_ratio:g} of it{over}"


def _progress(figures: RunFigures) -> str:
    rows = [row for row in figures.data.rows if number(row, "loss") is not None]
    shown = sorted({round(at * (len(rows) - 1) / max(1, _MOST_ROWS - 1)) for at in range(_MOST_ROWS)})
    lines = ["| step | loss |", "|---|---|"]
    lines += [f"| {rows[at]['step']:,} | {rows[at]['loss']:.4f} |" for at in shown if at < len(rows)]
    if figures.validations:
        last = figures.validations[-1]
        lines.append(f"\nValidation loss after step {last.step:,}: {last.loss:.4f} nats per token.")
    return "\n".join(lines)


def _use(config: Config, *, has_template: bool) -> str:
    lines = [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        "```",
        "",
        f"`vllm serve FOLDER --max-model-len {config.sequence.length}` serves it.",
    ]
    if has_template:
        lines.append("`chat_template.jinja` is the template of its conversations.")
    return "\n".join(lines)


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)])
