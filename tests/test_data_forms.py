"""Every form that trainers keep data in, against small files that the form's own library wrote (forms/write.py)."""

import gzip
import io
import json
import re
import shutil
import sys
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest

from sppo_jax.config import DataConfig
from sppo_jax.data.cache.left_out import LeftOut
from sppo_jax.data.content.documents import read_pieces
from sppo_jax.data.forms import json_rows
from sppo_jax.data.forms.rows import read_rows
from sppo_jax.data.sources.open_source import load_corpus
from sppo_jax.data.tokens.encoding import START_TOKEN, open_encoder
from sppo_jax.data.tokens.mask_bit import split_words

sys.path.insert(0, str(Path(__file__).parent / "forms"))
from write import CHATS, NUM_EMPTY, TEXTS, TOKENS  # noqa: E402

FORMS = Path(__file__).parent / "forms"
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
# Forms of the same 24 texts.
TEXT_FORMS = (
    "stream.arrow", "saved", "mds", "mds-zstd", "samples.tar", "json.array_record", "plain.array_record",
    "example.array_record",
)  # fmt: skip


def load(path, vocab_size=1000, **settings):
    config = DataConfig(source=str(path), **settings)
    return load_corpus(
        config, config.source, lambda: open_encoder(config, vocab_size=vocab_size), vocab_size=vocab_size
    )


def documents(corpus):
    return [corpus.read(start, end).tolist() for start, end in zip(corpus.starts, corpus.ends, strict=True)]


def texts(path, text_key="text"):
    return [piece for piece, _ in read_pieces(path, text_key=text_key, strict=True)]


AS_TOKENS = [[START_TOKEN, *text.encode()] for text in TEXTS]


@pytest.mark.filterwarnings("ignore:data.source")
@pytest.mark.parametrize("form", TEXT_FORMS)
def test_a_form_gives_the_texts_that_its_library_wrote(form):
    assert documents(load(FORMS / form)) == AS_TOKENS


@pytest.mark.parametrize(("name", "each"), [("narrow", 1), ("wide", 2)])
@pytest.mark.parametrize("settings", [{}, {"token_dtype": "uint8", "separator": 70_000}])
def test_an_index_of_megatron_says_the_dtype_and_the_documents(name, each, settings):
    wanted = [sum(TOKENS[first : first + each], []) for first in range(0, len(TOKENS), each)]
    assert documents(load(FORMS / "megatron" / f"{name}.bin", **settings)) == wanted


def test_empty_documents_of_megatron_are_left_out_and_counted(tmp_path):
    for _ in range(2):  # the second time from the cache
        corpus = load(FORMS / "megatron" / "gaps.bin", cache=str(tmp_path))
        assert documents(corpus) == TOKENS
        assert corpus.left_out == (LeftOut(what="documents", why="they have no tokens", count=NUM_EMPTY),)
    assert not load(FORMS / "megatron" / "wide.bin").left_out


def test_rows_of_tokens_and_of_conversations():
    labelled = [row for _, row in read_rows(FORMS / "labelled" / "data-00000-of-00001.arrow")]
    shards = [row for _, row in read_rows(FORMS / "mds-tokens" / "shard.00000.mds")]
    for row, shard, tokens in zip(labelled, shards, TOKENS, strict=True):
        assert row["input_ids"] == shard["input_ids"].tolist() == tokens
        assert row["labels"] == shard["labels"].tolist() == [-100, *tokens[1:]]
    assert [row["messages"] for _, row in read_rows(FORMS / "chats" / "data-00000-of-00001.arrow")] == CHATS


@pytest.mark.parametrize("form", ["labelled", "mds-tokens", "a.parquet"])
def test_labels_say_what_is_learned_in_every_form(tmp_path, form):
    labels = [[-100, *tokens[1:]] for tokens in TOKENS]
    pq.write_table(pa.table({"input_ids": TOKENS, "labels": labels}), tmp_path / "a.parquet")
    corpus = load(tmp_path / form if form == "a.parquet" else FORMS / form)
    found = [split_words(corpus.read(*span)) for span in zip(corpus.starts, corpus.ends, strict=True)]
    assert [tokens.tolist() for tokens, _ in found] == TOKENS
    assert [learned.tolist() for _, learned in found] == [[False, *[True] * (len(one) - 1)] for one in TOKENS]


