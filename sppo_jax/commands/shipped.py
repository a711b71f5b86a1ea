"""Configs that come with the package: found by the name of the file, and listed."""

from __future__ import annotations

import difflib
import re
import warnings
from itertools import takewhile
from pathlib import Path

from sppo_jax.files.paths import local_path

_PACKAGE = Path(__file__).parents[1]
# In an installed package; in a checkout.
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
_NUM_NEAREST = 3
_SENTENCE_END = re.compile(r"[.:](?:\s|$)")


def shipped_configs() -> dict[str, Path]:
    """Returns the shipped configs by the names of their files, in the order of the names."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    return {path.name: path for path in sorted(folder.rglob("*.yaml"), key=lambda path: path.name)} if folder else {}


def find_config(name: str) -> str:
    """Returns the path of a config: the name itself, or, where there is no such file, the shipped config of that name.

    Args:
        name: a path; the file's name alone, or with a folder of shipped configs, names what is shipped.

    Raises:
        ValueError: there is neither, or the name is an address; names the nearest shipped configs.
    """
    path, configs = local_path(name, "a config"), shipped_configs()
    shipped = configs.get(path.name)
    if path.exists() or path.is_symlink():
        if shipped and path.parent == Path() and not path.samefile(shipped):
            warnings.warn(f"{name} of this folder is read, not the shipped config of that name", stacklevel=2)
        return name
    if name.startswith("hf:"):
        raise ValueError(
            f"a config must be a YAML file here, got {name}; write one with sppo init {name} --out new.yaml"
        )
    if shipped and (path.parent == Path() or shipped.as_posix().endswith(f"/{path.as_posix()}")):
        return str(shipped)
    near = difflib.get_close_matches(path.name, configs, n=_NUM_NEAREST, cutoff=0.0)
    raise ValueError(
        f"a config must be a YAML file or the name of a shipped one, got {name}, which is neither; the nearest of "
        f"sppo configs are {', '.join(near)}"
    )


def summary(path: Path) -> str:
    """Returns the first sentence of the comment at the head of a config."""
    head = takewhile(lambda line: line.startswith("# "), path.read_text(encoding="utf-8").splitlines())
    return _SENTENCE_END.split(" ".join(line.removeprefix("# ") for line in head), maxsplit=1)[0]
