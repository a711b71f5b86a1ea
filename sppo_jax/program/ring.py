"""What travels on the ring in a tick: the prefix's keys and values, or the chunk's queries, and how many bytes that is.

The ring itself is `attention/spreading/ring.py`. Its hops are counted here, so that what the planner charges is what
the program sends: with R members, what comes home makes R hops and what need not come home makes R - 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sppo_jax.plan.parts import cache_head_dim
from sppo_jax.rules import KERNEL_TILE

# The scope of what is sent round the ring, which the text of a compiled program has.
HOP = "ring_hop"


def travelling_keys(window: int, queries: int) -> int:
    """Returns the keys of a ring member that the windows of a chunk's queries reach.

    Args:
        window: keys of a member that a query sees.
        queries: the chunk's queries on one member.
    """
    return window + queries


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Attention of one device after the all-to-all.

    Args:
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_dim: elements of a head.
        itemsize: bytes of an element in the compute dtype.
        window: keys of a ring member that a query sees, besides which those of its chunk alone travel; 0: all travel.
        is_tail: whether a member has no keys but these, in front of its chunk: all of them travel from the start.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    window: int = 0
    is_tail: bool = False

    @property
    def layer_types(self) -> "tuple[tuple[AttentionShape, int], ...]":
        """The shape of each layer type, and the share of its layers: of all layers this one."""
        return ((self, 1),)

    @property
    def sum_bytes(self) -> int:
        """Bytes of an element of a sum: float32 at least."""
        return max(4, self.itemsize)


@dataclass(frozen=True)
class MixedShape:
    """Attention of one device in layers of several types, in the mean of all layers.

    Args:
        layer_types: the attention of each type, and the share of its layers.
    """

    layer_types: tuple[tuple[AttentionShape, float], ...]

    @property
    def sum_bytes(self) -> int:
        """Bytes of an element of a sum, which all types have in common."""
        return self.layer_types[0][0].sum_bytes


def mixed_shape(shapes: Sequence[tuple[AttentionShape, int]], without: int = 0) -> AttentionShape | MixedShape:
    """Returns the attention of layers of which so many have each shape, and some none; of these nothing travels."""
    if not shapes:
        return AttentionShape(num_heads=0, num_kv_heads=0, head_dim=0, itemsize=0)
    if len({shape for shape, _ in shapes}) == 1 and not without:
        return shapes[0][0]
    total = sum(count for _, count in shapes) + without
    return MixedShape(tuple((shape, count / total) for shape, count in shapes))


@dataclass(frozen=True)
class RingPasses:
    """What travels in a tick.

    Args:
        forward: "kv" or "q", in a forward, or in a backward that computes its forward again.
        backward: the same for a backward.
        bound: keys of a member's buffer that travel where "kv" does.
    """

    forward: str = "q"
    backward: str = "q"
    bound: int = 0


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The ring of a plan.

    Args:
        members: devices on the ring.
        ulysses: devices over which heads are spread.
        length: tokens of a sequence.
        asked: "kv" or "q" for every tick, or "auto" for the fewer bytes, tick by tick.
        kernel: the attention kernel; their backwards ask for different arrays.
        shape: attention of one device.
    """

    members: int
    ulysses: int
    length: int
    asked: str
    kernel: str
    shape: AttentionShape | MixedShape

    def passes(self, tokens: int, reach: int) -> RingPasses:
        """Returns what travels in a tick.

        Args:
            tokens: of the tick on one device, padding included.
            reach: tokens of the sequence up to the end of the tick's furthest chunk.
        """
        if self.members == 1:
            return RingPasses()
        bound = self.bound(reach)
        forward = self._fewer(self.forward_bytes("kv", tokens, bound), self.forward_bytes("q", tokens, bound))
        backward = self._fewer(self.backward_bytes("kv", tokens, bound), self.backward_bytes("q", tokens, bound))
        return RingPasses(forward, backward, bound if "kv" in (forward, backward) else 0)

    def forward_bytes(self, passes: str, tokens: int, bound: int, *, windows: bool = False) -> float:
        """Returns the bytes that a device sends in one layer's forward.

        Args:
            passes: "kv" or "q".
            tokens: of the tick on one device.
            bound: keys of a member's buffer that travel.
            windows: whether layers with a window alone count.
        """
        hops = self.members - 1

        def sent(shape: AttentionShape) -> int:
            if windows and not shape.window:
                return 0
            if passes == "kv":
                return hops * self._elements(shape, bound, tokens) * shape.itemsize
            rows = tokens * self.ulysses * shape.num_heads
            result = shape.sum_bytes * (shape.head_dim + 1)  # output and LSE
            return rows * (hops * shape.head_dim * shape.itemsize + self.members * result)

        return sum(share * sent(shape) for shape, share in self.shape.layer_types)

    def backward_bytes(self, passes: str, tokens: int, bound: int) -> float:
        """Returns the bytes that a device sends in one layer's backward; arguments as `forward_bytes`."""
        hops = self.members - 1

        def sent(shape: AttentionShape) -> int:
            if passes == "kv":
                travels = hops * shape.itemsize + self.members * shape.sum_bytes
                return self._elements(shape, bound, tokens) * travels
            rows = tokens * self.ulysses * shape.num_heads
            # cuDNN's kernel asks for the whole output, the others for its product with the cotangent alone.
            summary = shape.head_dim * shape.itemsize if self.kernel == "cudnn" else shape.sum_bytes
            travels = 2 * shape.head_dim * shape.itemsize + shape.sum_bytes + summary  # q, dout, LSE and the summary
            return rows * (hops * travels + self.members * shape.head_dim * shape.sum_bytes)

        return sum(share * sent(shape) for shape, share in self.shape.layer_types)

    def _elements(self, shape: AttentionShape, bound: int, tokens: int) -> int:
        """Returns the elements of keys and values that travel."""
        keys = bound
        if shape.window:
            reached = travelling_keys(shape.window, tokens * self.ulysses)
            keys = reached if shape.is_tail else min(bound, reached)
        return 2 * keys * shape.num_kv_heads * cache_head_dim(self.kernel, shape.head_dim)

    def bound(self, reach: int) -> int:
        """Returns the keys of a member that may travel: a power-of-two share of a sequence, so that shapes are few."""
        multiple = self.members * (math.lcm(self.ulysses, KERNEL_TILE) if self.kernel == "pallas" else self.ulysses)
        bound = self.length
        while bound % 2 == 0 and bound // 2 >= reach and bound // 2 % multiple == 0:
            bound //= 2
        return bound // self.members

    def _fewer(self, kv_bytes: float, q_bytes: float) -> str:
        if self.asked != "auto":
            return self.asked
        return "kv" if kv_bytes <= q_bytes else "q"
