"""Paths that users give: addresses are refused, `~` and variables mean the same everywhere."""

import errno
import os

import pytest
import yaml
from bad_inputs import SETTINGS, check_refused, run, write_place
from data_cases import write_tokenizer
from hf_configs import SMALL
from hf_folders import write_folder

from sppo_jax.config import load_config
from sppo_jax.files.paths import check_local, file_error, local_path


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, os.environ[name])
    write_place(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", ["a", "a/b", "/a", "C:/a", "a:b", "a//b", "hf:a", "./s3://a", "*", "~", "$HOME"])
def test_a_path_is_no_address(path):
    check_local(path, "it")


@pytest.mark.parametrize(
    "path", ["s3://b/run", "gs://b", "hdfs://h:1/x", "file:///tmp/x", "abfs+ssl://x", "HTTPS://x/y"]
)
def test_an_address_is_refused(path):
    with pytest.raises(ValueError, match="it must be a path on this machine, got the address"):
        local_path(path, "it")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("~/a", "{home}/a"),
        ("~", "{home}"),
        ("$PLACE/a", "/p/a"),
        ("${PLACE}/a", "/p/a"),
        ("/x/$PLACE_2/b", "/x/q/b"),
        ("$HOME_LIKE/a", "{home}/a"),
        ("a/~/b", "a/~/b"),
        ("a$", "a$"),
        ("a/$1.txt", "a/$1.txt"),
        ("cost$PLACE.txt", "cost$PLACE.txt"),
    ],
)
def test_a_home_and_variables_are_replaced(place, monkeypatch, path, expected):
    for name, value in {"HOME": str(place), "PLACE": "/p", "PLACE_2": "q", "HOME_LIKE": "~"}.items():
        monkeypatch.setenv(name, value)
    (place / "cost$PLACE.txt").write_text("")  # exists as it is written
    (place / "a").mkdir()
    (place / "a" / "$1.txt").write_text("")
    assert str(local_path(path, "it")) == expected.format(home=place)


@pytest.mark.parametrize("path", ["$ABSENT", "a/${ABSENT}/b", "$EMPTY/a"])
def test_a_variable_that_is_not_set_is_refused(monkeypatch, path):
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(ValueError, match="it must have variables that are set, got .* without (ABSENT|EMPTY) in the"):
        local_path(path, "it")


def test_errors_of_files_say_what_to_change():
    full = file_error("a file must be writable", "a", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "free space")
    assert str(full) == "a file must be writable, got a (No space left on device); free space"
    many = file_error("a file must be readable", "a", OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "name another")
    assert "raise the limit of open files (ulimit -n)" in str(many) and "name another" not in str(many)


# Every path that is written, and then every path that is read.
ADDRESSES = {
    "--run-dir": "train c.yaml --run-dir {}",
    "checkpoint.dir": "train c.yaml --run-dir new checkpoint.dir={}",
    "checkpoint.dir of a plan": "plan c.yaml checkpoint.dir={}",
    "--html": "plan c.yaml --html {}",
    "--trace": "plan c.yaml --trace {}",
    "flex --json": "flex c.yaml --json {}",
    "profile --out": "profile --out {}",
    "profile-trace --out": "profile-trace c.yaml --out {}",
    "report --out": "report run --out {}",
    "from-hf": "convert from-hf hf {}",
    "to-hf": "convert to-hf run {}",
    "a config": "plan {}",
    "--plan": "train c.yaml --run-dir new --plan {}",
    "a run": "eval {}",
    "train.init": "plan c.yaml train.init={}",
    "data.tokenizer": "data c.yaml data.source=c.yaml data.tokenizer={}",
    "model.hf": "plan c.yaml model=hf:{}",
    "schedule.table": "plan c.yaml schedule.name=table schedule.table={}",
    "hardware.measured": "plan c.yaml hardware.measured={}",
    "--lengths": "flex c.yaml --lengths {}",
}


@pytest.mark.parametrize("address", ["s3://bucket/x.txt"])
@pytest.mark.parametrize("kind", ADDRESSES)
def test_an_address_is_refused_at_the_start_wherever_it_stands(place, capfd, kind, address):
    if kind == "data.tokenizer":
        (place / "c.yaml").rename(place / "d.yaml")
        (place / "c.yaml").write_text((place / "d.yaml").read_text().replace("tokens.npy", "d.txt"))
        (place / "d.txt").write_text("x" * 999)
    words = ADDRESSES[kind].format(address).replace("data.source=c.yaml ", "")
    check_refused(words, f"must be a path on this machine, got the address {address}", place, capfd)


HOMES = ["~", "$HOME", "${HOME}", "$ELSEWHERE"]


@pytest.mark.parametrize("home", HOMES)
def test_a_home_and_variables_mean_the_same_everywhere(place, tmp_path_factory, capfd, monkeypatch, home):
    folder = tmp_path_factory.mktemp("home")
    for name in ("HOME", "ELSEWHERE"):
        monkeypatch.setenv(name, str(folder))
    for name in ("c.yaml", "tokens.npy"):
        (place / name).rename(folder / name)
    (folder / "c.yaml").write_text(yaml.safe_dump(SETTINGS | {"data": {"source": f"{home}/tokens.npy"}}))
    write_folder(folder / "hf")
    write_tokenizer(folder / "t.json")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the cat " * 100)
    text = f"data.source={home}/text/* data.tokenizer={home}/t.json data.cache={home}/cache"
    for words in (
        f"data {home}/c.yaml",
        f"data {home}/c.yaml {text}",
        f"data {home}/c.yaml data.validation_source={home}/tokens.npy",
        f"plan {home}/c.yaml model=hf:{home}/hf --html {home}/p.html --trace {home}/p.json",
        f"flex {home}/c.yaml mesh.seq=2 train.devices=cpu:2 --json {home}/f.json",
        f"convert from-hf {home}/hf {home}/out",
    ):
        code, _, _, lines = run(words, capfd)
        assert code == 0, (words, lines)
    assert {"p.html", "p.json", "f.json", "out", "cache"} <= {path.name for path in folder.iterdir()}
    assert not list(place.iterdir())
    config = load_config(f"{home}/c.yaml", [f"checkpoint.dir={home}/saved", f"model=hf:{home}/hf"])
    assert config.model.hf == str(folder / "hf") and config.model.vocab_size != SMALL["vocab_size"]
    assert config.checkpoint.dir == f"{home}/saved"  # as it is written, for another machine
