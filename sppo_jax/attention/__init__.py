"""Attention: local kernels, and their spread over the `ulysses` and `ring` parts of the `seq` axis."""
