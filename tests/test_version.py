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


def test_what_is_required_and_not_installed_is_named_as_it_is_required(monkeypatch):
    lines = ["jax>=0.10.2", "orbax-checkpoint>=0.12.8", "numpy>=2.0", 'pyarrow>=21; extra == "data"']
    monkeypatch.setattr(version_module, "requires", lambda name: lines)
    monkeypatch.setattr(version_module, "installed_version", lambda name: "2.4" if name == "numpy" else "")
    assert version_module.missing_requirements() == ["jax>=0.10.2", "orbax-checkpoint>=0.12.8"]


def test_nothing_is_missing_here_nor_known_without_metadata(monkeypatch):
    assert version_module.missing_requirements() == []

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(version_module, "requires", missing)
    assert version_module.missing_requirements() == []
