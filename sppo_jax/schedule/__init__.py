"""When what runs: schedule tables, their generators and their proof; no jax."""
