"""`sppo profile-trace`: a trace that can be read, with steps, phases and ticks in it."""

import pytest
from small_run import write_config

from sppo_jax.cli import main
from sppo_jax.train.trace import PHASES, STEP, events_of


def test_the_trace_has_steps_phases_and_ticks(tmp_path, capsys):
    config = write_config(tmp_path / "small.yaml")
    assert main(["profile-trace", str(config), "--out", str(tmp_path / "trace"), "--steps", "2"]) == 0
    said = capsys.readouterr().out
    (perfetto,) = tmp_path.glob("trace/plugins/profile/*/perfetto_trace.json.gz")
    assert f"open {perfetto}" in said and "xprof --logdir" in said and "traced 2 steps" in said
    names = [event["name"] for event in events_of(perfetto)]
    assert all(names.count(name) == 2 for name in (STEP, *PHASES))
    (xplane,) = perfetto.parent.glob("*.xplane.pb")
    for name in (b"forward_tick", b"backward_tick", b"head_tick"):
        assert name in xplane.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.yaml", "trace"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["small.yaml", "--steps", "0"], "--steps must be in 1..100, got 0"),
        (["small.yaml", "--out", "small.yaml"], "--out must be a directory that can be made, got small.yaml"),
        (["gone.yaml"], "a config must be a YAML file or the name of a shipped one, got gone.yaml"),
        (["small.yaml", "train.stepz=1"], "train.stepz is not a setting; the nearest setting is train.steps"),
        (["small.yaml", "--plan", "gone.json"], "--plan must be a readable plan.json"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, monkeypatch, capsys, words, said):
    write_config(tmp_path / "small.yaml")
    monkeypatch.chdir(tmp_path)
    assert main(["profile-trace", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
