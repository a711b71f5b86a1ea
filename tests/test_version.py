"""The version of jaxlib is read without importing it."""

from importlib.metadata import PackageNotFoundError

import pytest

from sppo_jax import version as version_module


@pytest.mark.parametrize(
    "text, version",
    [("0.10.2", (0, 10, 2)), ("0.12.0.1", (0, 12, 0)), ("0.11.1+cuda13", (0, 11, 1)), ("0.11.0rc1", (0, 11, 0))],
)
def test_a_version_is_its_first_three_numbers(text, version, monkeypatch):
    monkeypatch.setattr(version_module, "version", lambda name: text)
    assert version_module.jaxlib_version() == version


def test_no_jaxlib_has_no_version(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(version_module, "version", missing)
    assert version_module.jaxlib_version() == ()
