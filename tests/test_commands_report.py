"""`sppo report`: five lines and a page; one line where there is no run."""

import os
import subprocess
import sys

import pytest
from distributed_cases import REPO
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


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
STREAMS = {
    "the C locale": C_LOCALE,
    "ASCII": {"PYTHONIOENCODING": "ascii"},
    "strict ASCII": {"PYTHONIOENCODING": "ascii:strict"},
    "Latin-1": {"PYTHONIOENCODING": "latin-1"},
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_run_with_any_name_and_any_events_is_reported_in_any_locale(tmp_path, name):
    run = troubled(tmp_path / "l\u00e4uft-\u65e5")
    with (run / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "stop", "step": 1234, "text": "arr\u00eat\u00e9 \u65e5"}\n')
    words = [sys.executable, "-m", "sppo_jax.cli", "report", os.fspath(run)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "LC_", "LANG"))}
    done = subprocess.run(words, env=environ | {"PYTHONPATH": str(REPO)} | STREAMS[name], capture_output=True)
    assert done.returncode == 0 and done.stderr == b"", done.stderr
    assert len(done.stdout.splitlines()) == 6 and b"stopped (arr" in done.stdout
    assert "l\u00e4uft-\u65e5" in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-8-sig", "cp1252"])
@pytest.mark.parametrize("file", ["config.yaml", "plan.json", "metrics.jsonl", "events.jsonl"])
def test_a_file_of_another_encoding_leaves_a_gap_or_none(tmp_path, capsys, file, encoding):
    run = troubled(tmp_path / "run")
    text = (run / file).read_text()
    comment = "# \u00e4\n" if file == "config.yaml" else ""
    (run / file).write_text(comment + text, encoding=encoding)
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.startswith("run: ") and (run / "report.html").stat().st_size > 20_000
