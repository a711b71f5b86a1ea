"""A run that is killed again and again ends as one that was left alone."""

import pytest

from bench import chaos


def check(directory, **settings):
    result = chaos.chaos(directory, **settings)
    wrong = [key for key, value in result.items() if value is False]
    assert not wrong, result
    assert result["broken_checkpoints"] == 0
    return result


@pytest.mark.slow
@pytest.mark.xdist_group("chaos")
def test_three_kills_lose_nothing(tmp_path):
    result = check(tmp_path, num_kills=3, seed=11)
    assert {kill["kind"] for kill in result["kills"]} == {"start", "step", "save"}
    assert any(kill["reached"] for kill in result["kills"])


@pytest.mark.slow
def test_forty_kills_lose_nothing(tmp_path):
    check(tmp_path, num_kills=40, seed=12)


@pytest.mark.slow
def test_kills_lose_nothing_of_a_breadth_first_run(tmp_path):
    check(tmp_path, num_kills=9, seed=13, breadth_first=True)


def test_a_difference_would_show(tmp_path):
    """The verdict is no when a loss, a step, the state or the place of going on differs."""
    lines = [{"step": step, "loss": 1.0 / step, "validation_loss": 2.0} for step in (1, 2, 3)]
    kill = chaos.Kill(kind="step", seconds=1.0, resumed=None, reached=2, saved=1)

    class Last:
        resumed = 1

    def verdict(change=lambda lines, run: None, resumed=1):
        for name in ("alone", "killed"):
            its, run = [dict(line) for line in lines], {"fingerprints": {"x": 1}, "data": {"sequence": 6}}
            if name == "killed":
                change(its, run)
            folder = tmp_path / name / "checkpoints" / "3" / "run"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "metadata").write_text(chaos.json.dumps(run))
            (tmp_path / name / "metrics.jsonl").write_text("".join(chaos.json.dumps(line) + "\n" for line in its))
            (tmp_path / name / "events.jsonl").write_text("")
        last = Last()
        last.resumed = resumed
        return {key for key, value in chaos.verdict(tmp_path, [kill], last).items() if value is False}

    assert verdict() == set()
    assert verdict(lambda lines, run: lines[1].update(loss=9.0)) == {"same_losses"}
    assert verdict(lambda lines, run: lines[2].update(validation_loss=9.0)) == {"same_validation"}
    assert verdict(lambda lines, run: run["fingerprints"].update(x=2)) == {"same_state"}
    assert verdict(lambda lines, run: run["data"].update(sequence=7)) == {"same_place_in_the_data"}
    assert verdict(lambda lines, run: lines.append(dict(lines[0], step=4))) == {"same_steps"}
    assert verdict(resumed=0) == {"each_went_on_from_the_newest"}
