"""Data behind addresses mean what they mean here; on a real S3 server that fails, stalls and cuts answers."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from s3_server import ACCESS_KEY, SECRET_KEY, s3, s3_server, upload  # noqa: F401

from sppo_jax.config import DataConfig
from sppo_jax.data.sources.open_source import find_files, load_corpus
from sppo_jax.data.storage import places, remote
from sppo_jax.data.storage.folders import files_in
from sppo_jax.data.storage.places import matches, place_of
from sppo_jax.data.tokens.encoding import open_encoder
from sppo_jax.files.paths import local_path

pytest.importorskip("pyarrow")
FORMS = Path(__file__).parent / "forms"


def load(path, **settings):
    config = DataConfig(source=str(path), **settings)
    return load_corpus(config, config.source, lambda: open_encoder(config, vocab_size=1000), vocab_size=1000)


def same(left, right):
    assert [left.read(*span).tolist() for span in zip(left.starts, left.ends, strict=True)] == [
        right.read(*span).tolist() for span in zip(right.starts, right.ends, strict=True)
    ]
    assert np.array_equal(left.hashes, right.hashes)


def folder_of_forms(folder):
    for form in ("saved", "mds-zstd", "megatron"):
        shutil.copytree(FORMS / form, folder / form)
    for form in ("samples.tar", "stream.arrow", "json.array_record"):
        shutil.copy(FORMS / form, folder / form)
    (folder / "a b[1]?.txt").write_text("a name with the marks of a pattern, and a space \u00fc")
    (folder / ".hidden.txt").write_text("not read")
    (folder / "x.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    np.save(folder / "t.npy", np.array([5, 6, 0, 7, 0]))


@pytest.mark.filterwarnings("ignore:data.source")
@pytest.mark.parametrize(
    "pattern", ["", "/saved", "/*.jsonl", "/**/*.bin", "/mds-zstd/*", "/a b[1]?.txt", "/t.npy", "/?.jsonl"]
)
def test_the_same_bytes_give_the_same_tokens_here_and_in_a_bucket(s3, tmp_path, pattern):  # noqa: F811
    folder_of_forms(tmp_path)
    upload(s3, tmp_path, "data/some/where")
    local, away = load(f"{tmp_path}{pattern}", separator=0), load(f"s3://data/some/where{pattern}", separator=0)
    same(local, away)


def test_lists_of_folders_count_in_a_bucket_too(s3):  # noqa: F811
    for form in ("splits", "mds"):
        upload(s3, FORMS / form, f"data/{form}")
    with pytest.raises(
        ValueError, match=r"must name one split .*s3://data/splits with train, test; write e.g. s3://data"
    ):
        load("s3://data/splits")
    same(load("s3://data/splits/test"), load(FORMS / "splits" / "test"))
    s3.direct.delete_file("data/mds/shard.00001.mds")
    with pytest.raises(ValueError, match="must hold every file that index.json names, got no shard.00001.mds"):
        load("s3://data/mds")


PATTERNS = ["*", "**/*", "a/*", "*/b/*.txt", "**/b/**/*.txt", ".h/*", "**/.h*", "a/**", "?/b/*", "[ab]/*", "**/*.jsonl"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_the_same_as_on_this_machine(tmp_path, pattern):
    names = ["a.txt", "a/x.txt", "a/b/y.txt", "b/b/b/z.txt", ".h/q.txt", "a/.h.txt", "a/b/.d/w.txt", "c.jsonl"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = {path.relative_to(tmp_path).as_posix() for path in files_in(tmp_path / pattern)[1]}
    assert {name for name in names if matches(name.split("/"), pattern.split("/"))} == found


@pytest.mark.parametrize(("name", "kind"), [("a.txt", "fail"), ("a.jsonl.gz", "cut"), ("a.parquet", "stall")])
def test_faults_are_waited_for_and_reading_goes_on_at_the_byte_reached(s3, tmp_path, monkeypatch, kind, name):  # noqa: F811
    import gzip

    monkeypatch.setattr(remote, "_BLOCK_BYTES", 1 << 12)
    lines = [json.dumps({"text": f"line {number}", "more": number * 7919 % 1009}) for number in range(2000)]
    if name == "a.parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": lines}), tmp_path / name)
    else:
        content = "\n".join(lines).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    upload(s3, tmp_path / name, f"data/{name}")
    count, most = {"faults": 0}, 2 if kind == "stall" else 4

    def fault(method, path, range_):
        # The third block fails four times, more often than pyarrow tries; a stall takes longer, and comes twice.
        if method == "GET" and "list-type" not in path and range_.startswith("bytes=8192-") and count["faults"] < most:
            count["faults"] += 1
            return kind
        return None

    s3.fault = fault
    with pytest.warns(UserWarning) as told:
        away = load(f"s3://data/{name}")
    said = [str(one.message) for one in told if "tried again" in str(one.message)]
    assert count["faults"] >= most - 1
    assert len(said) == 1 and f"s3://data/{name} could not be reached" in said[0] and "from byte" in said[0]
    same(load(tmp_path / name), away)
    read = [range_ for method, _, range_ in s3.requests if method == "GET" and range_.startswith("bytes=0-")]
    assert len(read) <= 4  # never from the beginning again


def test_an_object_that_is_replaced_under_way_is_refused_by_name(s3, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 1 << 12)
    (tmp_path / "a.txt").write_text("old " * 5000)
    upload(s3, tmp_path / "a.txt", "data/a.txt")

    def fault(method, path, range_):
        if range_.startswith("bytes=8192-"):
            s3.fault = lambda *_: None
            (tmp_path / "b.txt").write_text("new " * 5000)
            upload(s3, tmp_path / "b.txt", "data/a.txt")
        return None

    s3.fault = fault
    with pytest.raises(ValueError, match="must not change while it is read, got a change of s3://data/a.txt"):
        load("s3://data/a.txt")
    assert b"new" in bytes(load("s3://data/a.txt").read(0, 9).astype(np.uint8))


@pytest.mark.parametrize("at", ["bytes=0-", "bytes=8192-"])
def test_an_object_that_vanishes_under_way_is_one_line(s3, tmp_path, monkeypatch, at):  # noqa: F811
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 1 << 12)
    (tmp_path / "a.txt").write_text("old " * 5000)
    upload(s3, tmp_path / "a.txt", "data/a.txt")

    def fault(method, path, range_):
        if range_.startswith(at):
            s3.fault = lambda *_: None
            s3.direct.delete_file("data/a.txt")
        return None

    s3.fault = fault
    with pytest.raises(ValueError, match="s3://data/a.txt") as error:
        load("s3://data/a.txt", cache=str(tmp_path / "cache"))
    assert "\n" not in str(error.value)
    assert re.search("name what exists|must not change while it is read", str(error.value))
    assert not list((tmp_path / "cache").glob("*/facts.json"))  # nothing of it is kept


def test_reading_does_not_go_on_in_another_version(s3, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 1 << 12)
    (tmp_path / "a.txt").write_text("old " * 5000)
    upload(s3, tmp_path / "a.txt", "data/a.txt")

    def fault(method, path, range_):
        if not range_.startswith("bytes=8192-"):
            return None
        s3.fault = lambda *_: None
        (tmp_path / "a.txt").write_text("new " * 5000)
        upload(s3, tmp_path / "a.txt", "data/a.txt")
        return "fail"

    s3.fault = fault
    with pytest.warns(UserWarning, match="tried again"), place_of("s3://data/a.txt", "data.source").open() as file:
        with pytest.raises(ValueError, match="got a change of s3://data/a.txt"):
            file.read()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://absent/a.txt", "got s3://absent/a.txt .*; name (a bucket )?(that|what) exists"),
        ("s3://data/absent.txt", "got s3://data/absent.txt .*name what exists"),
        ("s3://data/none*.txt", "must name files that exist, got s3://data/none"),
        ("s3://", "must name a bucket"),
        ("s3:///x", "must name a bucket"),
        ("https://host/a.txt", "got https://host/a.txt; download the file"),
        ("hdfs://host/a.txt", "copy the files to a bucket"),
        ("ftp://host/a.txt", "name a path, or an address of s3://, gs://"),
    ],
)
def test_addresses_that_cannot_be_read_are_one_line(s3, address, message):  # noqa: F811
    with pytest.raises(ValueError, match=message) as error:
        load(address)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "address",
    [f"s3://AKIA:{SECRET_KEY}@data/a.txt", f"s3://data/a?secret_key={SECRET_KEY}", f"gs://{SECRET_KEY}@data/x",
     f"abfs://c:{SECRET_KEY}@account/x", f"https://u:{SECRET_KEY}@host/x", f"s3://data/a?x&sig={SECRET_KEY}",
     f"https://{SECRET_KEY}@host/x", f"S3://{SECRET_KEY}@data/x", f"hf://{SECRET_KEY}@datasets/a/b"],
)  # fmt: skip
def test_keys_in_an_address_are_refused_and_not_echoed(address):
    with pytest.raises(ValueError, match="must be an address without credentials") as error:
        place_of(address, "data.source")
    assert SECRET_KEY not in str(error.value) and "AKIA" not in str(error.value)
    with pytest.raises(ValueError, match="must be a path on this machine, got an address with keys in it") as error:
        local_path(address, "checkpoint.dir")
    assert SECRET_KEY not in str(error.value)


LACKS = {
    "an error of Azure": "Unknown error: Check failed: AuthenticationExceptionE: Failed to get token from "
    "DefaultAzureCredential.\nSee Azure::Core::Diagnostics::Logger",
    "an error of Google": "google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with a last message of Could not "
    "create a OAuth2 access token to authenticate the request.)",
    "an error of Amazon": "When getting information for key 'a' in bucket 'b': AWS Error ACCESS_DENIED during "
    "HeadObject operation: No response body.",
}


@pytest.mark.parametrize("service", LACKS)
def test_a_service_that_finds_no_credentials_is_one_line_at_once(monkeypatch, service):
    import pyarrow as pa

    monkeypatch.setattr("time.sleep", None)
    kind = pa.ArrowException if "Azure" in service else OSError

    def fail(path):
        raise kind(LACKS[service])

    place = remote.Remote(files=SimpleNamespace(get_file_info=fail), host="x://b", path="b/a")
    with pytest.raises(ValueError, match="must be readable, got x://b/a .*; set (valid )?credentials") as error:
        place.look()
    assert "\n" not in str(error.value)


def test_a_bucket_without_permission_is_one_line_without_the_keys(s3, tmp_path):  # noqa: F811
    upload(s3, FORMS / "stream.arrow", "data/a.arrow")
    s3.fault = lambda *_: "deny"
    with pytest.raises(ValueError, match="s3://data/a.arrow .*; set credentials with read access") as error:
        load("s3://data/a.arrow")
    assert SECRET_KEY not in str(error.value) and ACCESS_KEY not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.arrow", "a.*"])
@pytest.mark.parametrize("answer", ["moved", "malformed"])
def test_a_wrong_region_is_one_line_at_once(s3, monkeypatch, name, answer):  # noqa: F811
    monkeypatch.setattr("time.sleep", None)
    s3.fault = lambda *_: answer
    with pytest.raises(ValueError, match=r"got s3://data.*; set AWS_REGION to the region of the bucket") as error:
        load(f"s3://data/{name}")
    assert "\n" not in str(error.value) and SECRET_KEY not in str(error.value)


def test_too_little_disk_for_copies_is_one_line_before_the_first_byte(s3, tmp_path, monkeypatch):  # noqa: F811
    for number in range(3):
        np.arange(500, dtype=np.uint16).tofile(tmp_path / f"{number}.bin")
    upload(s3, tmp_path, "data/tokens")
    upload(s3, FORMS / "json.array_record", "data/a.array_record")
    load("s3://data/tokens/1.bin", cache=str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_FIRST_BYTES", 64)
    free = {"free": 1999}
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(**free))
    s3.requests.clear()
    with pytest.raises(ValueError, match=r"must have room for the tokens, 2,000 bytes, got 1,999 free in .*cache"):
        load("s3://data/tokens/*.bin", cache=str(tmp_path / "cache"))
    assert not [range_ for _, path, range_ in s3.requests if path.endswith(".bin") and range_.endswith("-999")]
    with pytest.raises(ValueError, match=r"room for a copy of s3://data/a.array_record, 131,072 bytes.*set TMPDIR"):
        load("s3://data/a.array_record")
    free["free"] = 2000  # one of three is there
    assert load("s3://data/tokens/*.bin", cache=str(tmp_path / "cache")).num_documents == 3


def test_a_key_that_a_service_repeats_is_hidden(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    assert SECRET_KEY not in str(remote.remote_error("s3://b/x", OSError(f"bad\nkey {SECRET_KEY}"), "do"))


def test_a_failure_that_does_not_pass_ends_after_the_patience(monkeypatch):
    waits, tries = [], []
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr("time.monotonic", lambda: sum(waits))

    def fail():
        tries.append(1)
        raise OSError("SlowDown")

    place = remote.Remote(files=None, host="s3://b", path="b/x")
    with pytest.warns(UserWarning, match="tried again"), pytest.raises(ValueError, match="try again when the service"):
        remote.patiently(place, fail)
    assert waits[:7] == [1, 2, 4, 8, 16, 32, 60] and set(waits[6:]) == {60}
    assert len(tries) == len(waits) + 1 and 540 <= sum(waits) <= 600


@pytest.mark.filterwarnings("ignore:data.source")
@pytest.mark.parametrize("address", ["gs://data/in", "abfs://data@account.dfs.core.windows.net/in"])
def test_other_services_go_the_same_way(tmp_path, monkeypatch, address):
    """By pyarrow's mock file system: neither service was met."""
    from pyarrow import fs

    folder_of_forms(tmp_path)
    mock = fs._MockFileSystem() if hasattr(fs, "_MockFileSystem") else __import__("pyarrow._fs")._fs._MockFileSystem()
    fs.copy_files(str(tmp_path), "data/in", source_filesystem=fs.LocalFileSystem(), destination_filesystem=mock)
    monkeypatch.setattr(places, "_gs", lambda: mock)
    monkeypatch.setattr(places, "_azure", lambda account: mock)
    files, _ = find_files(address)
    assert str(files[0].path).startswith(address + "/")
    same(load(tmp_path, separator=0), load(address, separator=0))
