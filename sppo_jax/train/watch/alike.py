"""All processes of a run read the same documents, and place them alike: checked once, before the first step.

Each process reads its own rows from its own files, and plans the teams of its documents by itself. Hosts whose files
differ would train on a mixture that no seed makes again. So the processes compare short texts before they begin: the
fingerprint of the data, which covers the lengths of all documents and the tokens of the first sequence, and a digest of
the next window's teams.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from sppo_jax.data.rows.flex import FlexRows
from sppo_jax.flex.placement import Placement
from sppo_jax.processes import distributed

if TYPE_CHECKING:
    from sppo_jax.train.setup import Experiment

_WHAT = ("read the same documents", "place documents alike")
_CHANGE = ("give every host the same files", "use one version of sppo_jax and numpy on all hosts")


def check_alike(experiment: Experiment) -> None:
    """Checks that all processes go on with the same documents in the same places; all processes must call it.

    Args:
        experiment: its loader stands at the batch that comes next.

    Raises:
        ValueError: the documents, or the teams of the next window, differ between processes; in every process.
    """
    rows, first = experiment.loader.rows, experiment.loader.state["sequence"]
    placed = ""
    if isinstance(rows, FlexRows):
        placed = digest(rows.placement(first // experiment.plan.num_sequences))
    posts = [text.split() for text in distributed.exchange(f"{experiment.data_fingerprint} {placed}".rstrip())]
    for number, texts in enumerate(zip(*posts, strict=True)):
        for process, text in enumerate(texts):
            if text != texts[0]:
                raise ValueError(
                    f"all processes must {_WHAT[number]}, got fingerprint {text} in process {process} and {texts[0]} "
                    f"in process 0; {_CHANGE[number]}"
                )


def digest(placement: Placement) -> str:
    """Returns a text that differs between placements that put any document elsewhere."""
    sums = hashlib.sha256()
    for name in ("row", "chunk", "degree", "member", "offset", "begin", "order"):
        sums.update(getattr(placement, name).astype("<i8").tobytes())
    return sums.hexdigest()[:16]