def test_a_folder_of_forms_is_read_in_the_order_of_its_names_and_lists(tmp_path):
    shutil.copytree(FORMS / "saved", tmp_path / "b")
    state = json.loads((tmp_path / "b" / "state.json").read_text())
    state["_data_files"].reverse()
    (tmp_path / "b" / "state.json").write_text(json.dumps(state))
    shutil.copytree(FORMS / "mds-zstd", tmp_path / "c")
    (tmp_path / "c" / "shard.00009.mds").write_bytes(b"unlisted")
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'\n[{"text": "a"},\n{"text": "b"}]\n'))
    with pytest.warns(UserWarning, match=r"got 2 others, which are left out \(1 .arrow, 1 .mds\)"):
        found = documents(load(tmp_path))
    second = texts(tmp_path / "b" / "data-00001-of-00002.arrow")
    first = texts(tmp_path / "b" / "data-00000-of-00002.arrow")
    assert len(first) + len(second) == 24
    assert found == [[START_TOKEN, *text.encode()] for text in ["a", "b", *second, *first, *TEXTS]]
    assert documents(load(tmp_path / "b" / "*.arrow")) == [
        [START_TOKEN, *text.encode()] for text in [*second, *first]
    ]  # the cache file beside them is left out too


def test_folders_that_are_not_one_whole_data_set_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must name one split .*splits with train, test; write e.g. .*splits/train"):
        load(FORMS / "splits")
    with pytest.raises(ValueError, match=r"must name one split"):
        load(FORMS)
    assert len(documents(load(FORMS / "splits" / "test"))) == 2
    for form, gone in (("saved", "data-00001-of-00002.arrow"), ("mds", "shard.00001.mds")):
        shutil.copytree(FORMS / form, tmp_path / form)
        (tmp_path / form / gone).unlink()
        with pytest.raises(ValueError, match=rf"must hold every file that .*json names, got no {gone} \(1 of"):
            load(tmp_path / form)
    shutil.copy(FORMS / "mds" / "shard.00000.mds", tmp_path / "mds" / "shard.00001.mds")
    with pytest.raises(ValueError, match="must have the bytes that its index says, 894, got 875 in .*shard.00001.mds"):
        load(tmp_path / "mds")


@pytest.mark.parametrize(("form", "listed"), [("saved", "state.json"), ("mds", "index.json")])
def test_a_folder_whose_list_is_broken_is_refused(tmp_path, form, listed):
    """Without its list a folder has files that are no data, such as a cache."""
    shutil.copytree(FORMS / form, tmp_path / "in")
    whole = (FORMS / form / listed).read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"[" * 200_000, whole.replace(b"a", b"\xe9")):
        (tmp_path / "in" / listed).write_bytes(content)
        with pytest.raises(ValueError, match=f"must be readable JSON, got .*{listed}; copy the folder") as error:
            load(tmp_path / "in")
        assert "\n" not in str(error.value)


CUT = ("stream.arrow", "mds/shard.00001.mds", "mds-zstd/shard.00001.mds.zstd", "samples.tar", "plain.array_record")
COLUMNS = ("file.arrow", "packed.arrow", "a.parquet")


def write_columns(path):
    """Writes the texts in several batches: an IPC file, a compressed stream, or row groups."""
    table = pa.table({"text": TEXTS})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=5)
        return
    packed = pa.ipc.IpcWriteOptions(compression="zstd" if path.stem == "packed" else None)
    new = pa.ipc.new_file if path.stem == "file" else pa.ipc.new_stream
    with new(str(path), table.schema, options=packed) as writer:
        writer.write_table(table, max_chunksize=5)


