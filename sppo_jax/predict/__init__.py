"""How long a step takes and how much memory it holds; no jax."""
