"""Processes whose documents, or whose teams, differ do not begin."""

from types import SimpleNamespace

import numpy as np
import pytest
from flex_cases import draw_sizes, make_shape, pack

from sppo_jax.data.rows.flex import FlexRows
from sppo_jax.flex.baselines import baselines
from sppo_jax.processes import distributed
from sppo_jax.train.watch.alike import check_alike, digest


def placements():
    shape = make_shape(4, (64, 64), ring=4, stages=1, hidden=1)
    pieces = pack(draw_sizes(np.random.default_rng(0), "tail", shape), shape, 0.9)
    return {name: way.windows[0] for name, way in baselines(pieces, shape).items() if name != "static"}


def experiment(placement=None):
    rows = object()
    if placement is not None:
        rows = FlexRows.__new__(FlexRows)
        rows.placement = lambda number: placement
    loader = SimpleNamespace(rows=rows, state={"sequence": 8})
    return SimpleNamespace(loader=loader, plan=SimpleNamespace(num_sequences=4), data_fingerprint="abc")


def test_a_digest_tells_placements_apart():
    found, again = placements(), placements()
    assert digest(found["packed"]) != digest(found["flex"]) == digest(again["flex"])
    found["flex"].offset[-1] += 1
    assert digest(found["flex"]) != digest(again["flex"])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("abd {}", "read the same documents, got fingerprint abd in process 1 and abc"),
        ("abc x", "place documents alike"),
    ],
)
def test_a_process_that_differs_is_named(other, words, monkeypatch):
    own = placements()["flex"]
    monkeypatch.setattr(distributed, "exchange", lambda text: [text, other.format(digest(own))])
    with pytest.raises(ValueError, match=words):
        check_alike(experiment(own))
    monkeypatch.setattr(distributed, "exchange", lambda text: [text, text])
    check_alike(experiment(own))
    check_alike(experiment())
