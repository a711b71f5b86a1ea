"""Whether any plan fits is the same question with and without the fastest plan."""

import pytest
from report_cases import HOST, small_config

from sppo_jax.search.feasible import Feasibility
from sppo_jax.search.search import search

FREE = {"mesh": {"pipe": "auto"}}
SETTINGS = {
    "free": ("h100:1x4", FREE, 2**30),
    "two hosts": ("h100:2x4", FREE, 2**30),
    "given chunks": ("h100:1x4", {"mesh": {"pipe": 4}}, 2**30),
    "stash on the host": ("h100:1x4", FREE | {"stash": HOST}, 2**30),
    "breadth-first": ("h100:1x4", FREE | {"schedule": {"name": "breadth-first", "interleave": "auto"}}, 2**30),
    "tpu": ("v5e:2x2", FREE, 2**31),
}


@pytest.mark.parametrize(("cluster", "groups", "hbm_bytes"), SETTINGS.values(), ids=SETTINGS)
def test_what_fits_is_what_the_search_finds(cluster, groups, hbm_bytes):
    """Lengths on both sides of the longest one; whichever layouts are tried first."""
    answers, forms = set(), ()
    for length in (2**14, 2**19, 2**20, 3 * 2**19, 2**21, *[2**23] * cluster.startswith("h100")):
        settings = groups | {"sequence": {"length": length, "chunks": 8}, "hardware": {"hbm_bytes": hbm_bytes}}
        config = small_config(cluster, **settings)
        asked, again, found = Feasibility(config), Feasibility(config, first=forms), search(config)
        problem, forms = asked.problem(), again.forms
        assert (problem == "") == (again.found is not None) == found.fits
        assert found.fits or problem.startswith("no plan fits: the smallest plan is ")
        answers.add(found.fits)
    assert answers == {True, False}


def test_settings_that_allow_no_plan_are_an_error():
    with pytest.raises(ValueError, match="pipe"):
        Feasibility(small_config("h100:1x4", mesh={"pipe": 3}))


def test_chunks_that_the_kernel_for_tpus_refuses_do_not_fit():
    settings = FREE | {"sequence": {"length": 2**23, "chunks": 8}, "hardware": {"hbm_bytes": 2**31}}
    config = small_config("v5e:2x2", **settings)
    with pytest.raises(ValueError, match="at most 196608 pairs of blocks in a chunk, got") as no:
        search(config)
    assert Feasibility(config).problem() == str(no.value)
