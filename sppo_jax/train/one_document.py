"""Whether the sequences that a run reads hold one document each: their attention then has no loop over documents."""

import dataclasses

from sppo_jax.data.open import Data
from sppo_jax.plan.plan import Plan
from sppo_jax.search.because import Because


def for_documents(plan: Plan, data: Data) -> Plan:
    """Returns the plan for as many documents in a sequence as the sequences have, all of them looked at.

    Args:
        plan: made before the sequences were known.
        data: what is read with the plan.
    """
    others = {name: reason for name, reason in plan.reasons.items() if name != "sequence_documents"}
    if not data.has_one_document or plan.groups == "flex":
        return dataclasses.replace(plan, sequence_documents="many", reasons=others)
    if plan.has_one_document:
        return plan
    why = Because.ONE_DOCUMENT(what="all that are read do, which the planner did not know")
    return dataclasses.replace(plan, sequence_documents="one", reasons=others | {"sequence_documents": why})
