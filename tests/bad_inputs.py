"""A working directory for bad inputs: a config and documents, what spoils them, and what a refusal must not touch."""

import gzip
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import yaml

from sppo_jax.cli import main

SETTINGS = {
    "model": {"vocab_size": 257, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "mlp_size": 32},
    "data": {"source": "tokens.npy", "validation_fraction": 0.2},
    "sequence": {"length": 64, "chunks": 2},
    "train": {"steps": 2, "devices": "cpu:1", "eval_sequences": 1},
}


class Reached(Exception):
    """Training was about to begin: nothing refused the input."""


def write_place(place):
    """Write a config and its tokens; both count up, so that every document is known."""
    (place / "c.yaml").write_text(yaml.safe_dump(SETTINGS))
    np.save(place / "tokens.npy", (np.arange(1000) % 23).astype(np.uint16))


def snapshot(place):
    """Return every path under a directory with what it holds: a link's target, a file's hash."""
    found = {}
    for path in sorted(place.rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.is_file():
            found[str(path)] = (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        else:
            found[str(path)] = None
    return found


def run(words, capfd):
    """Run a command; return its exit code, what it printed, its warnings and its other lines on standard error."""
    capfd.readouterr()
    code = main(words if isinstance(words, list) else words.split())
    captured = capfd.readouterr()
    lines = captured.err.splitlines()
    warned = [line for line in lines if line.startswith("warning: ")]
    return code, captured.out, warned, [line for line in lines if line not in warned]


def check_refused(words, expected, place, capfd):
    """Check that a command ends with exit code 2 and one line that says what is expected, and changes nothing."""
    before = snapshot(place)
    code, _, _, lines = run(words, capfd)
    assert (code, len(lines)) == (2, 1), (code, lines)
    assert expected in lines[0] and "Traceback" not in lines[0], lines[0]
    assert len(lines[0]) < 1200
    after = snapshot(place)
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path, 0) != after.get(path, 0))
    assert not changed


def text(name, content):
    """Return what writes a file, of text or of bytes."""
    content = content.encode() if isinstance(content, str) else content
    return lambda: Path(name).write_bytes(content)


def array(name, *values, **kind):
    """Return what writes an array of numbers."""
    return lambda: np.save(name, np.array(*values, **kind))


def parquet(name, **columns):
    """Return what writes a table."""

    def write():
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), name)

    return write


def cut(name, num_bytes):
    """Return what takes bytes from a file's end."""

    def write():
        path = Path(name)
        path.write_bytes(path.read_bytes()[:-num_bytes])

    return write


def torn_gzip(name):
    """Return what writes a compressed file without its end."""
    content = gzip.compress(json.dumps({"text": "a" * 50}).encode() + b"\n")
    return text(name, content[:-9])


def both(*steps):
    """Return what takes several steps."""
    return lambda: [step() for step in steps]


def link(target, name):
    """Return what makes a symbolic link."""
    return lambda: os.symlink(target, name)


def folder(name):
    """Return what makes a directory."""
    return lambda: Path(name).mkdir(parents=True)


def copy(source, target):
    """Return what copies a file or a directory."""

    def write():
        (shutil.copytree if Path(source).is_dir() else shutil.copyfile)(source, target)

    return write


def edit_json(name, **changes):
    """Return what changes keys of a JSON object; None removes one."""

    def write():
        values = json.loads(Path(name).read_text()) | changes
        Path(name).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return write
