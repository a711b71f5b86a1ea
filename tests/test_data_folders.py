"""Directories and patterns find the same files: links are followed, circles are cut, hidden files are left out."""

import glob
import os
import random

import pytest

from sppo_jax.data.sources.open_source import find_files
from sppo_jax.data.storage.folders import files_in, is_pattern


def make(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def names_in(path):
    root, files = files_in(path)
    return sorted(file.relative_to(root).as_posix() for file in files)


def link(root, name, target):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    os.symlink(target, root / name)


LINKS = {
    "a file": lambda root: link(root, "in/b.txt", root / "out" / "x.txt"),
    "a file by a relative path": lambda root: link(root, "in/deep/b.txt", "../../out/x.txt"),
    "a folder": lambda root: link(root, "in/b", root / "out"),
    "a folder within a folder": lambda root: link(root, "in/sub/b", root / "out"),
    "a link to a link": lambda root: [link(root, "in/b", root / "c"), link(root, "c", root / "out")],
    "the folder itself": lambda root: [os.rename(root / "in", root / "real"), link(root, "in", root / "real")],
    "a folder as the hub keeps it": lambda root: [link(root, "in/s/1/x.txt", "../../../out/x.txt")],
}


@pytest.mark.parametrize("kind", LINKS)
def test_links_are_followed_in_directories_as_in_patterns(tmp_path, kind):
    make(tmp_path, "in/a.txt", "out/x.txt", "out/deep/y.txt")
    LINKS[kind](tmp_path)
    found = names_in(tmp_path / "in")
    assert found == names_in(tmp_path / "in" / "**" / "*") == names_in(tmp_path / "in" / "**" / "*.txt")
    assert found == names_in(tmp_path / "in" / "**")
    assert "a.txt" in found and (len(found) > 1 or kind == "the folder itself")
    assert len(find_files(str(tmp_path / "in"))[0]) == len(found)


@pytest.mark.parametrize("target", [".", "..", "../..", "deep", "../in"])
def test_circles_are_cut(tmp_path, target):
    make(tmp_path, "in/a.txt", "in/deep/b.txt", "in/deep/deeper/c.txt")
    for name in ("deep/back", "deep/deeper/back", "deep/deeper/again"):
        link(tmp_path, f"in/{name}", target)
    for path in (tmp_path / "in", tmp_path / "in" / "**" / "*.txt"):
        found = names_in(path)
        assert {"a.txt", "deep/b.txt", "deep/deeper/c.txt"} <= set(found) and len(found) < 40


def test_a_link_to_nothing_is_a_file_that_is_missing(tmp_path):
    make(tmp_path, "a.txt")
    link(tmp_path, "b.txt", "nowhere")
    link(tmp_path, "c.md", "nowhere")
    for source in (tmp_path, tmp_path / "*.txt", tmp_path / "**" / "*.txt"):
        with pytest.raises(ValueError, match=r"must be readable, got .*b.txt \(No such file"):
            find_files(str(source))


def test_a_directory_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    make(tmp_path, "a.txt", "sub/b.txt")

    def listdir(path, real=os.listdir):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    for source in (tmp_path, tmp_path / "**" / "*.txt"):
        with pytest.raises(ValueError, match=r"must be readable, got .*sub \(Permission denied\)"):
            find_files(str(source))


PATTERNS = [
    "*",
    "*.txt",
    "**",
    "**/*",
    "**/*.txt",
    "a/**/b*",
    "?/[ab]*",
    "**/a/**/*",
    "*/*",
    ".*",
    "**/.*",
    ".h/*",
    "a/b.txt*",
]


@pytest.mark.parametrize("seed", range(20))
def test_without_circles_patterns_mean_what_they_mean_to_glob(tmp_path, seed):
    random.seed(seed)
    parts = ["a", "b", "c.txt", "ab.jsonl", ".h", ".x.txt", "b.txt"]
    for _ in range(12):
        name = "/".join(random.choices(parts[:2] + parts[4:5], k=random.randrange(3)) + [random.choice(parts)])
        if not (tmp_path / name).exists() and not any(parent.is_file() for parent in (tmp_path / name).parents):
            make(tmp_path, name)
    for pattern in PATTERNS:
        path = tmp_path / pattern
        assert is_pattern(path)
        expected = {file for file in glob.glob(str(path), recursive=True) if os.path.isfile(file)}
        assert {str(file) for file in files_in(path)[1]} == expected, pattern
