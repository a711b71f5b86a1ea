"""The kernel for TPUs, interpreted, against plain attention; and its own copies under late DMAs, for races."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from pallas_cases import GRAD_SLOT, PLACE, Case, draw_case, plain_backward, plain_forward

from sppo_jax.attention.intervals import Intervals
from sppo_jax.attention.pallas_blocks import Blocks, Target, choose_blocks
from sppo_jax.attention.tpu.backward import QueryRows, backward
from sppo_jax.attention.tpu.forward import Partial, forward
from sppo_jax.attention.tpu.pallas import with_blocks
from sppo_jax.hardware.tpu_chips import TPU_CHIPS, chip_of

NUM_KEYS = 1024
# Key-value heads, query heads of each, elements of a head; queries; blocks.
SHAPES = [
    ((2, 2, 64), 256, (128, 256, 128, 2)),
    ((1, 3, 128), 512, (256, 128, 128, 2)),
    ((3, 1, 80), 512, (512, 512, 256, 1)),
    ((1, 1, 128), 256, (256, 256, 128, 2)),  # one block of queries and one head for two cores
    ((2, 1, 256), 256, (256, 128, 256, 2)),  # and here each core has its own head
    ((2, 7, 128), 128, (128, 128, 128, 1)),
]


def of_shape(sizes) -> Blocks:
    return Blocks(*sizes, vmem_bytes=2**26)


@cache
def forward_program(blocks, interpret):
    def on_device(q, k, v, slot, intervals, state):
        meets = with_blocks(intervals, k.shape[-2], blocks)
        return forward(q, (k, v, (slot, PLACE[1])), meets, state, interpret=interpret)

    return jax.jit(on_device)


def run_forward(case: Case, blocks, intervals, state=None, interpret=True) -> Partial:
    return forward_program(blocks, interpret)(case.q, case.k, case.v, PLACE[0], intervals, state)


def run_backward(case: Case, blocks, interpret=True):
    def on_device(q, k, v, slot, intervals, rows, dk, dv):
        meets = with_blocks(intervals, k.shape[-2], blocks)
        sums = jnp.zeros((blocks.cores, *q.shape), jnp.float32), dk, dv
        keys, grads_at = (k, v, (slot, PLACE[1])), (GRAD_SLOT, PLACE[1])
        return backward(q, keys, meets, rows, sums, grads_at, interpret=interpret)

    rows = QueryRows(case.dout, case.lse, case.delta)
    return jax.jit(on_device)(case.q, case.k, case.v, PLACE[0], case.intervals, rows, case.dk, case.dv)


def in_two_parts(intervals: Intervals):
    return [Intervals(*(jnp.clip(x, *part) for x in intervals)) for part in ((0, 512), (512, NUM_KEYS))]


def check_forward(case: Case, blocks: Blocks):
    head_dim = case.q.shape[-1]
    want = plain_forward(case.q, *(x[PLACE][..., :head_dim] for x in (case.k, case.v)), case.seen)
    first, second = in_two_parts(case.intervals)
    whole = run_forward(case, blocks, case.intervals)
    for got in (whole, run_forward(case, blocks, second, run_forward(case, blocks, first))):
        for x, right in zip(got, want, strict=True):
            np.testing.assert_allclose(x, right, atol=2e-5)


def check_backward(case: Case, blocks: Blocks):
    dq, dk, dv = run_backward(case, blocks)
    want_q, *want = plain_backward(case)
    head_dim = case.q.shape[-1]
    np.testing.assert_allclose(dq.sum(0) * head_dim**-0.5, want_q, atol=1e-4)
    for got, before, more in zip((dk, dv), (case.dk, case.dv), want, strict=True):
        layer = PLACE[1]
        own, old = got[GRAD_SLOT, layer], before[GRAD_SLOT, layer]
        np.testing.assert_allclose(own[..., :head_dim], old[..., :head_dim] + more, atol=1e-4)
        np.testing.assert_array_equal(own[..., head_dim:], old[..., head_dim:])
        others = np.arange(before.shape[1]) != layer
        np.testing.assert_array_equal(got[:, others], before[:, others])


def check_seed(seed: int, shapes):
    with jax.default_matmul_precision("highest"):
        for heads, num_queries, sizes in shapes:
            case = draw_case(np.random.default_rng(seed), heads, num_queries, NUM_KEYS)
            check_forward(case, of_shape(sizes))
            check_backward(case, of_shape(sizes))


@pytest.mark.parametrize("seed,shapes", [(0, SHAPES[:2]), pytest.param(1, SHAPES[2:4], marks=pytest.mark.slow)])
def test_both_kernels_are_plain_attention(seed, shapes):
    check_seed(seed, shapes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 10))
def test_more_seeds(seed):
    check_seed(seed, SHAPES)


def check_races(num_cores: int, sizes):
    """Compares TPU interpret mode, where a DMA moves nothing until it is waited for, with the plain one, bit by bit."""
    rng = np.random.default_rng(0)
    lengths = [60, 340, 80, 32]  # a core comes back to a block of keys at once, or after one other
    begin = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    intervals = Intervals(jnp.array(begin, jnp.int32), jnp.array(np.arange(512) + 1, jnp.int32))
    case = draw_case(rng, (2, 1, 128), 512, 512)._replace(intervals=intervals)
    mode = pltpu.InterpretParams(
        dma_execution_mode="on_wait",
        detect_races=True,
        uninitialized_memory="nan",
        num_cores_or_threads=num_cores,
    )
    blocks = of_shape((*sizes, num_cores))
    state = run_forward(case, blocks, intervals)
    pairs = [
        (run_forward(case, blocks, intervals, state, interpret=mode), run_forward(case, blocks, intervals, state)),
        (run_backward(case, blocks, interpret=mode), run_backward(case, blocks)),
    ]
    for got, want in pairs:
        for x, right in zip(got, want, strict=True):
            np.testing.assert_array_equal(x, right)
    assert not races_found()


def races_found() -> bool:
    """Whether the last call in TPU interpret mode had a race; jax has no public name for it."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races.races_found


