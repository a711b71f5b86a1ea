"""Measured figures as JSON: written, read back, and refused where they do not hold together."""

import json
from dataclasses import replace

import pytest

from sppo_jax.attention import blockwise
from sppo_jax.hardware.attention_rates import AttentionCall
from sppo_jax.hardware.measured_figures import (
    BLOCK,
    AttentionFigure,
    MatmulFigure,
    Profile,
    block_pairs,
    read_profile,
    write_profile,
)

ATTENTION = AttentionFigure(chunk_tokens=512, prefix_tokens=0, forward_s=0.1, backward_s=0.2, flops_s=3e9)
PROFILE = Profile(
    device="cpu",
    jax="0.10.2",
    date="2026-11-21",
    dtype="float32",
    kernel="blockwise",
    num_devices=1,
    matmul_flops_s=5e10,
    layer_flops_s=4e10,
    matmul=(MatmulFigure(rows=8, inner=16, columns=32, flops_s=5e10),),
    attention=(
        ATTENTION,
        AttentionFigure(chunk_tokens=256, prefix_tokens=4096, forward_s=0.1, backward_s=0.2, flops_s=4e9),
        AttentionFigure(chunk_tokens=512, prefix_tokens=4096, forward_s=0.1, backward_s=0.2, flops_s=5e9),
    ),
    host_link_bytes_s=None,
    link_bytes_s=1e9,
    hbm_bytes_s=2e10,
    overhead_s=0.0,
    overhead_tokens=4.5,
)


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "profile.json"
    write_profile(PROFILE, path)
    assert read_profile(path) == PROFILE


def test_attention_counts_by_its_best_chunk_over_the_longest_prefix():
    assert PROFILE.attention_flops_s == 5e9


def test_rates_come_from_a_list_of_calls_and_in_older_files_from_chunks(tmp_path):
    # Of 300 ms forward and backward, 100 are the forward's, which has 2 of the 7 products; cuDNN's pairs count as such.
    older = replace(PROFILE, kernel="cudnn")
    assert older.attention_rates.flops_s("forward", 512, 4608) == pytest.approx(5e9 * 3 * 2 / 7)
    assert older.attention_rates.flops_s("backward", 256, 4352) == pytest.approx(4e9 * 1.5 * 5 / 7)
    # The blockwise kernel computes whole blocks of keys: 4608 instead of 4096 + 256 of each query.
    blocks = PROFILE.attention_rates.flops_s("forward", 512, 4608)
    assert blocks == pytest.approx(5e9 * 3 * 2 / 7 * 4608 / (4096 + 256))
    calls = (
        AttentionCall(way="forward", queries=8192, keys=32768, flops_s=577e12),
        AttentionCall(way="backward", queries=32768, keys=32768, flops_s=487e12),
    )
    path = tmp_path / "profile.json"
    write_profile(replace(older, attention_calls=calls), path)
    found = read_profile(path).attention_rates
    assert (found.flops_s("forward", 512, 4608), found.flops_s("backward", 512, 4608)) == (577e12, 487e12)
    # Files of before have no such list.
    values = json.loads(path.read_text())
    del values["attention_calls"]
    path.write_text(json.dumps(values))
    assert read_profile(path) == older


@pytest.mark.parametrize(
    "start, tokens, pairs",
    [(0, 512, 512 * 512), (0, 1024, 3 * 512 * 512), (512, 128, 128 * 1024), (0, 513, 3 * 512 * 512), (100, 8, 8 * 512)],
)
def test_pairs_in_whole_blocks(start, tokens, pairs):
    assert block_pairs(start, tokens, 512) == pairs


@pytest.mark.parametrize("start, tokens, window", [(0, 64, 8), (64, 32, 8), (40, 24, 1), (40, 24, 17), (48, 16, 999)])
def test_pairs_in_whole_blocks_of_a_window(start, tokens, window):
    """Each block of queries computes the blocks of keys that any of its queries attends to."""
    rows = [range(row, row + 8) for row in range(start, start + tokens, 8)]
    visited = [{key // 8 for row in block for key in range(max(0, row - window + 1), row + 1)} for block in rows]
    assert block_pairs(start, tokens, 8, window) == 8 * 8 * sum(map(len, visited))


def test_the_block_is_the_kernels():
    assert BLOCK == blockwise.BLOCK_Q == blockwise.BLOCK_K
    assert PROFILE.attention_block == BLOCK


CALL = {"way": "forward", "queries": 8, "keys": 8, "flops_s": 1e12}


def edited(**changes):
    values = json.loads(json.dumps(PROFILE, default=vars))
    values.update(changes)
    return {key: value for key, value in values.items() if value != "drop"}


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"hbm_bytes_s": "drop"}, "the file lacks hbm_bytes_s"),
        ({"speed": 1}, "the file has an unknown speed"),
        ({"schema_version": 7}, "schema_version must be 1 or 2, got 7"),
        ({"matmul_flops_s": 0}, "matmul_flops_s must be a positive number, got 0"),
        ({"overhead_s": -1.0}, "overhead_s must be a positive number, got -1.0"),
        ({"layer_flops_s": float("nan")}, "layer_flops_s must be a positive number, got nan"),
        ({"hbm_bytes_s": True}, "hbm_bytes_s must be a positive number, got True"),
        ({"hbm_bytes_s": None}, "hbm_bytes_s must be a positive number, got None"),
        ({"device": 3}, "device must be text, got 3"),
        ({"attention": []}, r"attention must be a list of figures, got \[\]"),
        ({"attention": [1]}, r"attention\[0\] must be an object, got 1"),
        ({"matmul": [{"rows": 8}]}, r"the file lacks matmul\[0\].columns"),
        ({"attention_calls": 3}, "attention_calls must be a list of figures, got 3"),
        (
            {"attention_calls": [{**CALL, "way": "up"}]},
            r"attention_calls\[0\].way must be forward or backward, got 'up'",
        ),
        (
            {"attention_calls": [{**CALL, "queries": 9}]},
            r"attention_calls\[0\] must have at least as many keys as .* 8 keys and 9 queries",
        ),
        ({"attention_calls": [{**CALL, "keys": 0}]}, r"attention_calls\[0\].keys must be a positive number, got 0"),
        ({"attention_calls": [CALL]}, "attention_calls must have calls of both ways, got none backward"),
        (
            {"attention": [{**vars(ATTENTION), "forward_s": "fast"}]},
            r"attention\[0\].forward_s must be a positive number, got 'fast'",
        ),
    ],
)
def test_figures_that_do_not_hold_together_are_refused(tmp_path, changes, why):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(edited(**changes)))
    with pytest.raises(ValueError, match=f"{why}; make the file again with sppo profile") as error:
        read_profile(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\x00"])
def test_text_that_is_no_profile_is_refused(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(
        ValueError, match="must be what sppo profile or sppo check wrote, got .*make the file again with sppo profile"
    ):
        read_profile(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read \(FileNotFoundError\)"):
        read_profile(tmp_path / "nothing.json")
    with pytest.raises(ValueError, match="cannot be read"):
        read_profile(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"cannot be read \(UnicodeDecodeError\)"):
        read_profile(tmp_path / "binary.json")
