"""The plan of a run has as many documents in a sequence as the sequences that the run reads, all of them looked at."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from exactness import small_plan

from sppo_jax.flex.choose import with_teams
from sppo_jax.train.one_document import for_documents

ONE, SEVERAL = (SimpleNamespace(has_one_document=found) for found in (True, False))


@pytest.mark.parametrize("before", ["many", "one"])
@pytest.mark.parametrize(("data", "after"), [(ONE, "one"), (SEVERAL, "many")])
def test_the_data_decide(before, data, after):
    plan = small_plan((8, 8), mesh=(1, 1, 2), sequence_documents=before)
    plan = replace(plan, reasons={"mesh": "asked", **({"sequence_documents": "asked"} if before == "one" else {})})
    found = for_documents(plan, data)
    assert found == replace(plan, sequence_documents=after, reasons=found.reasons) and found.reasons["mesh"] == "asked"
    assert ("sequence_documents" in found.reasons) == (after == "one")
    assert with_teams(found, 1.0).sequence_documents == after
    teams = with_teams(found, 1.5)
    assert (teams.groups, teams.sequence_documents) == ("flex", "many") and "sequence_documents" not in teams.reasons
    assert for_documents(teams, data) == teams
