"""Mixers with a state: what a layer has in place of attention, where its past is a constant and not keys and values."""