@pytest.mark.slow
def test_two_cores_and_late_copies_make_no_race():
    check_races(2, (128, 128, 128))


@pytest.mark.slow
@pytest.mark.parametrize("num_cores,sizes", [(1, (128, 128, 128)), (1, (256, 128, 128)), (2, (256, 128, 128))])
def test_more_cases_make_no_race(num_cores, sizes):
    check_races(num_cores, sizes)


@pytest.mark.parametrize(
    "num_groups,itemsize,tokens,want",
    [
        (4, 2, (8192, 65536), (1024, 512, 1024)),
        (4, 4, (8192, 65536), (512, 256, 512)),
        (7, 2, (4096, 36864), (512, 512, 512)),
        (1, 2, (384, 1152), (128, 128, 128)),
        (64, 2, (4096, 4096), (128, 512, 128)),
    ],
)
def test_blocks_divide_the_chunk_and_hold_so_many_rows(num_groups, itemsize, tokens, want):
    found = choose_blocks(Target(TPU_CHIPS["v5p"], num_groups, itemsize), *tokens)
    assert found == Blocks(*want, cores=2, vmem_bytes=56 * 2**20)


def test_queries_that_blocks_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="128 queries on a ring member, got 200; change the chunks to 128 or 256"):
        choose_blocks(Target(TPU_CHIPS["v5p"], 1, 2), 200, 1024)
    with pytest.raises(ValueError, match="128 keys on a ring member, got 1000; change the chunks to 896 or 1024, "):
        choose_blocks(Target(TPU_CHIPS["v5p"], 1, 2), 256, 1000)


def test_a_chip_without_the_kernel_is_named():
    assert chip_of("TPU v6 lite").cores == 1
    with pytest.raises(ValueError, match="must run on v5e, v5p, v6e, tpu7x, got TPU v4; use model.kernel=blockwise"):
        chip_of("TPU v4")
