"""Scores of a Hugging Face folder are those of the checkpoint made from it, and of any number of processes."""

import json

import pytest
from distributed_cases import finish, start_processes
from hf_folders import write_tokenizer
from hf_models import make_model

from sppo_jax.cli import main

NAMES = ("llama-tied-llama3", "qwen3-moe", "qwen3-next", "gemma3")
WORDS = ["--tasks", "needle", "--samples", "2", "--lengths", "256", "--out"]
COMMAND = """
from sppo_jax.cli import main
code = main(sys.argv[1:])
distributed.leave(code)
sys.exit(code)
"""


def scores(path):
    entries = json.loads(path.read_text())["scores"]
    beside = ("seconds", "model", "step", "overrides")
    return [{name: value for name, value in entry.items() if name not in beside} for entry in entries]


def folder_of(name, place):
    make_model(name, vocab_size=260).save_pretrained(place)
    write_tokenizer(place / "tokenizer.json", num_tokens=257)
    return str(place)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_a_folder_scores_as_its_checkpoint_bit_for_bit(tmp_path, name, capfd):
    folder = folder_of(name, tmp_path / "hf")
    before = sorted(place.name for place in (tmp_path / "hf").iterdir())
    assert main(["convert", "from-hf", folder, str(tmp_path / "made")]) == 0
    for number, model in enumerate((f"hf:{folder}", str(tmp_path / "made"))):
        out = str(tmp_path / f"{number}.json")
        assert main(["eval", model, *WORDS, out, "train.devices=cpu:2"]) == 0, capfd.readouterr().err
    folder_scores, made_scores = (scores(tmp_path / f"{number}.json") for number in range(2))
    assert folder_scores == made_scores and len(folder_scores) == 1
    assert sorted(place.name for place in (tmp_path / "hf").iterdir()) == before


@pytest.mark.slow
def test_processes_write_one_json(tmp_path):
    folder = folder_of(NAMES[0], tmp_path / "hf")
    found = []
    for count in (1, 2, 4):
        out = tmp_path / f"{count}.json"
        words = [
            "eval",
            f"hf:{folder}",
            *WORDS,
            str(out),
            "train.devices=cpu:4",
            "mesh.data=1",
            "mesh.pipe=2",
            "mesh.seq=2",
        ]
        ended = finish(start_processes(COMMAND, count, *words), timeout_s=400)
        assert [code for code, _, _ in ended] == [0] * count, ended
        found.append(scores(out))
    assert found[0] == found[1] == found[2]
