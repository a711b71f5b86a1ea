"""The speed of a run in words: trained tokens per second, and places per second where these are more."""

from __future__ import annotations

# A document's last token has no target, so even full sequences have a few places that are not trained.
_ALIKE = 0.99


def is_alike(tokens_per_s: float, places_per_s: float) -> bool:
    """Returns whether nearly every place of a run's sequences is trained."""
    return tokens_per_s >= _ALIKE * places_per_s


def speed_text(tokens_per_s: float | None, places_per_s: float | None) -> str:
    """Returns a speed with its units.

    Args:
        tokens_per_s: trained tokens (targets) per second; None: not known.
        places_per_s: places of the sequences per second, padding and untrained tokens included; None: not known.
    """
    if tokens_per_s is None:
        return "" if places_per_s is None else f"{places_per_s:,.0f} places/s"
    if places_per_s is None or is_alike(tokens_per_s, places_per_s):
        return f"{tokens_per_s:,.0f} tokens/s"
    return f"{tokens_per_s:,.0f} tokens/s of {places_per_s:,.0f} places/s"
