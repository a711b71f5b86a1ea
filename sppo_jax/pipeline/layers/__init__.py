"""A stage's layers: a group of them on one chunk, forward and backward."""
