"""Parts that several processes tokenize, in any order, join to what one process makes, from a directory or a bucket."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings

import pytest
from s3_server import s3, s3_server  # noqa: F401

from sppo_jax.cli import main
from sppo_jax.config import config_from_dict
from sppo_jax.data.open import open_data, write_parts
from sppo_jax.data.storage.folders import File
from sppo_jax.data.storage.parts import FilePart, cut, parse_part

pytest.importorskip("pyarrow")


def config_of(tmp_path, cache_of, source=None, **data):
    return config_from_dict(
        {
            "model": {"vocab_size": 300, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8},
            "sequence": {"length": 64},
            "train": {"steps": 1},
            "data": {"source": str(source or tmp_path / "in"), "cache": str(cache_of), **data},
        }
    )


def write_files(folder, count):
    rng = random.Random(0)
    folder.mkdir(exist_ok=True)
    for number in range(count):
        rows = ["".join(rng.choices("abc \n", k=rng.randrange(1, 90))) for _ in range(rng.randrange(0, 6))]
        (folder / f"{number:03}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


def contents(data):
    (source,) = data.sources
    corpora = [rows.corpus for rows in (source.training, source.validation)]
    tokens = [corpus.read(*span).tolist() for corpus in corpora
              for span in zip(corpus.starts, corpus.ends, strict=True)]  # fmt: skip
    return tokens, data.fingerprint


@pytest.mark.parametrize("sizes", [[1], [5, 1, 1, 9], [0, 0, 0], [100, 1, 1, 1, 1], list(range(50)), [7] * 64])
def test_parts_are_runs_of_whole_files_of_about_equal_bytes(sizes):
    files = [File(path=None, name=str(at), num_bytes=size, changed_ns=0) for at, size in enumerate(sizes)]
    for count in range(1, len(files) + 1):
        parts = cut(files, count)
        assert len(parts) == count and all(parts) and sum(parts, []) == files
        most = (
            max(sum(file.num_bytes for file in part) for part in parts if len(part) > 1)
            if len(parts) < len(files)
            else 0
        )
        assert most <= sum(sizes) / count + 2 * max(sizes)


@pytest.mark.parametrize("text", ["", "3", "0/4", "5/4", "a/b", "1/0", "-1/4", "1/4/2"])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="must be a part and the number of parts, got .*write e.g. 3/64"):
        parse_part(text)
    assert parse_part("3/64") == FilePart(number=3, count=64)


@pytest.mark.parametrize(("place", "count"), [pytest.param("directory", 64, marks=pytest.mark.slow), ("bucket", 4)])
def test_parts_in_any_order_give_what_one_process_gives(s3, tmp_path, monkeypatch, place, count):  # noqa: F811
    write_files(tmp_path / "in", 70)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    where = tmp_path / "parts" if place == "directory" else "s3://data/tokens"
    whole = contents(open_data(config_of(tmp_path, tmp_path / "whole")))
    config = config_of(tmp_path, where)
    numbers = list(range(1, count + 1))
    random.Random(1).shuffle(numbers)
    for number in numbers[:-2]:
        write_parts(config, FilePart(number=number, count=count))
    (line,) = write_parts(config, FilePart(number=numbers[0], count=count))
    assert "tokenized before" in line
    missing = ", ".join(map(str, sorted(numbers[-2:])))
    with pytest.warns(
        UserWarning, match=rf"has {count - 2} of {count} parts of the tokens; parts {missing} are tokenized here"
    ):
        assert contents(open_data(config)) == whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert contents(open_data(config)) == whole  # from the local cache
        for number in numbers[-2:]:
            write_parts(config, FilePart(number=number, count=count))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
        monkeypatch.setattr("sppo_jax.data.sources.tokenizing.read_pieces", None)  # all is there
        if place == "bucket":
            assert contents(open_data(config)) == whole


def test_machines_may_mount_a_source_at_different_paths(tmp_path, monkeypatch):
    write_files(tmp_path / "in", 8)
    shutil.copytree(tmp_path / "in", tmp_path / "mnt" / "other")  # with the same times
    for number, source in enumerate(("in", "mnt/other") * 2, 1):
        write_parts(config_of(tmp_path, tmp_path / "parts", tmp_path / source), FilePart(number=number, count=4))
    whole = contents(open_data(config_of(tmp_path, tmp_path / "whole")))
    monkeypatch.setattr("sppo_jax.data.sources.tokenizing.read_pieces", None)  # all is there
    assert contents(open_data(config_of(tmp_path, tmp_path / "parts", tmp_path / "mnt" / "other"))) == whole


def test_a_part_counts_once_its_facts_are_there(s3, tmp_path, monkeypatch):  # noqa: F811
    write_files(tmp_path / "in", 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    config = config_of(tmp_path, "s3://data/tokens")
    s3.fault = lambda method, path, range_: "deny" if method != "GET" and "facts.json" in path else None
    with pytest.raises(ValueError, match="facts.json"):
        write_parts(config, FilePart(number=1, count=2))
    s3.fault = lambda *_: None
    assert "are tokenized in s3://data/tokens" in write_parts(config, FilePart(number=1, count=2))[0]
    assert "tokenized before" in write_parts(config, FilePart(number=1, count=2))[0]


CHATS = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a" * n}]} for n in range(9)
]
TEMPLATE = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}|{% endif %}{% endfor %}"  # noqa: E501


def test_parts_of_conversations_of_rows_of_tokens_and_of_prompts_join_too(tmp_path):
    pytest.importorskip("jinja2")
    (tmp_path / "in").mkdir()
    (tmp_path / "template").write_text(TEMPLATE)
    for number, chat in enumerate(CHATS):
        (tmp_path / "in" / f"c{number}.jsonl").write_text(json.dumps(chat) + "\n")
        row = {"input_ids": [number + 5, 6, 7], "labels": [-100, 6, 7] if number % 2 else [-100] * 3}
        (tmp_path / "in" / f"t{number}.jsonl").write_text(json.dumps(row) + "\n")
        (tmp_path / "in" / f"p{number}.jsonl").write_text(
            json.dumps({"prompt": f"q{number}", "completion": "a"}) + "\n"
        )
    data = {"chat": {"template": str(tmp_path / "template")}, "validation_fraction": 0.1, "tokenizer": "bytes"}
    whole = open_data(config_of(tmp_path, tmp_path / "whole", **data))
    config = config_of(tmp_path, tmp_path / "parts", **data)
    for number in (4, 1, 3, 2):
        write_parts(config, FilePart(number=number, count=4))
    joined = open_data(config)
    assert contents(joined) == contents(whole)
    assert joined.sources[0].training.corpus.learned == whole.sources[0].training.corpus.learned


def test_too_many_parts_and_too_little_disk_are_one_line(tmp_path, monkeypatch, capsys):
    write_files(tmp_path / "in", 3)
    config = config_of(tmp_path, tmp_path / "parts")
    with pytest.raises(
        ValueError, match="at most as many parts as the largest source has files to tokenize, 3, got 1/4"
    ):
        write_parts(config, FilePart(number=1, count=4))
    write_parts(config, FilePart(number=1, count=2))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1})())
    with pytest.raises(ValueError, match=r"must have room for the tokens, [\d,]+ bytes, got 1 free in"):
        open_data(config)


def test_64_parts_by_three_processes_one_of_them_killed(tmp_path):
    write_files(tmp_path / "in", 70)
    for folder in ("parts", "whole"):
        (tmp_path / f"{folder}.yaml").write_text(
            json.dumps(
                {
                    "model": {"vocab_size": 300, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8},
                    "sequence": {"length": 64},
                    "train": {"steps": 1},
                    "data": {"source": str(tmp_path / "in"), "cache": str(tmp_path / folder)},
                }
            )
        )
    work = (
        "import sys, time; from sppo_jax.cli import main; from sppo_jax.data.cache import store as cache\n"
        "move = cache._move\n"
        "cache._move = lambda *given: (time.sleep(60 if sys.argv[2] == 'dies' else 0), move(*given))\n"
        "for number in sys.argv[3:]: assert main(['data', sys.argv[1], '--part', f'{number}/64']) == 0\n"
    )
    path = str(tmp_path / "parts.yaml")
    numbers = list(range(1, 65))
    random.Random(2).shuffle(numbers)
    shares = (["lives", *numbers[:25]], ["dies", *numbers[25:30]], ["lives", *numbers[30:55]])
    workers = [subprocess.Popen([sys.executable, "-c", work, path, *map(str, share)]) for share in shares]
    assert [worker.wait(60) for worker in (workers[0], workers[2])] == [0, 0]
    deadline = time.monotonic() + 30
    while not list((tmp_path / "parts").glob("*.new-*/facts.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(workers[1].pid, signal.SIGKILL)
    workers[1].wait()
    for number in (*numbers[55:], *numbers[25:30]):
        assert main(["data", path, "--part", f"{number}/64"]) == 0
    configs = [config_of(tmp_path, tmp_path / folder) for folder in ("parts", "whole")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert contents(open_data(configs[0])) == contents(open_data(configs[1]))


def test_a_cache_may_be_a_bucket_but_no_other_address(tmp_path):
    assert config_of(tmp_path, "gs://bucket/x").data.cache == "gs://bucket/x"
    for address in ("hf://datasets/a/b", "https://host/x", "file:///tmp/x"):
        with pytest.raises(ValueError, match="data.cache must be a path on this machine, got the address"):
            config_of(tmp_path, address)
