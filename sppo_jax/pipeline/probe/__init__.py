"""Whether a user's layer keeps its contract, tried on a few tokens."""
