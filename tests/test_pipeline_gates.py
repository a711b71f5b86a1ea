"""Attention with output gates, zero-centred norms and a partial rotation in the pipeline."""

from programs import Case, compare

GATED = dict(
    num_layers=4, head_dim=8, output_gate=True, unit_norm=True, qk_norm=True, rope={"theta": 1e3, "fraction": 0.25}
)


def test_gated_attention_has_the_dense_loss_and_gradients(request):
    stash = dict(places=("keep", "keep", "keep"))
    compare(
        Case(dict(chunks=(16, 8, 8), mesh=(1, 2, 2), kind="ring", **stash), GATED), seed=0, count=2, request=request
    )