@pytest.mark.parametrize("name", [*CUT, *COLUMNS])
def test_a_file_that_is_cut_short_is_refused_by_name_and_place(tmp_path, name):
    path = tmp_path / Path(name).name
    write_columns(path) if name in COLUMNS else shutil.copy(FORMS / name, path)
    whole = path.read_bytes()
    assert texts(path) == (texts(FORMS / name) if name in CUT else TEXTS)
    step = 10 if len(whole) < 4000 else max(10, len(whole) // 120)
    for size in [*range(0, min(len(whole), 2000), 10), *range(2000, len(whole), step), len(whole) - 1]:
        path.write_bytes(whole[:size])
        try:
            found = texts(path)
        except ValueError as error:
            assert re.search(rf"a \S+ file must .*{path.name}", str(error))
            assert "\n" not in str(error) and len(str(error)) < 500
        else:  # of a tar only some of the empty blocks at its end are lost
            assert path.suffix == ".tar" and found == TEXTS and not any(whole[size - 512 :])


@pytest.mark.parametrize("name", ["narrow", "wide"])
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_megatrons_pair_must_fit(tmp_path, name, suffix):
    for other in (".bin", ".idx"):
        shutil.copy(FORMS / "megatron" / f"{name}{other}", tmp_path / f"a{other}")
    whole = (tmp_path / f"a{suffix}").read_bytes()
    for size in range(0, len(whole), 10):
        (tmp_path / f"a{suffix}").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"an (index of Megatron|.idx file next to a .bin file) must .*a\.idx"):
            load(tmp_path / "a.bin")


def test_an_index_of_megatron_that_is_wrong_is_refused(tmp_path):
    shutil.copy(FORMS / "megatron" / "narrow.bin", tmp_path / "a.bin")
    whole = bytearray((FORMS / "megatron" / "narrow.idx").read_bytes())
    for at, value, message in (
        (17, 4, r"lengths of 528 bytes for a .bin file of 264|do not follow each other"),
        (17, 7, "must be of integers, got float32"),
        (17, 99, "must be an index of Megatron"),
        (0, 0, "must be an index of Megatron"),
        (34, 200, "do not follow each other"),
        (len(whole) - 8, 1, "documents that do not follow"),
    ):
        wrong = whole.copy()
        wrong[at] = value
        (tmp_path / "a.idx").write_bytes(wrong)
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "a.bin")


JSON = {
    "empty": ("", []),
    "an empty array": (" [ ] ", []),
    "lines": ('{"text": "a"}\n\n{"text": "b"}\n', ["a", "b"]),
    "a long array": (json.dumps([{"text": "x" * size, "y": [1.5, None]} for size in range(1, 99)], indent=1),
                     ["x" * size for size in range(1, 99)]),
    "escapes": ('[{"text": "\\ud83d\\ude00 \\" ] , {"},{"text":"\u4e2d"}]', ["\U0001f600 \" ] , {", "\u4e2d"]),
}  # fmt: skip


@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize("case", JSON)
def test_json_is_lines_or_one_array_read_in_blocks(tmp_path, monkeypatch, case, block):
    monkeypatch.setattr(json_rows, "_BLOCK_BYTES", block)
    content, wanted = JSON[case]
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    assert texts(tmp_path / "a.json") == wanted


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"} {"text": "b"}]', r"a.json behind item 1 \(expected ,\)"),
        ('[,{"text": "a"}]', r"behind item 0 \(expected an object\)"),
        ('[{"text": "a"}', r"behind item 1 \(the array does not end\)"),
        ('[{"text": "a"}] 5', r"behind item 1 \(something follows"),
        ('[{"text": "a"}, 3]', "item 2 with a value of type int"),
        ('[{"text": a, "b": "' + "c" * 99 + '"}]', "behind item 0"),
        ("[" + "[" * 200_000, "nested too deeply"),
        ('[{"text": "a"}, {"text": "b", "id": ' + "1" * 5000 + "}]", r"behind item 1 \(Exceeds the limit"),
        ('{"text": "a"}\n[]', "line 2 with a value of type list"),
        ("{\n", "line 1"),
    ],
)
def test_json_that_is_wrong_is_refused_with_its_place(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        texts(tmp_path / "a.json")
    assert "\n" not in str(error.value)


def test_a_json_array_that_is_cut_short_or_no_utf8_is_refused(tmp_path):
    whole = json.dumps([{"text": text} for text in TEXTS], ensure_ascii=False).encode()
    for size in [*range(10, len(whole), 10), len(whole) - 1]:
        (tmp_path / "a.json").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"a.json (behind )?item \d+|must be UTF-8"):
            texts(tmp_path / "a.json")
    (tmp_path / "a.json").write_bytes(b'[{"text": "a\xe9"}]')
    with pytest.raises(ValueError, match="must be UTF-8, got .*a.json behind item 0 .*byte 0xe9"):
        texts(tmp_path / "a.json")


