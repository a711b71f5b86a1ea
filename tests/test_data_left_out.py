"""`sppo data` on a mixture of five forms from two places: shares, documents, tokens, and what is left out and why."""

import gzip
import io
import json
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from data_cases import write_tokenizer
from s3_server import s3, s3_server, upload  # noqa: F401

from sppo_jax.cli import main
from sppo_jax.config import config_from_dict
from sppo_jax.data.cache.left_out import LeftOut
from sppo_jax.data.open import open_data, write_parts
from sppo_jax.data.storage.parts import FilePart

sys.path.insert(0, str(Path(__file__).parent / "forms"))
from write import NUM_EMPTY, TEXTS, TOKENS  # noqa: E402

FORMS = Path(__file__).parent / "forms"
pytest.importorskip("pyarrow")
SETTINGS = {
    "model": {"vocab_size": 1000, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "mlp_size": 8},
    "sequence": {"length": 64},
    "train": {"steps": 1},
}


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write_lines(path, *rows):
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def left_out_of(source):
    return {(one["what"], one["why"]): one["count"] for one in source["left_out"]}


@pytest.fixture
def mixture(s3, tmp_path):  # noqa: F811
    """A config of lines and arrow on this machine, and MDS, tar and Megatron's tokens in a bucket."""
    (tmp_path / "lines").mkdir()
    write_lines(tmp_path / "lines" / "a.jsonl.gz", *({"text": text} for text in ("one", None, "two", "", "three")))
    (tmp_path / "lines" / "b.txt").write_text("")
    for name in ("c.csv", "d.csv", "LICENSE"):
        (tmp_path / "lines" / name).write_text("x")
    shutil.copytree(FORMS / "saved", tmp_path / "saved")
    write_tar(tmp_path / "a.tar", [("0.txt", b"tar 0"), ("0.jpg", b"x"), ("1.json", b'{"text": null}'),
                                   ("2.txt", b"tar 2"), ("2.jpg", b"x"), ("2.cls", b"x")])  # fmt: skip
    for path, to in ((FORMS / "mds-zstd", "mds"), (tmp_path / "a.tar", "a.tar"), (FORMS / "megatron", "megatron")):
        upload(s3, path, f"data/{to}")
    sources = {
        str(tmp_path / "lines"): 0.1,
        str(tmp_path / "saved"): 0.2,
        "s3://data/a.tar": 0.15,
        "s3://data/mds": {"weight": 0.3, "max_tokens": 36},
        "s3://data/megatron/gaps.bin": 0.25,
    }
    data = {"source": sources, "validation_fraction": 0, "cache": str(tmp_path / "cache")}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(SETTINGS | {"data": data}))
    return tmp_path / "a.yaml"


@pytest.mark.filterwarnings("ignore")
def test_a_mixture_of_five_forms_from_two_places(mixture, capsys):
    mds = [size for size in (1 + len(text.encode()) for text in TEXTS) if size <= 36]
    texts = sum(1 + len(text.encode()) for text in TEXTS)
    assert 0 < len(mds) < 24
    wanted = [
        (0.1, 3, 3 + len("onetwothree")),
        (0.2, 24, texts),
        (0.15, 2, 2 + 10),
        (0.3, len(mds), sum(mds)),
        (0.25, 24, sum(map(len, TOKENS))),
    ]
    nothing = ("documents", "their text is null or empty")
    left_out = [
        {nothing: 3, ("files", ".csv is of another kind"): 2, ("files", "no suffix is of another kind"): 1},
        {nothing: 1, ("files", ".arrow is not named by state.json or index.json"): 1},
        {nothing: 1, ("members of .tar files", ".jpg is neither .json nor .txt"): 2,
         ("members of .tar files", ".cls is neither .json nor .txt"): 1},
        {("documents", "they do not have 1 to 36 tokens"): 24 - len(mds)},
        {("documents", "they have no tokens"): NUM_EMPTY},
    ]  # fmt: skip
    for _ in range(2):  # the second time from the cache
        assert main(["data", str(mixture), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["sources"]
        assert [(one["weight"], one["documents"], one["tokens"]) for one in found] == wanted
        assert [left_out_of(one) for one in found] == left_out
    assert main(["data", str(mixture)]) == 0
    text = capsys.readouterr().out
    lines = text[text.index("Left out") :].split("\n\n")[0].splitlines()[2:]
    assert len(lines) == sum(map(len, left_out)) and all(len(line) <= 120 for line in lines)
    assert lines[-3].split() == "s3://data/a.tar 1 members of .tar files: .cls is neither .json nor .txt".split()


def test_text_of_no_tokens_is_left_out(tmp_path):
    """A tokenizer may drop spaces, and add no token of its own."""
    write_lines(tmp_path / "a.jsonl", *({"text": text} for text in ("the cat", "  ", "dog", " ")))
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json"))
    data = {"source": str(tmp_path / "a.jsonl"), "tokenizer": tokenizer, "start_token": None, "validation_fraction": 0}
    (source,) = open_data(config_from_dict(SETTINGS | {"data": data})).sources
    corpus = source.training.corpus
    assert (corpus.ends - corpus.starts).tolist() == [2, 1]
    assert corpus.left_out == (LeftOut(what="documents", why="they have no tokens", count=2),)


def test_nothing_is_said_where_nothing_is_left_out(tmp_path, capsys):
    write_lines(tmp_path / "a.jsonl", *({"text": f"text {number}"} for number in range(9)))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(SETTINGS | {"data": {"source": str(tmp_path / "a.jsonl")}}))
    assert main(["data", str(tmp_path / "a.yaml")]) == 0
    assert "Left out" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["text", "rows of tokens", "conversations"])
def test_counts_of_parts_are_added_up(tmp_path, form):
    (tmp_path / "in").mkdir()
    for number in range(4):
        kept, dropped = {
            "text": ({"text": "kept"}, {"text": None}),
            "rows of tokens": ({"input_ids": [5, 6]}, {"input_ids": [5, 6], "labels": [-100, -100]}),
            "conversations": tuple({"messages": [{"role": role, "content": "said"}]} for role in ("assistant", "user")),
        }[form]
        write_lines(tmp_path / "in" / f"{number}.jsonl", kept, *[dropped] * number)
    template = "{% for m in messages %}|{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"  # noqa: E501
    (tmp_path / "template").write_text(template)
    data = {"source": str(tmp_path / "in"), "tokenizer": "bytes", "chat": {"template": str(tmp_path / "template")}}
    found = []
    for name in ("whole", "parts"):
        config = config_from_dict(SETTINGS | {"data": data | {"cache": str(tmp_path / name)}})
        for number in (2, 1) if name == "parts" else ():
            write_parts(config, FilePart(number=number, count=2))
        (source,) = open_data(config).sources
        found.append([(one.what, one.count) for one in source.training.corpus.left_out])
    assert found[0] == found[1] == [("documents" if form == "text" else form, 6)]
