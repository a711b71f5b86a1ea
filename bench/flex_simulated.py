"""Flexible teams without devices: bytes that teams send, a published comparison, and what planning costs a run.

Parts of `flex.py`:

* `bytes`: bytes sent in windows of Wikipedia's documents (200 of padded rows, 20 of full ones), as a share of what a
  ring over all R members sends. The counts follow from the placements. Keys of the prefix, which a ring also sends, are
  left out on both sides.
* `published`: seconds of a step by the planner's costs for the merge of Seq1F1B and flexible teams, beside the ratios
  that InfiniPipe published (arXiv 2509.21275). Its lengths are not public: the corpora are guesses, so nothing here is
  judged. The stand-in for FlexSP pays for no ZeRO-3 gather, and A100s stand for A800s.
* `stall`: how long a loop of 200 steps waits for the loader. Each step of the loop is a sleep.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.flex_counts import Sent, forward_ticks, sent_bytes
from sppo_jax.config import config_from_dict
from sppo_jax.data.loader import Loader
from sppo_jax.data.rows.corpus import Corpus
from sppo_jax.data.rows.flex import FlexRows, window_pieces
from sppo_jax.data.rows.packing import PackedRows
from sppo_jax.data.rows.protocol import Batch
from sppo_jax.flex.cells import plan_cells, today
from sppo_jax.flex.lengths import Quantiles, corpora, sample_lengths, wikipedia
from sppo_jax.flex.of_plan import window_shape
from sppo_jax.flex.shape import WindowShape
from sppo_jax.search.make import costs_of, make_plan

SEVEN_B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 32,
    "mlp_size": 11008,
}
LENGTH, ROWS = 131_072, 16
# Windows of a row of results that a test computes again.
NUM_CHECKED = 3
# Share of each row that documents fill: rows with padding, which lets the planner deal whole documents, and full rows.
ROOMY = 0.985
# Windows of each share. Full rows take the planner four times as long and show one result.
WINDOWS = {ROOMY: 200, 1.0: 20}
PUBLISHED = {"over FlexSP, at most": 1.69, "over Seq1F1B, 96K": 1.40}
BATCH, NUM_BATCHES = 512, 4
STALL_STEPS, STALL_STEP_S = 200, 1.0
Say = Callable[[str], None]


def shape_of(
    *, pipe: int, seq: int, length: int, chunks: int, rows: int, kind: str, cluster: str = "a100-80g:2x8"
) -> WindowShape:
    """Returns the window of a plan of a model of seven billion parameters, with the planner's costs."""
    config = config_from_dict(
        {
            "model": SEVEN_B,
            "data": {"source": "recall"},
            "mesh": {"data": 1, "pipe": pipe, "seq": seq},
            "sequence": {
                "length": length,
                "chunks": chunks,
                "balance": "equal",
                "per_pipeline": rows,
                "split": kind,
                "groups": "flex",
            },
            "schedule": {"name": "seq1f1b", "interleave": 1, "wave": 1},
            "hardware": {"cluster": cluster},
            "train": {"steps": 1},
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of memory: the planner's costs alone are read
        plan = make_plan(config)
        return window_shape(plan, costs_of(plan, config))


def corpus_of(lengths: np.ndarray) -> Corpus:
    """Returns documents of some lengths whose tokens are all 0 and take no memory."""
    ends = np.cumsum(lengths)
    tokens = np.broadcast_to(np.int32(0), (int(ends[-1]),))
    return Corpus(parts=(tokens,), starts=ends - lengths, ends=ends, hashes=np.zeros(len(lengths)))


def wikipedia_rows(num_windows: int, fill: float) -> PackedRows:
    """Returns rows of Wikipedia's documents, at least so many windows."""
    count = int(1.1 * num_windows * ROWS * LENGTH / 1000) + 1000  # a document has about 1,000 tokens
    return PackedRows(
        corpus_of(sample_lengths(wikipedia(), count=count, seed=0, longest=LENGTH)), length=LENGTH, fill=fill
    )


def bytes_row(kind: str, fill: float, num_windows: int) -> dict[str, Any]:
    """Returns the bytes of some windows as shares, and the predicted gain."""
    shape = shape_of(pipe=2, seq=8, length=LENGTH, chunks=4, rows=ROWS, kind=kind)
    rows = wikipedia_rows(num_windows, fill)
    sizes = {"heads": 32, "kv_heads": 32, "head_dim": 128, "layers": 16}
    sent, ring = Sent(stream=kind, **sizes), Sent(stream="ring", **sizes)
    own, all_own, all_ring, gains, unchanged = 0, 0, 0, [], 0
    for number in range(num_windows):
        placement = plan_cells(window_pieces(rows, number, ROWS), shape)
        cells = placement.cells
        ticks = forward_ticks(cells.far, cells.level, shape)
        whole = ticks._replace(level=np.zeros_like(ticks.level), stream=np.ones_like(ticks.stream))
        own += sent_bytes(ticks, sent, shape.members)
        all_own += sent_bytes(whole, sent, shape.members)
        all_ring += sent_bytes(whole, ring, shape.members)
        gains.append(placement.costs["packed"] / placement.cost)
        unchanged += bool(cells.far.all())
    gain = statistics.mean(gains)
    return {
        "stream": kind,
        "fill": fill,
        "windows": num_windows,
        "share_of_ring": own / all_ring,
        "share_of_same_kind": own / all_own,
        "windows_all_stream": unchanged,
        "gain_mean": gain,
        "gain_least": min(gains),
        "gain_over_full_rows": gain * fill,
    }


def sent_shares(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Returns the bytes sent at each fill, with ring and Ulysses stream cells."""
    result = []
    for kind in ("ring", "ulysses"):
        for fill, num_windows in WINDOWS.items():
            result.append(bytes_row(kind, fill, num_windows))
            say(f"bytes: {kind}, {fill:.1%} full: {result[-1]['share_of_ring']:.1%} of a ring's")
    setting = f"7B, a100-80g:2x8, pipe 2, seq 8, {ROWS} rows of {LENGTH} tokens in 4 chunks"
    return {"setting": setting, "most_wanted": 0.5, "rows": result, "check": bytes_row("ring", ROOMY, NUM_CHECKED)}


def batch_seconds(lengths: np.ndarray, *, pipe: int, seq: int, length: int, chunks: int, groups: str) -> float:
    """Returns predicted seconds of a step that learns from a batch of documents.

    Args:
        lengths: of the documents.
        pipe, seq: the mesh of 32 devices on four hosts.
        length: tokens of a row.
        chunks: of a row.
        groups: "static" for full rows as packed today; "flex" for the better of these and of padded rows, rearranged.
    """
    found = []
    for fill in (1.0,) if groups == "static" else (1.0, ROOMY):
        rows = PackedRows(corpus_of(lengths), length=length, fill=fill)
        shape = shape_of(
            pipe=pipe, seq=seq, length=length, chunks=chunks, rows=len(rows), kind="ulysses", cluster="a100-80g:4x8"
        )
        pieces = window_pieces(rows, 0, len(rows))
        placement = today(pieces, shape) if groups == "static" else plan_cells(pieces, shape)
        found.append(placement.cost * shape.weights.unit_s)
    return min(found)


def published_row(corpus: str, longest: int, lengths: Quantiles, num_batches: int) -> dict[str, Any]:
    """Returns mean seconds of a batch for the merge, Seq1F1B and FlexSP's stand-in, each at its best chunks."""
    seconds: dict[str, dict[str, list[float]]] = {"merge": {}, "seq1f1b": {}, "flexsp": {}}
    most = int(longest * ROOMY)
    batches = [sample_lengths(lengths, count=BATCH, seed=seed, longest=most) for seed in range(num_batches)]

    def all_s(**setting: Any) -> list[float]:
        return [batch_seconds(batch, **setting) for batch in batches]

    for chunks in (2, 4, 8):
        mesh = {"pipe": 4, "seq": 8, "length": longest, "chunks": chunks}
        seconds["merge"][str(chunks)] = all_s(**mesh, groups="flex")
        seconds["seq1f1b"][str(chunks)] = all_s(**mesh, groups="static")
    for times in (2, 4, 8):  # rows of one chunk: FlexSP's micro-batches
        seconds["flexsp"][f"rows of {times}"] = all_s(pipe=1, seq=32, length=times * longest, chunks=1, groups="flex")
    best = {system: min(map(statistics.mean, own.values())) for system, own in seconds.items()}
    return {
        "corpus": corpus,
        "longest": longest,
        "seconds": seconds,
        "over_seq1f1b": best["seq1f1b"] / best["merge"],
        "over_flexsp": best["flexsp"] / best["merge"],
    }


def published(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Returns the merge beside InfiniPipe's published ratios."""
    rows = []
    for corpus in ("commoncrawl-assumed", "github-assumed"):
        for longest in (49_152, 98_304):
            rows.append(published_row(corpus, longest, corpora()[corpus], NUM_BATCHES))
            say(f"published: {corpus}, {longest} done")
    return {
        "kind": "simulation with the planner's costs; not judged",
        "setting": "7B, a100-80g:4x8, pipe 4, seq 8; FlexSP's stand-in: pipe 1, seq 32, one chunk a row",
        "published": PUBLISHED,
        "batches": NUM_BATCHES,
        "rows": rows,
    }


class TimedRows:
    """Rows that note the seconds that a thread spends on each window."""

    def __init__(self, rows: FlexRows | PackedRows) -> None:
        self._rows = rows
        self.row_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        begin_s = time.perf_counter()
        row = self._rows[index]
        self.row_s[int(index)] = time.perf_counter() - begin_s
        return row

    def window_s(self) -> list[float]:
        """Returns the seconds of each whole window that was read."""
        count = len(self.row_s) // ROWS
        return [sum(self.row_s.get(number * ROWS + row, 0.0) for row in range(ROWS)) for number in range(count)]


def waits(rows: TimedRows, steps: int, step_s: float) -> Iterator[float]:
    """Yields the seconds that each step waits for its batch."""
    loader = Loader(rows, num_sequences=ROWS, local_rows=range(ROWS))
    for _ in range(steps):
        begin_s = time.perf_counter()
        next(loader)
        yield time.perf_counter() - begin_s
        time.sleep(step_s)
    loader.close()


def stall(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Returns how long a loop waits for rearranged rows, and for the same rows as they are packed."""
    shape = shape_of(pipe=2, seq=8, length=LENGTH, chunks=4, rows=ROWS, kind="ulysses")
    result: dict[str, Any] = {"steps": STALL_STEPS, "step_s": STALL_STEP_S}
    for name, steps in (("flex", STALL_STEPS), ("packed", STALL_STEPS // 10)):
        packed = wikipedia_rows(STALL_STEPS, ROOMY)
        flex = FlexRows(packed, window=ROWS, shape=shape, per_step=ROWS)
        rows = TimedRows(flex if name == "flex" else packed)
        first, *others = waits(rows, steps, STALL_STEP_S)
        window_s = rows.window_s()
        result[name] = {
            "first_wait_s": first,
            "stall": sum(others) / (len(others) * STALL_STEP_S + sum(others)),
            "wait_ms_median": 1e3 * statistics.median(others),
            "wait_ms_most": 1e3 * max(others),
            "window_ms_median": 1e3 * statistics.median(window_s),
            "window_ms_most": 1e3 * max(window_s),
        }
        say(f"stall: {name} {result[name]['stall']:.2%}")
    result["predicted_step_s"] = plan_cells(window_pieces(packed, 0, ROWS), shape).cost * shape.weights.unit_s
    return result


PARTS = {"bytes": sent_shares, "published": published, "stall": stall}


def lines(result: dict[str, Any]) -> list[str]:
    """Returns the results of these parts in words."""
    found: list[str] = []
    if "bytes" in result:
        found += ["", f"bytes (counted from placements): {result['bytes']['setting']}"]
        found += ["| stream | full | share of a ring's | share of the same kind's | all stream | predicted gain |"]
        found += ["|---|---|---|---|---|---|"]
        found += [
            f"| {row['stream']} | {row['fill']:.1%} | {row['share_of_ring']:.1%} | {row['share_of_same_kind']:.1%} | "
            f"{row['windows_all_stream']} of {row['windows']} | {row['gain_mean']:.3f}, over full rows "
            f"{row['gain_over_full_rows']:.3f} |"
            for row in result["bytes"]["rows"]
        ]
    for row in result.get("published", {}).get("rows", ()):
        found += [
            f"simulated, not judged: {row['corpus']}, {row['longest']} tokens: over FlexSP's stand-in "
            f"{row['over_flexsp']:.2f} (published at most 1.69), over Seq1F1B {row['over_seq1f1b']:.2f} (1.40 at 96K)"
        ]
    if "stall" in result:
        own = result["stall"]
        found += [
            f"stall: {own['flex']['stall']:.2%} of {own['steps']} steps of {own['step_s']:g} s (packed "
            f"{own['packed']['stall']:.2%}); a window takes {own['flex']['window_ms_median']:.0f} ms in the loader's "
            f"threads (packed {own['packed']['window_ms_median']:.0f} ms)"
        ]
    return found
