"""Figures that are not finite: null in every file, "not finite" in words, and no traceback on the way."""

import copy
import json
import math
import random
import warnings

import pytest
from run_cases import event, metrics, plan_and_config, recall_at, write_run

from sppo_jax.report.run.card import card_text, curves_svg
from sppo_jax.report.run.figures import figures_of_run
from sppo_jax.report.run.html import run_html
from sppo_jax.report.run.run_files import read_run_dir
from sppo_jax.report.run.words import summary
from sppo_jax.train.metrics.record import Progress, Record
from sppo_jax.train.metrics.trackers import Trackers

STEP = 167
EXPERTS = {"expert_load": 1.5, "router_entropy": 0.9, "dead_experts": 0.0, "balance": 1.1}
BAD = (math.nan, math.inf, -math.inf)


def line_of(step=STEP):
    """Returns a line of metrics with every figure that a run writes."""
    whole = metrics(step, random.Random(step), validates=True) | {"recall_by_distance": recall_at(step)} | EXPERTS
    return whole | {"validation_compile_s": 1.0, "validation_num_sequences": 4, "validation_num_held_out": 9}


def places(value, path=()):
    """Yields the path of each figure of a line."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))
    elif isinstance(value, float):
        yield path


def with_figure(line, path, figure):
    changed = copy.deepcopy(line)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = figure
    return changed


def strictly(text):
    """Returns what JSON text holds; refuses what Python reads and other parsers do not."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


class Kept:
    def __init__(self):
        self.scalars = []

    def log(self, step, scalars):
        self.scalars.append(scalars)

    def close(self):
        pass


# Of the buckets the first, one within and the last.
_PATHS = [p for p in places(line_of()) if len(p) == 1 or p[1] in (0, 5, len(line_of()[p[0]]) - 1)]
_draw = random.Random(4)


@pytest.mark.parametrize(
    ("path", "bad"),
    [(path, _draw.choice(BAD)) for path in _PATHS],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_each_figure_may_be_not_finite(tmp_path, capsys, path, bad):
    """In the lines of a run, its progress, its trackers, its report and the card of its export."""
    _, config = plan_and_config()
    write_run(tmp_path, [], [event(0, "start", "starts")])
    record, kept = Record(tmp_path, config, step=0), Kept()
    record._trackers = Trackers([kept])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for line in (line_of(1), with_figure(line_of(), path, bad)):
            record.metrics(line)
        record.report()
        record.close()
    first, last = [strictly(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert last == json.loads(json.dumps(with_figure(line_of(), path, None)))
    assert all(math.isfinite(value) for scalars in kept.scalars for value in scalars.values())
    assert len(kept.scalars[1]) == len(kept.scalars[0]) - 1
    figures = figures_of_run(read_run_dir(tmp_path))
    words = summary(figures) + card_text(config, STEP, figures, has_template=False) + capsys.readouterr().out
    assert "nan" not in words.lower() and " inf" not in words
    if path == ("validation_loss",):
        assert f"validation   not finite at step {STEP}; " in words
        assert figures.best is not None and figures.best.step == 1
    elif path[0] in ("loss", "tokens_per_s", "grad_norm"):
        assert "not finite" in words


def test_a_run_in_which_nothing_is_finite_has_a_report(tmp_path):
    line = line_of()
    for path in places(line):
        line = with_figure(line, path, math.nan)
    for text in (json.dumps(line), json.dumps(line).replace("NaN", "null"), json.dumps(line).replace("NaN", "1e999")):
        write_run(tmp_path, [], [])
        (tmp_path / "metrics.jsonl").write_text(text.replace('"skipped": 0', f'"skipped": {10**400}') + "\n")
        figures = figures_of_run(read_run_dir(tmp_path))
        assert "validation   not finite at step 167\n" in summary(figures)
        assert "not finite" in run_html(figures) and curves_svg(figures) is not None


def test_the_bar_shows_what_is_not_finite(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    progress = Progress(10)
    progress.log(with_figure(line_of(), ("loss",), None) | {"step": 1, "tokens_per_s": None, "step_s": None})
    progress.close()
    assert "loss not finite, " in capsys.readouterr().out
