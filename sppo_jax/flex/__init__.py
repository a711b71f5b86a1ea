"""FlexSP's planning problem, offline: which documents share which group of devices; no jax."""
