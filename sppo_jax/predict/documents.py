"""What a step takes where sequences hold several documents, which attend to themselves alone; imports no jax."""

from dataclasses import dataclass, replace

from sppo_jax.predict.costs import CostModel


@dataclass(frozen=True, kw_only=True)
class Documents:
    """How documents lie in sequences.

    Args:
        mean_tokens: tokens of a document, in the mean; a document that is cut counts as its pieces.
        attended: pairs of a query and a key within one document, relative to a sequence of one document; 0..1.
    """

    mean_tokens: float
    attended: float


def costs_of_documents(costs: CostModel, attended: float) -> CostModel:
    """Returns the seconds of units whose attention computes a share of its pairs of queries and keys.

    This is a first-order estimate: each chunk computes the same share, and a kernel skips no more than these pairs.

    Args:
        costs: the seconds of units of sequences of one document.
        attended: the share, 0..1.
    """
    attention = tuple(kind._replace(pair_flops=kind.pair_flops * attended) for kind in costs.attention)
    return replace(costs, attention=attention)
