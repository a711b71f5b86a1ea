"""What is tokenized once is kept whole, whoever else is at it, killed, or out of room."""

import os
import platform
import threading
import time

import numpy as np
import pytest

from sppo_jax.data.cache import store as cache
from sppo_jax.data.cache.store import entry_of

DTYPE = np.dtype(np.uint16)


def fill_with(values, calls):
    def fill(writer):
        calls.append(1)
        writer.add_tokens(np.array(values[:2]))
        writer.add_tokens(np.array(values[2:]))
        writer.add_ends(np.array([2, len(values)]))
        writer.facts["kind"] = "test"

    return fill


def test_an_entry_is_made_once(tmp_path):
    calls = []
    for _ in range(3):
        entry = entry_of(tmp_path, {"a": 1}, fill_with([1, 2, 3], calls), dtype=DTYPE)
        assert entry.tokens[:].tolist() == [1, 2, 3] and entry.tokens.dtype == DTYPE
        assert entry.ends.tolist() == [2, 3] and entry.facts["kind"] == "test"
    assert len(calls) == 1
    other = entry_of(tmp_path, {"a": 2}, fill_with([4, 5, 6], calls), dtype=DTYPE)
    assert other.tokens[:].tolist() == [4, 5, 6] and len(calls) == 2


@pytest.mark.parametrize("harm", ["cut", "lost", "facts"])
def test_a_torn_entry_is_made_anew(tmp_path, harm):
    calls = []
    entry_of(tmp_path, {}, fill_with([1, 2, 3], calls), dtype=DTYPE)
    (path,) = (path for path in tmp_path.iterdir() if path.is_dir())
    if harm == "cut":
        (path / "tokens.bin").write_bytes(b"\1\0")
    elif harm == "lost":
        (path / "bounds.bin").unlink()
    else:
        (path / "facts.json").write_text("{")
    assert entry_of(tmp_path, {}, fill_with([1, 2, 3], calls), dtype=DTYPE).tokens[:].tolist() == [1, 2, 3]
    assert len(calls) == 2


def test_what_a_killed_process_left_is_removed(tmp_path):
    class Killed(BaseException):
        pass

    def die(writer):
        writer.add_tokens(np.array([7]))
        raise Killed

    calls = []
    with pytest.raises(Killed):
        entry_of(tmp_path, {}, die, dtype=DTYPE)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    entry_of(tmp_path, {}, fill_with([1, 2, 3], calls), dtype=DTYPE)
    (path,) = (path for path in tmp_path.iterdir() if path.is_dir())
    own, other, old = (tmp_path / f"{path.name}.new-{node}-left" for node in (platform.node(), "other", "older"))
    for left in (own, other, old):
        left.mkdir()
    os.utime(old, (0, 0))
    path.rename(tmp_path / "gone")
    entry_of(tmp_path, {}, fill_with([1, 2, 3], calls), dtype=DTYPE)
    assert [left.exists() for left in (own, other, old)] == [False, True, False]


@pytest.mark.parametrize("locks", [True, False])
def test_several_at_once_get_the_same(tmp_path, monkeypatch, locks):
    """Without locks each makes an entry, and the first to finish wins; with them one does."""
    if not locks:

        def refuse(*_):
            raise OSError("no locks here")

        monkeypatch.setattr("sppo_jax.files.locks.fcntl.flock", refuse)
    calls, found, barrier = [], [], threading.Barrier(6)

    def slow(writer):
        time.sleep(0.05)
        fill_with([1, 2, 3], calls)(writer)

    def work():
        barrier.wait()
        found.append(entry_of(tmp_path, {}, slow, dtype=DTYPE).tokens[:].tolist())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[1, 2, 3]] * 6
    assert len(calls) == 1 or not locks


def test_a_cache_that_cannot_be_written_is_refused_or_replaced(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    calls = []
    with pytest.raises(ValueError, match="data.cache must be a directory that can be written, got .*file"):
        entry_of(tmp_path / "file", {}, fill_with([1, 2, 3], calls), dtype=DTYPE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match="tokens are kept in .*set data.cache"):
        entry_of(None, {}, fill_with([1, 2, 3], calls), dtype=DTYPE)
    with pytest.warns(UserWarning, match="tokens are kept in"):
        entry_of(None, {}, fill_with([1, 2, 3], calls), dtype=DTYPE)
    assert len(calls) == 1


def test_a_user_without_a_home_has_a_temporary_cache(tmp_path, monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(cache.Path, "home", nowhere)
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    assert tmp_path in cache.user_directory().parents


def test_a_full_disk_leaves_nothing(tmp_path):
    def full(writer):
        writer.add_tokens(np.array([1]))
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="must have room for the tokens, got a disk that was full after 10 bytes in"):
        entry_of(tmp_path, {}, full, dtype=DTYPE)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
