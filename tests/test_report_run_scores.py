"""Scores in reports: a heat map of a run, several runs on one page, and files that are torn."""

import json
import subprocess
import sys

import pytest

from sppo_jax.cli import main
from sppo_jax.report.run.scores import heat_maps, read_scores, score_sections, scores_of_run


def entry(task="needle", length=4096, share=0.5, **others):
    depths = [{"depth": at / 10, "samples": 2, "hits": round(2 * share)} for at in (0, 9)]
    given = {"key": f"{task}{length}", "samples": 4, "hits": round(4 * share), "error": 0.25, "nats": 1.5}
    return {"task": task, "length": length, "share": share, "tokenizer": "t", "depths": depths} | given | others


def write(path, *entries):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"scores": entries}))
    return path


@pytest.fixture
def run_dir(tmp_path):
    write(tmp_path / "run" / "scores.json", entry(length=8192, share=0.0), entry(), entry("q", depths=None))
    (tmp_path / "run" / "config.yaml").write_text("")
    return tmp_path / "run"


def test_a_run_has_a_table_and_a_heat_map_by_length(run_dir):
    html = "\n".join(score_sections(scores_of_run(run_dir)))
    assert html.index("4,096") < html.index("8,192") and "50.0%" in html
    (found,) = [html.partition("needle by depth")[2]]
    assert found.count("hsl(60 ") == found.count("hsl(0 ") == 2 and "q by depth" not in html
    assert found.index("4,096") < found.index("8,192")


def test_a_report_shows_the_scores_of_its_run(run_dir, capsys):
    assert main(["report", str(run_dir)]) == 0
    assert (
        "<h2>Scores</h2>" in (run_dir / "report.html").read_text()
        and "needle by depth" in (run_dir / "report.html").read_text()
    )
    (run_dir / "scores.json").write_text("{")
    assert main(["report", str(run_dir)]) == 0
    assert "<h2>Scores</h2>" not in (run_dir / "report.html").read_text()
    capsys.readouterr()


def test_several_runs_are_on_one_page_without_jax(run_dir, tmp_path):
    base = write(tmp_path / "base.json", entry(share=1.0), entry("other"))
    out = tmp_path / "page.html"
    code = (
        "import sys; from sppo_jax.cli import main; "
        f"code = main(['report', {str(run_dir)!r}, {str(base)!r}, '--out', {str(out)!r}]); "
        "assert 'jax' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "needle at 4,096  base  100.0% +- 25.0%" in done.stdout and str(out) in done.stdout
    html = out.read_text()
    assert "100.0% +- 25.0%, 1.5000 nats" in html and "needle by depth: base" in html and "needle by depth: run" in html


def test_nats_are_left_out_between_tokenizers(run_dir, tmp_path, capsys):
    base = write(tmp_path / "base.json", entry(tokenizer="other"))
    out = tmp_path / "page.html"
    assert main(["report", str(run_dir), str(base), "--out", str(out)]) == 0
    assert "different tokenizers" in out.read_text() and "1.5000 nats" not in out.read_text()
    capsys.readouterr()


def test_entries_without_figures_are_left_out(tmp_path):
    path = write(tmp_path / "a.json", entry(), {"task": "x"}, entry(length="4K"), entry(samples=0), 3)
    assert [one["task"] for one in read_scores(path).entries] == ["needle"]
    assert len(heat_maps([read_scores(path)])) == 2


def test_wrong_input_is_one_line(run_dir, tmp_path, capsys):
    (tmp_path / "torn.json").write_text("{")
    for words, said in (
        ([str(run_dir), str(tmp_path / "gone.json"), "--out", "a.html"], "must have their scores, got"),
        ([str(run_dir), str(tmp_path / "torn.json"), "--out", "a.html"], "must be one that sppo eval --tasks wrote"),
        ([str(run_dir), str(run_dir)], "a report of several runs must have --out"),
    ):
        assert main(["report", *words]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
