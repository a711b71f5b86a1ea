"""Seconds of units on a virtual stage, of which all interleaves of a layout share what is worked out once."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from sppo_jax.predict.costs import CostModel
from sppo_jax.search.layouts import Layout
from sppo_jax.search.offload import Places
from sppo_jax.search.request import Request

RECOMPUTE: Places = ("recompute", "recompute", "recompute")
# Of each chunk its start, its tokens, and the tokens of its tick where these are more.
Chunks = tuple[tuple[int, int, int], ...]


class _Models(NamedTuple):
    """The costs of one layer, and of none without a ring; those of more layers are linear in these."""

    one: CostModel
    none: CostModel


class UnitTimes:
    """Seconds of units of the layouts of a request, keys and values kept."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._models: dict[tuple, _Models] = {}
        self._of_layers: dict[tuple, tuple[list[float], list[float]]] = {}
        self._overheads: dict[Layout, float] = {}

    def of_chunks(
        self, layout: Layout, places: Places, kind: str, chunks: Chunks, whole_waves: bool = True
    ) -> tuple[list[float], list[float]]:
        """Returns the seconds of each chunk's unit on a virtual stage, in a tick with ends and in one without.

        What ticks with ends take more does not depend on what is recomputed.

        Args:
            layout: the layout.
            places: of the stash.
            kind: "F", "B" or "H".
            chunks: the chunks.
            whole_waves: whether attention's last wave of queries counts as full, as the kernel has it.
        """
        models = self._models_of(layout, places, whole_waves)
        # What is recomputed changes the backwards alone.
        key = _sharing(layout), recomputed(places) if kind == "B" else (), whole_waves, kind, chunks
        if key not in self._of_layers:
            self._of_layers[key] = _of_one_and_none(models, kind, chunks)
        layers, (one_s, fixed_s) = layout.layers, self._of_layers[key]
        if kind == "H":
            return one_s, one_s
        with_ends = [fixed + layers * (unit - fixed) for fixed, unit in zip(fixed_s, one_s, strict=True)]
        if layout.interleave == 1:
            return with_ends, with_ends
        lengths = [tokens if tokens > padded else padded for _, tokens, padded in chunks]
        ends_s = {tokens: models.none.ends_s(kind, tokens) for tokens in set(lengths)}
        return with_ends, [unit - ends_s[tokens] for unit, tokens in zip(with_ends, lengths, strict=True)]

    def ring_s(self, layout: Layout, places: Places, kind: str, tokens: float, reach: int) -> float:
        """Returns the seconds in which a unit sends on the ring.

        Args:
            layout: the layout.
            places: of the stash.
            kind: "F" or "B".
            tokens: of the tick.
            reach: tokens of the sequence up to the end of the tick's furthest chunk.
        """
        one = self._models_of(layout, places, True).one
        sent = one.ring_bytes(kind, int(tokens / layout.mesh.seq), reach)
        return layout.layers * sent / one.cluster.link_bytes_s(layout.mesh.seq)

    def overhead_s(self, layout: Layout) -> float:
        """Returns the seconds of a step that belong to no tick."""
        if layout not in self._overheads:
            self._overheads[layout] = layout.costs(RECOMPUTE).step_overhead_s()
        return self._overheads[layout]

    def _models_of(self, layout: Layout, places: Places, whole_waves: bool) -> _Models:
        key = _sharing(layout), recomputed(places), whole_waves
        if key not in self._models:
            costs = layout.costs(places)
            if not whole_waves:
                device = replace(costs.cluster.device, attention_rows=0)
                costs = replace(costs, cluster=replace(costs.cluster, device=device))
            without_ring = replace(costs.ring, members=1)
            self._models[key] = _Models(replace(costs, layers=1), replace(costs, layers=0, ring=without_ring))
        return self._models[key]


def _of_one_and_none(models: _Models, kind: str, chunks: Chunks) -> tuple[list[float], list[float]]:
    """Returns what each chunk's unit takes with one layer, and what it takes besides its layers."""
    seconds, none = models.one.seconds_of[kind], models.none
    one_s = [seconds(*chunk) for chunk in chunks]
    if kind == "H":
        return one_s, one_s
    overhead_s, lengths = none.cluster.device.overhead_s, [max(chunk[1:]) for chunk in chunks]
    known = {tokens: none.transfer_s(kind, 0, tokens) + overhead_s for tokens in set(lengths)}
    return one_s, [known[tokens] for tokens in lengths]


def _sharing(layout: Layout) -> tuple:
    """Returns what the seconds of a layer depend on."""
    return layout.mesh, layout.weights, layout.request.optimizer, layout.split.ulysses, layout.split.ring


@lru_cache(maxsize=64)
def recomputed(places: Places) -> tuple[bool, ...]:
    """Returns what of places the seconds of units depend on."""
    return tuple(place == "recompute" for place in places)
