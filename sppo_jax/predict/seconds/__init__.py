"""How long things take: units, copies, what travels, and a whole step in simulation; no jax."""
