"""FlexSP's cost model with the released constants."""

import numpy as np
import pytest

from sppo_jax.flex.flexsp.costs import MODELS, flexsp_costs
from studies.flexsp_cells import part_of_cluster


def test_a_group_takes_what_the_released_code_says():
    costs = flexsp_costs(MODELS["7b"])
    seconds = costs.fixed_ns + costs.times_KD(np.array([8192, 4096])).sum(axis=0)
    expected = []
    for degree, bandwidth in zip((2, 4, 8, 16, 32, 64), (119.54, 104.07, 96.5, 10.33, 5.94, 4.87), strict=True):
        compute = sum(5.128e-6 * s**2 + 183.9576e-3 * s for s in (8192, 4096)) / degree + 629.3563
        exchange = 4 * 2 * 32 * 4096 * 12288 * 2 / 1024 / 1024 / degree / bandwidth
        expected.append((compute + exchange) * 1e6)
    np.testing.assert_allclose(seconds, expected, rtol=1e-8)


@pytest.mark.parametrize(
    "model, kilotokens, tokens", [("7b", 192, 6449), ("7b", 384, 6407), ("13b", 192, 6483), ("30b", 384, 6538)]
)
def test_memory_limits_the_tokens_of_a_device(model, kilotokens, tokens):
    costs = flexsp_costs(MODELS[model], max_kilotokens=kilotokens)
    assert costs.device_tokens == tokens and costs.cluster_tokens == 64 * tokens
    assert costs.tokens_D().tolist() == [degree * tokens for degree in (2, 4, 8, 16, 32, 64)]


def test_parameters_grow_with_the_longest_document():
    model = MODELS["13b"]
    assert model.billions(192) == model.billions_192k and model.billions(384) == model.billions_384k
    assert model.billions(288) == pytest.approx((model.billions_192k + model.billions_384k) / 2)


def test_degree_1_is_excluded_and_a_part_keeps_the_limits():
    costs = flexsp_costs(MODELS["7b"])
    part = part_of_cluster(costs, 8)
    assert costs.degrees == (2, 4, 8, 16, 32, 64) and part.degrees == (2, 4, 8)
    assert part.device_tokens == costs.device_tokens
    lengths = np.array([100, 30_000])
    assert part.times_KD(lengths).tolist() == costs.times_KD(lengths)[:, :3].tolist()


def test_wrong_clusters_are_refused():
    with pytest.raises(ValueError, match="num_devices must be one of 2, 4, 8, 16, 32, 64, got 48"):
        flexsp_costs(MODELS["7b"], num_devices=48)
    with pytest.raises(ValueError, match="less than 30 GB a device, got .* GB for GPT-30B on 8 devices"):
        flexsp_costs(MODELS["30b"], num_devices=8)
    with pytest.raises(ValueError, match="num_devices must be one of the degrees .*, got 3"):
        part_of_cluster(flexsp_costs(MODELS["7b"]), 3)
