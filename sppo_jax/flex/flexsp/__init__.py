"""FlexSP's own problem, offline: documents of a batch to groups of devices, one group a document; no jax."""
