"""What a backward works on with the kernel for TPUs, against hand counts."""

from dataclasses import replace

from sppo_jax.config import ModelConfig
from sppo_jax.plan.parts import StashPlan
from sppo_jax.predict.fitted import NUMBERS
from sppo_jax.predict.memory import predict_memory
from sppo_jax.predict.shape import MemoryShape
from sppo_jax.predict.tpu_work import attention_bytes
from sppo_jax.schedule.generators import make_table

MODEL = ModelConfig(vocab_size=100, hidden_size=8, num_layers=4, num_heads=4, num_kv_heads=2, mlp_size=16)
ALONE = MemoryShape(model=MODEL, layers=2, seq=1, ulysses=1, compute_bytes=2, platform="tpu", kernel="pallas")
TOKENS = 8
# Queries and the output's cotangent in bfloat16, LSE and one more float32 a row; dQ in float32.
ROWS = TOKENS * 4
READ, DQ = ROWS * (2 * 2 * 2 + 2 * 4), ROWS * 2 * 4


def test_without_a_ring_there_are_the_rows_and_dq_of_each_core():
    assert attention_bytes(ALONE, TOKENS, 4) == READ + DQ
    assert attention_bytes(replace(ALONE, seq=2, ulysses=2, cores=2), TOKENS, 4) == READ + 2 * DQ


def test_a_ring_holds_what_comes_in_and_gradients_that_are_late():
    ring, keys = replace(ALONE, seq=2, cores=2), 4
    own = READ + 2 * DQ
    # Both dQ and dK and dV are sent and received; the kernel makes others of the latter meanwhile. Heads of 2 elements
    # are filled up to 128.
    queries_travel, keys_travel = READ + 2 * DQ, 2 * keys * 2 * 128 * (2 * 2 + 3 * 4)
    for ring_pass, travels in (("q", queries_travel), ("kv", keys_travel), ("auto", queries_travel)):
        assert attention_bytes(replace(ring, ring_pass=ring_pass), TOKENS, keys) == own + travels


def test_a_layer_in_a_loop_works_on_three_arrays_of_the_hidden_state():
    table = make_table("sppo", 1, 1, (TOKENS,) * 4)
    stash = StashPlan(alpha=(0.0,) * 4, inputs="keep", attention="keep", rest="recompute")

    def work(shape):
        return predict_memory(table, shape, stash).moments["attention"]["work"]

    in_loop = replace(ALONE, layers=4)
    double = replace(in_loop, model=replace(MODEL, num_heads=8, num_kv_heads=4, hidden_size=16))
    matrices, mlp = 14 * 8 * 16, 4 * TOKENS * 16 * 2
    assert work(in_loop) == attention_bytes(ALONE, TOKENS, 40) + 3 * TOKENS * 8 * 2 + matrices + mlp
    # Two layers are no loop. Hidden state, queries, and keys or values have 8, 8 and 4 elements.
    of_gpus = int(TOKENS * NUMBERS.token_arrays * (8 + 8 + 4) * 2)
    assert work(ALONE) == attention_bytes(ALONE, TOKENS, 40) + of_gpus + matrices + mlp
    assert work(double) == attention_bytes(double, TOKENS, 40) + 3 * TOKENS * 16 * 2 + 2 * matrices + mlp
