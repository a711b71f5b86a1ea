"""The losses of the quickstart with delta layers: what is stored is what is drawn and told."""

import json

from bench import figures, hybrid


def stored():
    return json.loads((hybrid.RESULTS / "hybrid_cpu.json").read_text())


def test_the_picture_and_the_table_are_of_the_stored_losses():
    report = stored()
    assert (hybrid.RESULTS / "hybrid_cpu.md").read_text() == hybrid.table(report)
    assert figures.stored_digest(hybrid.PICTURE.read_text()) == figures.digest(hybrid.picture(report["models"]))


def test_the_runs_are_those_of_the_models():
    models = stored()["models"]
    assert {name: (model["label"], tuple(model["settings"])) for name, model in models.items()} == {
        name: told[:2] for name, told in hybrid.MODELS.items()
    }
    assert all([run["seed"] for run in models[name]["runs"]] == list(told[2]) for name, told in hybrid.MODELS.items())
    losses = {name: [run["validation_loss"] for run in model["runs"]] for name, model in models.items()}
    # Every model with a window or a state in its first layer is further than each dense one.
    assert max(losses["delta"] + losses["taps"] + losses["local"]) < min(losses["dense"])


def test_runs_are_read_as_they_are_written(tmp_path):
    for name, (_, _, seeds) in hybrid.MODELS.items():
        for seed in seeds:
            folder = tmp_path / f"{name}{seed}"
            folder.mkdir()
            rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5, "validation_loss": 2.6 + seed}]
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
            (folder / "finished").write_text("")
            hybrid.train(tmp_path, name, seed)  # a finished run is left alone
    models = hybrid.read(tmp_path)
    assert models["delta"]["runs"][1] == {"seed": 1, "losses": {1: 3.0, 2: 2.5}, "validation_loss": 3.6}
