"""The compiled kernel for TPUs: the stored figures, and with libtpu the compiler's own."""

import json
import subprocess
import sys

import pytest

from bench.tpu_kernel import CASES, RESULTS, SCORES
from bench.tpu_kernel_page import page
from bench.tpu_tokamax import CASES as TOKAMAX_CASES
from sppo_jax.hardware.tpu_chips import SPILLED, TPU_CHIPS, block_bytes, block_queries

MIB = 2**20
# Bundles of 1024 x 1024 scores of one head, forward and backward, of the first kernel that was compiled.
BUNDLES = {
    ("v5p", 128): (4380, 8548),
    ("v5p", 256): (7615, 18504),
    ("v6e", 128): (2767, 5249),
    ("v6e", 256): (2937, 5368),
    ("tpu7x", 128): (2800, 5567),
    ("tpu7x", 256): (3483, 4814),
}


@pytest.fixture(scope="module")
def rows():
    return json.loads(RESULTS.read_text())


def check(row):
    """Buffers are changed in place, no cache is copied, and blocks fit the memory of a core."""
    num_kv_heads, num_groups, head_dim = row["heads"]
    queries, keys = row["tokens"]
    itemsize = {"bfloat16": 2, "float32": 4}[row["sums"]]
    forward = 4 * num_kv_heads * num_groups * queries * (head_dim + 1)
    in_place = forward if row["kernel"] == "forward" else 2 * 4 * num_kv_heads * keys * head_dim * itemsize
    assert row["alias_mib"] >= in_place / MIB - 0.1, row["name"]
    assert row["cache_copies"] == 0, row["name"]
    assert row["vmem_mib"] * MIB <= TPU_CHIPS[row["chip"]].vmem_bytes, row["name"]
    wide = {"bfloat16": 2, "float32": 4}[row["dtype"]]
    planned = block_bytes(num_groups, head_dim, wide, queries=block_queries(queries, num_groups, wide))
    assert row["vmem_mib"] * MIB <= SPILLED * planned, row["name"]
    if row["kernel"] == "forward" and queries > 384:
        assert planned <= 1.1 * row["vmem_mib"] * MIB, row["name"]


def test_every_case_was_compiled_in_place_and_within_memory(rows):
    assert [row["name"] for row in rows] == [case.name for case in CASES]
    for row in rows:
        check(row)


def test_bundles_have_not_become_more(rows):
    found = {(row["chip"], row["heads"][2], row["kernel"]): row["bundles"] for row in rows[: len(SCORES)]}
    for (chip, head_dim), limits in BUNDLES.items():
        for kernel, limit in zip(("forward", "backward"), limits, strict=True):
            assert found[chip, head_dim, kernel] <= 1.03 * limit, (chip, head_dim, kernel)


def test_the_page_is_that_of_the_figures():
    written = RESULTS.with_suffix(".md").read_text()
    assert written == page(RESULTS.parent), "write the page again: python -m bench.tpu_kernel"


def test_tokamax_was_compiled_for_every_case_and_stands_beside_ours():
    theirs = json.loads(RESULTS.with_name("tpu_tokamax.json").read_text())
    assert [(row["chip"], row["head_dim"], row["kernel"]) for row in theirs] == TOKAMAX_CASES
    text = page(RESULTS.parent)
    one_core = [row for row in theirs if row["cores"] < row["cores_of_chip"]]
    assert {(row["chip"], row["kernel"]) for row in one_core} == {("v5p", "backward")}
    for row in theirs:
        assert f"| {row['chip']} | {row['head_dim']} | {row['kernel']} |" in text


@pytest.mark.slow
@pytest.mark.parametrize("words", [("v5p", "backward", "(1, 4, 128)", "65536"), ("v6e", "forward", "(1, 4, 256)")])
def test_the_compiler_says_the_same_today(tmp_path, rows, words):
    """Other versions of libtpu may need up to 6% more bundles."""
    pytest.importorskip("libtpu")
    subprocess.run([sys.executable, "-m", "bench.tpu_kernel", *words, "--to", tmp_path], check=True)
    (row,) = json.loads((tmp_path / RESULTS.name).read_text())
    check(row)
    (stored,) = (stored for stored in rows if stored["name"] == row["name"])
    assert row["bundles"] <= 1.06 * stored["bundles"]
