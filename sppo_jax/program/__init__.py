"""A schedule as numbers: ticks, slots, rows on the host, and what a stash class holds; no jax."""
