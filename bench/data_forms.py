"""MB/s of our readers beside those of the libraries that own the forms: bytes of text or tokens a second, in one run.

    python -m bench.data_forms --streaming VENV/bin/python --megatron VENV/bin/python

datasets, webdataset and array_record must be installed; a library that is missing is left out. mosaicml-streaming needs
transformers below 5, and megatron-core a torch of its own: each runs in the environment whose Python is named. Ours and
theirs take turns, and every round gives every document once; the best round of each counts.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sppo_jax.config import DataConfig
from sppo_jax.data.content.documents import read_pieces
from sppo_jax.data.sources.open_source import load_corpus
from sppo_jax.data.tokens.encoding import open_encoder

ROUNDS, TEXT_FILES = 5, 32
_STREAMING = """
import json, sys, time
from streaming import MDSWriter, StreamingDataset
folder, lines = sys.argv[1:]
if lines:
    with MDSWriter(out=folder, columns={"text": "str"}) as writer:
        for line in open(lines):
            writer.write(json.loads(line))
else:
    start = time.perf_counter()
    data = StreamingDataset(local=folder, batch_size=1, shuffle=False)
    count = sum(len(data[number]["text"]) for number in range(len(data)))
    print(time.perf_counter() - start, count)
"""
_MEGATRON = """
import json, sys, time
import numpy as np, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
folder, lines = sys.argv[1:]
if lines:
    builder = IndexedDatasetBuilder(folder + ".bin", dtype=np.uint16)
    for line in open(lines):
        tokens = torch.tensor(list(json.loads(line)["text"].encode()))
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(folder + ".idx")
else:
    start = time.perf_counter()
    data = IndexedDataset(folder)
    count = sum(int(data[number].sum()) for number in range(len(data)))
    print(time.perf_counter() - start, count)
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A form.

    Args:
        name: the form and the library that owns it.
        num_bytes: bytes of text or tokens.
        total: what every round must count: characters, or the sum of all tokens.
        ours: reads all documents; returns seconds and the count.
        theirs: the same by the library.
    """

    name: str
    num_bytes: int
    total: int
    ours: Callable[[], tuple[float, int]]
    theirs: Callable[[], tuple[float, int]]


def texts(num_bytes: int) -> list[str]:
    """Draw documents of about 8 kB."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(2, 12))) for _ in range(5000)]
    return [" ".join(rng.choices(words, k=rng.randrange(100, 2300))) for _ in range(num_bytes // 8400)]


def timed(read: Callable[[], Iterator[str]]) -> tuple[float, int]:
    """Return the seconds that reading takes, and the number of characters."""
    start = time.perf_counter()
    count = sum(map(len, read()))
    return time.perf_counter() - start, count


def ours(files: list[Path]) -> tuple[float, int]:
    """Read the texts of files as training does."""
    pieces = (read_pieces(path, text_key="text", strict=True) for path in files)
    return timed(lambda: (piece for one in pieces for piece, _ in one))


def ours_of_tokens(path: Path, cache: Path) -> tuple[float, int]:
    """Open a file of tokens and read each document; a file that the cache does not know is first looked through."""
    config = DataConfig(source=str(path), cache=str(cache))
    start = time.perf_counter()
    corpus = load_corpus(config, config.source, lambda: open_encoder(config, vocab_size=1 << 16), vocab_size=1 << 16)
    spans = zip(corpus.starts.tolist(), corpus.ends.tolist(), strict=True)
    count = sum(int(corpus.read(first, last).sum()) for first, last in spans)
    return time.perf_counter() - start, count


def first_of_tokens(path: Path) -> tuple[float, int]:
    """Do the same with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        return ours_of_tokens(path, Path(cache))


def elsewhere(python: str, script: str, folder: Path) -> tuple[float, int]:
    """Return the seconds and the count of a library in its own environment."""
    done = subprocess.run([python, "-c", script, str(folder), ""], check=True, capture_output=True, text=True)
    seconds, count = done.stdout.split()[-2:]
    return float(seconds), int(count)


def write_elsewhere(python: str, script: str, folder: Path, lines: Path) -> None:
    """Write a form by its library, in the library's own environment."""
    subprocess.run([python, "-c", script, str(folder), str(lines)], check=True, capture_output=True)


def library(name: str) -> Any:
    """Return a library; None if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"{name} is missing")
        return None


def datasets_cases(folder: Path, rows: list[str]) -> Iterator[tuple[str, list[Path], Callable[[], Iterator[str]]]]:
    """Yield each form of datasets: its name, its files, and the library's reader."""
    datasets = library("datasets")
    if not datasets:
        return
    datasets.disable_progress_bars()
    stream = functools.partial(datasets.load_dataset, split="train", streaming=True)
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(folder / "saved")
    saved = datasets.load_from_disk(str(folder / "saved"))
    yield "arrow, datasets", sorted((folder / "saved").glob("*.arrow")), lambda: (row["text"] for row in saved)
    lines = stream("json", data_files=str(folder / "a.jsonl"))
    yield "JSON lines, datasets", [folder / "a.jsonl"], lambda: (row["text"] for row in lines)
    files = sorted((folder / "plain").iterdir())
    plain = stream("text", data_files=[str(path) for path in files], sample_by="document")
    yield "text, datasets", files, lambda: (row["text"] for row in plain)


def other_cases(folder: Path, rows: list[str]) -> Iterator[tuple[str, list[Path], Callable[[], Iterator[str]]]]:
    """Yield the forms of webdataset and of array_record in the same way."""
    if webdataset := library("webdataset"):
        tar = folder / "a.tar"
        with webdataset.TarWriter(str(tar)) as writer:
            for number, text in enumerate(rows):
                writer.write({"__key__": f"{number:07}", "txt": text})
        read = functools.partial(webdataset.WebDataset, str(tar), shardshuffle=False)
        yield "tar, webdataset", [tar], lambda: (row["txt"] for row in read().decode())
    if array_record := library("array_record.python.array_record_module"):
        path = folder / "a.array_record"
        writer = array_record.ArrayRecordWriter(str(path), "group_size:64")
        for text in rows:
            writer.write(text.encode())
        writer.close()
        reader = array_record.ArrayRecordReader
        yield "ArrayRecord, array_record", [path], lambda: (one.decode() for one in reader(str(path)).read_all())


def write_texts(folder: Path, rows: list[str]) -> None:
    """Write the texts as JSON lines, and joined as TEXT_FILES files of plain text with as many characters."""
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    (folder / "plain").mkdir()
    each = -(-len(rows) // TEXT_FILES)
    for number in range(TEXT_FILES):
        (folder / "plain" / f"{number:02}.txt").write_text("".join(rows[number * each : (number + 1) * each]))


def cases(folder: Path, rows: list[str], streaming: str | None, megatron: str | None) -> Iterator[Case]:
    """Write each form by its own library, and yield how to read it."""
    total, lines = sum(map(len, rows)), folder / "a.jsonl"
    write_texts(folder, rows)
    for make in (datasets_cases, other_cases):
        for name, files, theirs in make(folder, rows):
            yield Case(
                name=name, num_bytes=total, total=total,
                ours=functools.partial(ours, files), theirs=functools.partial(timed, theirs),
            )  # fmt: skip
    if streaming:
        write_elsewhere(streaming, _STREAMING, folder / "mds", lines)
        yield Case(
            name="MDS, streaming", num_bytes=total, total=total,
            ours=functools.partial(ours, sorted((folder / "mds").glob("*.mds"))),
            theirs=functools.partial(elsewhere, streaming, _STREAMING, folder / "mds"),
        )  # fmt: skip
    if megatron:
        tokens = folder / "tokens"
        write_elsewhere(megatron, _MEGATRON, tokens, lines)
        path, theirs = tokens.with_suffix(".bin"), functools.partial(elsewhere, megatron, _MEGATRON, tokens)
        count = sum(int(np.frombuffer(text.encode(), np.uint8).sum()) for text in rows)
        for name, own in (
            ("tokens, megatron-core", functools.partial(ours_of_tokens, path, folder / "cache")),
            ("tokens, first opening", functools.partial(first_of_tokens, path)),
        ):
            yield Case(name=name, num_bytes=2 * total, total=count, ours=own, theirs=theirs)


def rates(case: Case) -> tuple[float, float]:
    """Return the MB/s of our best round and of the library's; every round must count all."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for read, found in zip((case.ours, case.theirs), seconds, strict=True):
            took_s, count = read()
            assert count == case.total, (case.name, count, case.total)
            found.append(took_s)
    own, theirs = (case.num_bytes / min(found) / 1e6 for found in seconds)
    return own, theirs


def main(words: list[str] | None = None) -> int:
    """Print a table; return 1 where one of our readers has less than half of a library's speed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--streaming", help="the Python of an environment with mosaicml-streaming")
    parser.add_argument("--megatron", help="the Python of an environment with megatron-core")
    args = parser.parse_args(words)
    rows, ratios = texts(args.megabytes * 1_000_000), []
    print(f"{'MB/s':<28}{'ours':>10}{'theirs':>10}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as name:
        for case in cases(Path(name), rows, args.streaming, args.megatron):
            own, theirs = rates(case)
            ratios.append(own / theirs)
            print(f"{case.name:<28}{own:>10,.0f}{theirs:>10,.0f}{ratios[-1]:>8.2f}", flush=True)
    return int(min(ratios) < 0.5)


if __name__ == "__main__":
    sys.exit(main())
