"""Tokens a second from an S3 server on loopback beside those from the disk, and the memory that tokenizing takes.

    python -m bench.data_remote                  tokens/s, by turns; the text is the standard library's source files
    python -m bench.data_remote --memory 0.4 4   peak anonymous memory for as many GB of text, as bytes

The tokenizer is trained here, with a vocabulary of 32K or more. The server (moto) is a process of its own, and takes
its share of the cores. Needs the extra `dev`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from sppo_jax.config import DataConfig
from sppo_jax.data.sources.open_source import LIBRARY, find_files, load_corpus
from sppo_jax.data.tokens.encoding import Encoder, open_encoder

ROUNDS, VOCAB_SIZE, NUM_FILES = 5, 1 << 15, 8
_KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}


def documents() -> list[str]:
    """Return the source files of the standard library."""
    return [Path(str(file.path)).read_text("utf-8", "replace") for file in find_files(LIBRARY)[0]]


def write_tokenizer(path: Path, texts: list[str]) -> None:
    """Train a byte-level BPE of VOCAB_SIZE tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    )
    assert tokenizer.get_vocab_size() >= VOCAB_SIZE, tokenizer.get_vocab_size()
    tokenizer.save(str(path))


def write_lines(folder: Path, texts: list[str], num_bytes: int) -> None:
    """Write texts, over and over, as JSON lines in NUM_FILES files of about equal bytes."""
    folder.mkdir()
    lines = [(json.dumps({"text": text}) + "\n").encode() for text in texts]
    at = 0
    for number in range(NUM_FILES):
        with open(folder / f"{number}.jsonl", "wb") as file:
            while file.tell() < num_bytes // NUM_FILES:
                file.write(lines[at % len(lines)])
                at += 1


@contextlib.contextmanager
def server() -> Iterator[object]:
    """Start an S3 server with a bucket named bench; yield a file system on it."""
    from pyarrow import fs

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(_KEYS, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", AWS_EC2_METADATA_DISABLED="true")
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        files = fs.S3FileSystem(
            endpoint_override=f"127.0.0.1:{port}", scheme="http", region="us-east-1", allow_bucket_creation=True
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                files.create_dir("bench")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield files
    finally:
        process.terminate()
        process.wait()


def rates(source: str, tokenizer: Path, encoder: Encoder) -> tuple[float, float]:
    """Return tokens a second, and a CPU second of this process, from the first look at the source to a new entry."""
    with tempfile.TemporaryDirectory() as cache:
        config = DataConfig(source=source, tokenizer=str(tokenizer), cache=cache)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        corpus = load_corpus(config, source, lambda: encoder, vocab_size=encoder.num_ids)
        took_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        return corpus.num_tokens / took_s, corpus.num_tokens / cpu_s


def compare(folder: Path, megabytes: int) -> float:
    """Print tokens a second from both places; return that from the server over that from the disk."""
    from pyarrow import fs

    texts, tokenizer = documents(), folder / "tokenizer.json"
    write_tokenizer(tokenizer, texts)
    write_lines(folder / "in", texts, megabytes * 1_000_000)
    encoder = open_encoder(DataConfig(tokenizer=str(tokenizer)), vocab_size=1 << 20)
    found: dict[str, list[tuple[float, float]]] = {str(folder / "in"): [], "s3://bench/in": []}
    with server() as files:
        fs.copy_files(
            str(folder / "in"), "bench/in", source_filesystem=fs.LocalFileSystem(), destination_filesystem=files
        )
        rates(str(folder / "in"), tokenizer, encoder)  # warms up
        for number in range(ROUNDS):
            for source in list(found)[:: 1 if number % 2 else -1]:
                found[source].append(rates(source, tokenizer, encoder))
    print(
        f"vocabulary {encoder.num_ids:,}, {megabytes} MB of text, M tokens a second, and a CPU second of this process"
    )
    best = []
    for source, turns in found.items():
        for what, each in zip(("", "CPU"), zip(*turns, strict=True), strict=True):
            place = "disk" if source.startswith("/") else source
            print(f"{place:<16}{what:<4}" + "".join(f"{one / 1e6:>9.3f}" for one in each))
            best.append(max(each))
    print(f"S3 / disk, the best of each: {best[2] / best[0]:.3f}; of CPU seconds {best[3] / best[1]:.3f}")
    return best[2] / best[0]


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def peak_bytes(source: str, cache: str) -> tuple[int, int]:
    """Return the most anonymous memory above that at the start, and the number of documents."""
    config, peak, done = DataConfig(source=source, cache=cache), [0], threading.Event()
    encoder = open_encoder(config, vocab_size=1 << 20)
    start = _anonymous_bytes()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], _anonymous_bytes() - start)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    corpus = load_corpus(config, source, lambda: encoder, vocab_size=1 << 20)
    done.set()
    watcher.join()
    return peak[0], corpus.num_documents


def memory(folder: Path, gigabytes: list[float]) -> None:
    """Print the peaks of processes that tokenize as many GB of text; text and tokens are removed."""
    texts = documents()
    for size in gigabytes:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            write_lines(Path(name) / "in", texts, int(size * 1e9))
            words = [sys.executable, "-m", "bench.data_remote", "--peak", f"{name}/in", f"{name}/cache"]
            peak, count = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
        print(
            f"{size:g} GB of text, {count:,} documents: {peak / 2**20:.0f} MiB of anonymous memory above the start",
            flush=True,
        )


def main(words: list[str] | None = None) -> int:
    """Print tokens a second, or peaks of memory; return 1 where the server gives less than 0.9 of the disk's rate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=48, help="text to tokenize")
    parser.add_argument("--memory", type=float, nargs="+", metavar="GB", help="measure memory for as much text")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.peak:
        print(json.dumps(peak_bytes(*args.peak)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        if args.memory:
            memory(Path(name), args.memory)
            return 0
        return int(compare(Path(name), args.megabytes) < 0.9)


if __name__ == "__main__":
    sys.exit(main())
