"""FLOPs of products, read off a compiled schedule."""

import pytest

from sppo_jax.fit.hlo.products import Products

LINES = {
    "gemm": [
        "%a = bf16[4,8]{1,0} parameter(0)",
        "%b = bf16[8,16]{1,0} parameter(1)",
        "ROOT %c = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    ],
    "layers": ["%g = f32[4,16]{1,0} fusion(%x, %y), kind=kCustom, calls=%gemm", "%h = f32[4,16] add(%g, %g)"],
    "nothing": [],
}
ONE = 2 * 4 * 8 * 16


@pytest.mark.parametrize(
    "line, times",
    [
        ("%f = f32[4,16]{1,0} fusion(%x, %y), kind=kCustom, calls=%gemm", 1),
        ('%w = (s32[]) while(%t), condition=%c, body=%layers, backend_config={"known_trip_count":{"n":"7"}}', 7),
        ("%w = (s32[]) while(%t), condition=%c, body=%layers", 1),
        ("%k = f32[4,16] conditional(%i, %x, %y), branch_computations={%layers, %gemm}", 1),
        ("%k = f32[4,16] conditional(%i, %x, %y), true_computation=%layers, false_computation=%nothing", 0),
        ("%s = f32[4,16] add(%x, %y)", 0),
    ],
)
def test_counts_products_at_any_depth(line, times):
    assert Products(LINES).flops([line]) == times * ONE


def test_counts_the_products_of_a_library():
    call = (
        '%c = (f32[4,16]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", metadata={}, '
        'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
    )
    assert Products(LINES).flops([call]) == ONE


@pytest.mark.parametrize(
    ("a", "b", "labels", "times"),
    [
        ("4,8", "8,16", "dim_labels=bf_io->bf", 1),
        ("8,4", "16,8", "dim_labels=fb_oi->bf", 1),
        ("4,2,4", "2,4,16", "window={size=2}, dim_labels=b0f_0io->bf", 1),
        ("4,8", "8,16", "window={size=2 stride=2 lhs_dilate=2}, dim_labels=bf_io->bf", 0),
    ],
)
def test_counts_the_convolutions_that_are_the_products_of_a_tpu(a, b, labels, times):
    """Of a product of several matrices the FLOPs would be too many, so that counts nothing."""
    lines = {
        "fused": [
            f"%a = bf16[{a}]{{1,0:T(8,128)}} parameter(0)",
            f"%b = bf16[{b}]{{1,0:T(8,128)}} parameter(1)",
            f"ROOT %c = f32[4,16]{{1,0:T(8,128)}} convolution(%a, %b), {labels}",
        ]
    }
    assert Products(lines).flops(["%f = f32[4,16]{1,0} fusion(%x, %y), kind=kOutput, calls=%fused"]) == times * ONE
