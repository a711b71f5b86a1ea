"""Which plan is best: candidates, bounds, the heap, and the reasons; no jax."""
