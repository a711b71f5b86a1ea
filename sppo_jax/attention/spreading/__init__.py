"""Attention over members of the `seq` axis: ring, Ulysses, both, and teams."""
