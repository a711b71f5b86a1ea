"""Counts the bytes that travel on the ring in a scheduled HLO text, and what runs between their start and their end."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sppo_jax.fit.hlo.products import PRODUCT
from sppo_jax.fit.hlo.runs import runs_of
from sppo_jax.fit.hlo.shapes import total_bytes
from sppo_jax.fit.hlo.text import computations_of, holds, name_of
from sppo_jax.program.ring import HOP

_SENT = re.compile(r"= (.*?) collective-permute(?:-start)?\(")
_DONE = re.compile(r"= (.*?) collective-permute-done\(%([\w.\-]+)")
_KERNEL = re.compile(r"__cudnn|tpu_custom_call")


@dataclass(frozen=True, kw_only=True)
class RingHops:
    """Bytes that a device sends round the ring in one run of a program.

    Args:
        attention_bytes: of hops with a fused attention kernel between their start and their end.
        products_bytes: of hops with another matrix product there, and no such kernel.
        exposed_bytes: of all others.
    """

    attention_bytes: int = 0
    products_bytes: int = 0
    exposed_bytes: int = 0

    @property
    def all_bytes(self) -> int:
        """Bytes of all hops."""
        return self.attention_bytes + self.products_bytes + self.exposed_bytes


def ring_hops(hlo_text: str, turn_shares: Mapping[str, float] | None = None) -> RingHops:
    """Counts the hops of a compiled program; arguments as of `host_copies`."""
    computations, entry = computations_of(hlo_text)
    found: Counter[str] = Counter()
    for name, times in runs_of(computations, entry, f"/{HOP}/", turn_shares or {}).times:
        lines, begins = computations[name], {}
        for index, line in enumerate(lines):
            done = _DONE.search(line)
            if done and done[2] in begins:
                between = lines[begins[done[2]] + 1 : index]
                found[_beside(between, computations)] += times * total_bytes(done[1])
            elif f"/{HOP}/" in line and (sent := _SENT.search(line)):
                if "-start(" in line:
                    begins[name_of(line)] = index
                else:
                    found["exposed_bytes"] += times * total_bytes(sent[1])
    return RingHops(**{name: round(size) for name, size in found.items()})


def _beside(lines: list[str], computations: Mapping[str, list[str]]) -> str:
    for name, pattern in (("attention_bytes", _KERNEL), ("products_bytes", PRODUCT)):
        if any(holds(line, pattern, computations) for line in lines):
            return name
    return "exposed_bytes"
