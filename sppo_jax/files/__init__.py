"""Files and paths: whole or not at all, locks, the user's caches, and bytes in words; no jax."""
