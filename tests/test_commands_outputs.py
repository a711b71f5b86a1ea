"""Outputs replace nothing but files of their own kind, and never what a command reads."""

import json
import os

import pytest
from bad_inputs import check_refused, copy, link, run, snapshot, text, write_place
from data_cases import write_tokenizer

from sppo_jax.commands.outputs import FLEX, PAGE, TRACE, Output, check_outputs


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, os.environ[name])
    write_place(tmp_path)
    (tmp_path / "table.csv").write_text("a,b\n")
    (tmp_path / "lengths").write_text("30\n70\n")
    write_tokenizer(tmp_path / "t.json")
    return tmp_path


READ, OTHER = "the command reads or writes it otherwise", "it holds something else, which would be lost"
REFUSED = {
    "the config": ("plan c.yaml --html c.yaml", READ, None),
    "the config by another path": ("plan c.yaml --trace ./../{name}/c.yaml", READ, None),
    "the config by a link": ("plan c.yaml --html page.html", READ, link("c.yaml", "page.html")),
    "the config by a hard link": ("plan c.yaml --html page.html", READ, lambda: os.link("c.yaml", "page.html")),
    "a link that is the config": ("plan l.yaml --html c.yaml", READ, link("c.yaml", "l.yaml")),
    "a config in JSON": ("plan c.json --trace c.json", READ, text("c.json", '{"traceEvents": 1}')),
    "the documents": ("plan c.yaml --html tokens.npy", READ, None),
    "the documents of a pattern": ("plan c.yaml data.source=*.npy --html tokens.npy", OTHER, None),
    "the tokenizer": ("plan c.yaml data.tokenizer=t.json --trace t.json", READ, None),
    "the table": ("plan c.yaml --html table.csv", OTHER, None),
    "the lengths": ("flex c.yaml --lengths lengths --json lengths", READ, None),
    "the config of flex": ("flex c.yaml --json c.yaml", READ, None),
    "the config of profile": ("profile --config c.yaml --out c.yaml", READ, None),
    "one file twice": ("plan c.yaml --html x --trace ./x", READ, None),
    "another tokenizer": ("plan c.yaml --trace t.json", OTHER, None),
    "another config": ("plan c.yaml --html d.yaml", OTHER, copy("c.yaml", "d.yaml")),
    "a page for a trace": ("plan c.yaml --trace p.html", OTHER, text("p.html", "<!doctype html>")),
    "a plan for measured figures": ("profile --out plan.json", OTHER, text("plan.json", '{"schema_version": 3}')),
    "lines of JSON": ("flex c.yaml --json d.jsonl", OTHER, text("d.jsonl", '{"text": "a"}\n')),
}


@pytest.mark.parametrize(("words", "reason", "prepare"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_an_output_is_never_replaced(place, capfd, words, reason, prepare):
    if words.startswith("plan c.json"):
        (place / "c.json").write_text(json.dumps({}))
    if prepare:
        prepare()
    if words.startswith("plan c.json"):
        import yaml

        (place / "c.json").write_text(json.dumps(yaml.safe_load((place / "c.yaml").read_text())))
    check_refused(words.format(name=place.name), f"({reason})", place, capfd)


def test_outputs_are_replaced_by_outputs(place, capfd):
    (place / "empty").write_text("")
    words = "plan c.yaml --html empty --trace t2.json"
    for _ in range(2):
        assert run(words, capfd)[0] == 0
    assert (place / "empty").read_text().lower().startswith("<!doctype html")
    for _ in range(2):
        assert run("flex c.yaml mesh.seq=2 train.devices=cpu:2 --json f.json", capfd)[0] == 0
    before = snapshot(place)
    for option, path, head in (("--html", "empty", PAGE), ("--trace", "t2.json", TRACE), ("--json", "f.json", FLEX)):
        check_outputs(Output(option=option, path=place / path, head=head), inputs=[place / "c.yaml", None])
    assert snapshot(place) == before


def test_a_file_that_is_none_is_written_to(place, capfd):
    assert run("plan c.yaml --html /dev/null --trace /dev/null", capfd)[0] in (0, 2)
    assert run("plan c.yaml --html /dev/null", capfd)[0] == 0
    assert not os.path.isfile("/dev/null")
