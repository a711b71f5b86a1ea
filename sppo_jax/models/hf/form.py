"""In which of several forms a Hugging Face folder holds its tensors; imports no jax."""

from collections.abc import Collection
from typing import NamedTuple

from sppo_jax.models.hf.delta import JOINED_NAME, DeltaForm
from sppo_jax.models.hf.experts import ExpertsForm, form_of


class Form(NamedTuple):
    """The forms of a folder's tensors.

    Args:
        experts: of experts.
        delta: of the projections of Gated DeltaNet layers.
    """

    experts: ExpertsForm = "separate"
    delta: DeltaForm = "apart"


PLAIN = Form()


def folder_form(names: Collection[str], fused: ExpertsForm) -> Form:
    """Returns the form of a folder, by the names of its tensors; `fused` as in `hf_experts.form_of`."""
    joined = any(name.endswith(JOINED_NAME) for name in names)
    return Form(form_of(names, fused), "joined" if joined else "apart")
