"""MB/s of our readers beside those of the libraries that own the forms: bytes of text a second, in one run.

    python -m bench.data_forms --megabytes 64 --streaming VENV/bin/python

datasets, webdataset and array_record must be installed; mosaicml-streaming, which needs transformers below 5, runs in
the environment whose Python `--streaming` names. A library that is missing is left out. Each reader gives every text
once; the best of three counts.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sppo_jax.data.forms.rows import read_rows
from sppo_jax.data.text import read_pieces

ROUNDS = 3
_STREAMING = """
import sys, time
from streaming import MDSWriter
folder, texts = sys.argv[1], sys.argv[2]
if texts:
    with MDSWriter(out=folder, columns={"text": "str"}) as writer:
        for line in open(texts):
            import json
            writer.write(json.loads(line))
else:
    from streaming import StreamingDataset
    data, best = StreamingDataset(local=folder, batch_size=1, shuffle=False), 1e9
    for _ in range(3):
        start = time.perf_counter()
        count = sum(len(data[number]["text"]) for number in range(len(data)))
        best = min(best, time.perf_counter() - start)
    print(best)
"""


def texts(num_bytes: int) -> list[str]:
    """Draw documents of about 8 kB."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(2, 12))) for _ in range(5000)]
    return [" ".join(rng.choices(words, k=rng.randrange(100, 2300))) for _ in range(num_bytes // 8400)]


def best_s(read: Callable[[], Iterator[str]], wanted: int) -> float:
    """Return the seconds of the fastest round; every round must give all characters."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        count = sum(map(len, read()))
        found.append(time.perf_counter() - start)
        assert count == wanted, (count, wanted)
    return min(found)


def ours(path: Path) -> Callable[[], Iterator[str]]:
    """Read the texts of a file as training does."""
    return lambda: (piece for piece, _ in read_pieces(path, text_key="text", strict=True))


def forms(folder: Path, rows: list[str]) -> Iterator[tuple[str, list[Path], Callable[[], Iterator[str]]]]:
    """Write each form by its own library; yield its name, its files, and the library's reader."""
    lines = folder / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    try:
        import datasets
    except ImportError:
        print("datasets is missing")
    else:
        datasets.disable_progress_bars()
        saved = datasets.Dataset.from_dict({"text": rows})
        saved.save_to_disk(folder / "saved")
        loaded = datasets.load_from_disk(str(folder / "saved"))
        yield "arrow, datasets", sorted((folder / "saved").glob("*.arrow")), lambda: (row["text"] for row in loaded)
        stream = datasets.load_dataset("json", data_files=str(lines), split="train", streaming=True)
        yield "JSON lines, datasets", [lines], lambda: (row["text"] for row in stream)
    try:
        import webdataset
    except ImportError:
        print("webdataset is missing")
    else:
        with webdataset.TarWriter(str(folder / "a.tar")) as writer:
            for number, text in enumerate(rows):
                writer.write({"__key__": f"{number:07}", "txt": text})
        tar = str(folder / "a.tar")
        yield (
            "tar, webdataset",
            [folder / "a.tar"],
            lambda: (row["txt"] for row in webdataset.WebDataset(tar, shardshuffle=False).decode()),
        )
    try:
        from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
    except ImportError:
        print("array_record is missing")
    else:
        records = str(folder / "a.array_record")
        writer = ArrayRecordWriter(records, "group_size:64")
        for text in rows:
            writer.write(text.encode())
        writer.close()
        yield (
            "ArrayRecord, array_record",
            [Path(records)],
            lambda: (record.decode() for record in ArrayRecordReader(records).read_all()),
        )


def streaming_s(python: str, folder: Path, lines: Path) -> float:
    """Write MDS shards and return the seconds of mosaicml-streaming's reader, in its own environment."""
    command = [python, "-c", _STREAMING, str(folder / "mds")]
    subprocess.run([*command, str(lines)], check=True, capture_output=True)
    done = subprocess.run([*command, ""], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main(words: list[str] | None = None) -> int:
    """Print a table; return 1 where one of our readers has less than half of a library's speed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--streaming", help="the Python of an environment with mosaicml-streaming")
    args = parser.parse_args(words)
    rows = texts(args.megabytes * 1_000_000)
    total, ratios = sum(map(len, rows)), []
    print(f"{'':<28}{'ours':>10}{'theirs':>10}  MB/s of text")

    def told(name: str, own_s: float, their_s: float) -> None:
        ratios.append(their_s / own_s)
        print(f"{name:<28}{total / own_s / 1e6:>10.0f}{total / their_s / 1e6:>10.0f}")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for form, files, theirs in forms(folder, rows):
            own_s = best_s(lambda files=files: (text for file in files for text in ours(file)()), total)
            told(form, own_s, best_s(theirs, total))
        if args.streaming:
            their_s = streaming_s(args.streaming, folder, folder / "a.jsonl")
            shards = sorted((folder / "mds").glob("*.mds"))
            own_s = best_s(lambda: (row["text"] for path in shards for _, row in read_rows(path)), total)
            told("MDS, streaming", own_s, their_s)
    return int(min(ratios) < 0.5)


if __name__ == "__main__":
    sys.exit(main())
