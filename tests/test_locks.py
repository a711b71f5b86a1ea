"""Locks: held, free, or not there."""

import errno
import os

import pytest

from sppo_jax.files.locks import try_lock


def test_a_lock_is_held_once_or_shared(tmp_path):
    files = [(tmp_path / "lock").open("a+") for _ in range(3)]
    assert try_lock(files[0]) is True and try_lock(files[1]) is False and try_lock(files[2], shared=True) is False
    files[0].close()
    assert [try_lock(file, shared=True) for file in files[1:]] == [True, True]
    with (tmp_path / "lock").open() as fourth:
        assert try_lock(fourth) is False
    for file in files[1:]:
        file.close()


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        *((number, None) for number in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)),
        *((number, False) for number in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)),
    ],
)
def test_what_the_system_answers(tmp_path, monkeypatch, number, answer):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("sppo_jax.files.locks.fcntl.flock", refuse)
    with (tmp_path / "lock").open("a") as file:
        assert try_lock(file) is answer
