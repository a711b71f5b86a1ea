"""Documents, their packing into sequences, and the loader; imports no jax."""
