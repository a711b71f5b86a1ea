"""`sppo report`: five lines and a page; one line where there is no run."""

import pytest
from run_cases import begun, troubled

from sppo_jax.cli import main


def test_it_prints_how_the_run_stands_and_where_the_page_is(tmp_path, capsys):
    run = troubled(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and lines[0].startswith("run: running") and "step 1,234 of 2,000" in lines[0]
    assert lines[-1] == str(run / "report.html") and (run / "report.html").stat().st_size > 50_000


def test_a_page_elsewhere_leaves_the_run_alone(tmp_path, capsys):
    run = begun(tmp_path / "run")
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists() and not (run / "report.html").exists()
    assert "starting" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gone"], "RUN_DIR must be a run directory, got gone (nothing there)"),
        (["."], "a run directory must hold config.yaml, plan.json and metrics.jsonl"),
        (
            ["run", "--out", "gone/page.html"],
            "--out must name a file that can be written, got gone/page.html (there is no",
        ),
        (["run", "--out", "run"], "--out must name a file that can be written, got run (it is a directory)"),
        ([], "sppo report: the following arguments are required: RUN_DIR"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, monkeypatch, capsys, words, said):
    begun(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not list(tmp_path.glob("**/.*html*"))
