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
    """Writes a config and its tokens; both count up, so that every document is known."""
    (place / "c.yaml").write_text(yaml.safe_dump(SETTINGS))
    np.save(place / "tokens.npy", (np.arange(1000) % 23).astype(np.uint16))


def snapshot(place):
    """Returns every path under a directory with what it holds: a link's target, a file's hash."""
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
    """Runs a command; returns its exit code, its output, its warnings and its other lines on standard error."""
    capfd.readouterr()
    code = main(words if isinstance(words, list) else words.split())
    captured = capfd.readouterr()
    lines = captured.err.splitlines()
    warned = [line for line in lines if line.startswith("warning: ")]
    return code, captured.out, warned, [line for line in lines if line not in warned]


def check_refused(words, expected, place, capfd):
    """Checks that a command ends with exit code 2 and one line that says what is expected, and changes nothing."""
    before = snapshot(place)
    code, _, _, lines = run(words, capfd)
    assert (code, len(lines)) == (2, 1), (code, lines)
    assert expected in lines[0] and "Traceback" not in lines[0], lines[0]
    assert len(lines[0]) < 1200
    after = snapshot(place)
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path, 0) != after.get(path, 0))
    assert not changed


def text(name, content):
    """Returns a function that writes a file, of text or of bytes."""
    content = content.encode() if isinstance(content, str) else content
    return lambda: Path(name).write_bytes(content)


def array(name, *values, **kind):
    """Returns a function that writes an array of numbers."""
    return lambda: np.save(name, np.array(*values, **kind))


def parquet(name, **columns):
    """Returns a function that writes a table."""

    def write():
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), name)

    return write


def cut(name, num_bytes):
    """Returns a function that takes bytes from a file's end."""

    def write():
        path = Path(name)
        path.write_bytes(path.read_bytes()[:-num_bytes])

    return write


def torn_gzip(name):
    """Returns a function that writes a compressed file without its end."""
    content = gzip.compress(json.dumps({"text": "a" * 50}).encode() + b"\n")
    return text(name, content[:-9])


def both(*steps):
    """Returns a function that takes several steps."""
    return lambda: [step() for step in steps]


def link(target, name):
    """Returns a function that makes a symbolic link."""
    return lambda: os.symlink(target, name)


def folder(name):
    """Returns a function that makes a directory."""
    return lambda: Path(name).mkdir(parents=True)


def copy(source, target):
    """Returns a function that copies a file or a directory."""

    def write():
        (shutil.copytree if Path(source).is_dir() else shutil.copyfile)(source, target)

    return write


def edit_json(name, **changes):
    """Returns a function that changes keys of a JSON object; None removes one."""

    def write():
        values = json.loads(Path(name).read_text()) | changes
        Path(name).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return write
