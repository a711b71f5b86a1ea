"""cuDNN's workspace by hand."""

from sppo_jax.config import ModelConfig
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.workspace import backward_bytes, workspace_bytes

MIB = 2**20
LLAMA = ModelConfig(vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, mlp_size=14336)


def test_one_call_by_hand():
    call = dict(num_heads=32, head_dim=128, queries=32768, keys=32768, compute_bytes=2)
    # dQ in float32: 4 x 32 x 32768 x 128 = 512 MiB; the row sums 4 MiB.
    assert backward_bytes(num_kv_heads=32, **call) == 516 * MIB
    # dK and dV of 32 heads in bfloat16: 2 x 256 MiB.
    assert backward_bytes(num_kv_heads=8, **call) == (516 + 512) * MIB
    half = {**call, "queries": 16384}
    assert backward_bytes(num_kv_heads=8, **half) == (258 + 512) * MIB


def test_the_call_of_a_plan():
    alone = MemoryShape(model=LLAMA, layers=2, seq=1, ulysses=1, compute_bytes=2, kernel="cudnn")
    assert workspace_bytes(alone, 32768, 2**20) == (516 + 512) * MIB
    # Eight devices under ulysses: 4 heads each, all tokens of the tick; one key-value head, so GQA stays.
    eight = MemoryShape(model=LLAMA, layers=2, seq=8, ulysses=8, compute_bytes=2, kernel="cudnn")
    assert workspace_bytes(eight, 4096, 2**20) == (516 + 512) * MIB // 8
    # A chunk without a past: the keys are its own.
    assert workspace_bytes(alone, 131072, 131072) == 4 * (516 + 512) * MIB
    assert workspace_bytes(MemoryShape(model=LLAMA, layers=2, seq=1, ulysses=1, compute_bytes=2), 32768, 2**20) == 0


def test_blocks_of_queries_take_less():
    """One H100: a call of 8192 queries took 641 MiB by this formula where one of 32768 took 1028."""
    alone = MemoryShape(model=LLAMA, layers=2, seq=1, ulysses=1, compute_bytes=2, kernel="cudnn", backward_queries=8192)
    assert workspace_bytes(alone, 32768, 2**20) == (129 + 512) * MIB
    assert workspace_bytes(alone, 131072, 131072) == (129 + 512) * MIB
    # Two blocks of 6144; a chunk shorter than a block is one.
    assert workspace_bytes(alone, 12288, 2**20) == 129 * MIB * 3 // 4 + 512 * MIB
    assert workspace_bytes(alone, 4096, 2**20) == 129 * MIB // 2 + 512 * MIB