def write_arrow(path, column, file=False):
    table = pa.table({"text": column})
    with (pa.ipc.new_file if file else pa.ipc.new_stream)(str(path), table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_columns_of_text_of_every_type_are_read(tmp_path, kind, file):
    values = ["a", None, "", "b\u00fc", "a"]
    column = pa.array(values).dictionary_encode() if kind == "dictionary" else pa.array(values, getattr(pa, kind)())
    write_arrow(tmp_path / "a.arrow", column, file)
    assert texts(tmp_path / "a.arrow") == ["a", "b\u00fc", "a"]


def test_columns_that_are_no_text_are_refused(tmp_path):
    offsets = pa.py_buffer(np.array([0, 1, 4], np.int32))
    write_arrow(tmp_path / "a.arrow", pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"aca\xe9")]))
    with pytest.raises(ValueError, match=r"must be UTF-8, got .*a.arrow behind row 0 .*byte 0xe9"):
        texts(tmp_path / "a.arrow")
    write_arrow(tmp_path / "a.arrow", pa.array([1]))
    with pytest.raises(ValueError, match="a value of type int in .*a.arrow row 1"):
        texts(tmp_path / "a.arrow")
    with pytest.raises(ValueError, match="must be a column, got 'body', but .*a.arrow has 'text'"):
        texts(tmp_path / "a.arrow", "body")
    with pytest.raises(ValueError, match="must be a column, got 'body', but .*mds has 'id', 'text'"):
        texts(FORMS / "mds" / "shard.00000.mds", "body")


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "a.txt"
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if content else None)


def test_a_tar_gives_its_samples_and_says_what_is_left_out(tmp_path):
    path = tmp_path / "a.tar"
    write_tar(path, [("0.json", b'{"text": "j"}'), ("0.txt", b"t"), ("0.jpg", b"x"), ("1.txt", b"one"), ("2.cls", b"3"),
                     ("3.txt", None), ("1.txt", b"again"), ("4.json", b'{"text": null}')])  # fmt: skip
    with pytest.warns(UserWarning, match=r"a.tar: .*left out \(1 .jpg, 1 .cls, 1 links\)"):
        assert texts(path) == ["j", "one", "again"]
    shutil.copy(path, tmp_path / "b.tar")
    (tmp_path / "c.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert texts(tmp_path / "c.tar.gz") == ["j", "one", "again"]
    for members, message in (
        ([("../0.txt", b"x")], r"must have members within its folder, got '../0.txt' in .*a.tar"),
        ([("/0.txt", b"x")], "must have members within its folder, got '/0.txt'"),
        ([("0.txt", b"a\xe9")], "must be UTF-8, got .*a.tar member 0.txt .*0xe9"),
        ([("0.json", b"[]")], "must hold one JSON object, got .*a.tar member 0.json with a value of type list"),
        ([("0.json", b'{"id": 1}')], "must be a key of every row, got 'text', but .*a.tar sample 0 has 'id'"),
        ([("0.json", b"[" * 200_000)], "a.tar member 0.json .*nested too deeply"),
    ):
        write_tar(path, members)
        with pytest.raises(ValueError, match=message):
            texts(path)
