"""What lies between the two methods of a layer: attention, and how far it reaches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """Causal attention within documents; the class attribute, or an attribute, `mixer` of a layer.

    Args:
        window: keys that a query sees, those at its own position and the `window` - 1 positions before; 0: all.
    """

    window: int = 0

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(f"a layer's window must be at least 0, got {self.window}; use 0 for no window")

    def within(self, length: int) -> int:
        """Returns the window in sequences of `length` tokens: 0 where it holds a whole sequence."""
        return self.window if self.window < length else 0


def mixer_of(layer: object) -> Attention:
    """Returns a layer's mixer: attention without a window where the layer names none."""
    return getattr(layer, "mixer", Attention())
