"""What the experts of one layer work on and move on one device, beside their share of `LayerCosts.linear_flops`.

`models.moe.grouped` says how the products are made. On GPUs and CPUs every tile is computed that any router may need,
and each lot of tiles copies the arrays of its experts. On TPUs products are ragged, and nothing is padded or copied.

Letters as there: P pairs of a token and an expert, D hidden size, E experts, F size of an expert.
"""

from dataclasses import dataclass

from sppo_jax.config import ModelConfig
from sppo_jax.models.moe.tiles import num_tiles, tile_sizes

_FLOAT32 = 4
# How often D and F elements of a row are read or written, and how often the arrays of a tile's expert are. On tiles,
# gate and up are one product, and so are their gradients; ragged products are two. A backward on tiles copies the
# arrays, reads gate and up twice and down once, and writes and reads their gradients.
_OF_TILES = {"F": (6, 6, 2), "B": (11, 17, 1 + 5 / 3 + 2)}
_RAGGED = {"F": (7, 6, 0), "B": (15, 18, 0)}


@dataclass(frozen=True)
class ExpertWork:
    """The experts of a layer.

    Args:
        count: experts of the layer.
        chosen: experts of a token.
        hidden: D.
        size: F.
        is_tiled: whether products are those of tiles.
    """

    count: int
    chosen: int
    hidden: int
    size: int
    is_tiled: bool

    @property
    def _matrices(self) -> int:
        """Parameters of the matrices of one expert."""
        return 3 * self.hidden * self.size

    def rows(self, tokens: int) -> int:
        """Returns the rows that are multiplied for so many tokens."""
        pairs = tokens * self.chosen
        return num_tiles(pairs, self.count) * tile_sizes(pairs, self.count)[0] if self.is_tiled else pairs

    def moved_bytes(self, op: str, tokens: int, compute_bytes: int) -> float:
        """Returns the bytes that a unit moves in device memory for the experts of a layer.

        Tokens are gathered to rows and scattered back, each product is written and read, and the arrays of each tile's
        expert are copied and read. A backward computes gate and up again, and adds the gradients of each tile to those
        of its expert in float32, which begin as zeros and are read once. Tiles of one expert follow each other, so that
        its arrays and its sums come to the cache once.

        Args:
            op: "F" or "B".
            tokens: of the tick on one device.
            compute_bytes: bytes of an activation.
        """
        pairs = tokens * self.chosen
        tiles = num_tiles(pairs, self.count) if self.is_tiled else 0
        hidden, size, times = (_OF_TILES if self.is_tiled else _RAGGED)[op]
        of_rows = self.rows(tokens) * (hidden * self.hidden + size * self.size)
        of_arrays = (times * tiles + self.count) * self._matrices
        # The sum over the pairs of a token reads a row of each.
        of_tokens = (pairs + tokens) * self.hidden if self.is_tiled else 0
        of_sums = 4 * self.sums_bytes(_FLOAT32) if op == "B" else 0
        return compute_bytes * (of_rows + of_arrays + of_tokens) + of_sums

    def forward_bytes(self, tokens: int, compute_bytes: int) -> int:
        """Returns what the experts' forward holds: an output of each pair, and a lot of tiles at work.

        Of a lot there are the arrays of its experts, its rows, and one product.
        """
        pairs = tokens * self.chosen
        if not self.is_tiled:
            return pairs * (2 * self.hidden + 2 * self.size) * compute_bytes
        tile, lot = tile_sizes(pairs, self.count)
        at_work = lot * self._matrices + lot * tile * (self.hidden + self.size)
        return (pairs * self.hidden + at_work) * compute_bytes

    def backward_bytes(self, tokens: int, compute_bytes: int) -> int:
        """Returns what the experts' backward holds besides the sums of `sums_bytes`: the gradient of each pair's token.

        Of a lot there are two of three arrays of its experts or their gradients, rows with their gradients, and the
        products between.
        """
        pairs = tokens * self.chosen
        if not self.is_tiled:
            return pairs * (4 * self.hidden + 3 * self.size) * compute_bytes
        tile, lot = tile_sizes(pairs, self.count)
        at_work = lot * self._matrices * 2 // 3 + lot * tile * (4 * self.hidden + 3 * self.size)
        return (pairs * self.hidden + at_work) * compute_bytes

    def sums_bytes(self, sum_bytes: int) -> int:
        """Returns the bytes of the gradients of all experts of a layer, in elements of so many bytes."""
        return self.count * self._matrices * sum_bytes


def expert_work(model: ModelConfig, platform: str) -> ExpertWork | None:
    """Returns the work of the experts of a model's layers; None without experts.

    Args:
        model: the model shape.
        platform: the compiler, "cpu", "gpu" or "tpu".
    """
    experts = model.experts
    if not experts.count:
        return None
    return ExpertWork(experts.count, experts.chosen, model.hidden_size, experts.size, platform != "tpu")
