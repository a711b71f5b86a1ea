"""FlexSP's own problem, offline: documents of a batch to teams of devices, one team a document; no jax."""
