"""The table of the shipped configs."""

import pytest

from bench import shipped

GIB = 2**30
NAME = "llama3-8b-1gpu-80g"
STORED = {
    "compiler": {"hbm_bytes": 68 * GIB},
    "workspace_bytes": GIB // 2,
    "host_copies": {
        "overlapped_bytes": 99,
        "exposed_bytes": 1,
        "waiting_share": 0.002,
        "loops_share": 0.03,
    },
    "variants": {
        shipped.CUBLAS: {"compiler": {"hbm_bytes": 70 * GIB}},
        shipped.GRAPHS: {"host_copies": {"loops_share": 0.001}},
    },
}


def stored_of(name):
    """Returns what a row stores that was compiled for the plan of today."""
    memory = shipped.planned(name).memory
    return {**STORED, "predicted": {"hbm_bytes": memory.hbm_bytes, "host_bytes": memory.host}}


def test_every_config_for_gpus_and_tpus_is_there():
    assert len(shipped.names()) == 21 and "quickstart" not in shipped.names()


def test_a_row_has_what_was_predicted_and_compiled():
    cells = dict(zip(shipped.COLUMNS, shipped.row(NAME, stored_of(NAME)), strict=True))
    assert (cells["cluster"], cells["fits"], cells["pool"]) == ("h100:1x1", "yes", "75.0 GiB")
    assert (cells["compiled, with the workspace"], cells["products by cuBLAS"]) == ("68.0 GiB", "70.0 GiB")
    assert [cells[name] for name in ("exposed", "late", "loops wait", "in CUDA graphs")] == [
        "1.0%",
        "0.2%",
        "3.0%",
        "0.1%",
    ]
    empty = shipped.row(NAME, None)
    assert len(empty) == len(cells) and empty[:6] == list(cells.values())[:6] and empty[-1] == ""


def test_a_row_of_another_plan_is_as_if_it_was_not_compiled():
    own, empty = stored_of(NAME), shipped.row(NAME, None)
    for name in ("hbm_bytes", "host_bytes"):
        predicted = {**own["predicted"], name: int(own["predicted"][name] * 1.1)}
        assert shipped.row(NAME, {**own, "predicted": predicted}) == empty
    plan = shipped.planned(NAME).plan.to_dict()
    assert shipped.row(NAME, {**own, "plan": plan})[-1] == "0.1%"
    assert shipped.row(NAME, {**own, "plan": {**plan, "chunk_lengths": [1]}}) == empty


def test_only_the_configs_asked_for_are_compiled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shipped, "RESULTS", tmp_path / "shipped.json")
    monkeypatch.setattr(shipped, "prepare_to_compile", lambda: None)
    monkeypatch.setattr(shipped, "names", lambda: ["llama3-8b-1gpu-80g", "qwen3-8b-1m-8gpu"])
    monkeypatch.setattr(shipped, "compiled", stored_of)
    assert shipped.main(["--compile", "80g"]) == 0 and set(shipped.load()) == {"llama3-8b-1gpu-80g"}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "| 70.0 GiB |" in lines[2] and lines[3].endswith("|  |")


@pytest.mark.parametrize("name", ["llama3-8b-1gpu-80g"])
def test_the_plan_is_the_planners(name):
    assert shipped.planned(name).fits
