"""The contract of a step, without jax: the Plan, its schedule table, and the program that the table is lowered to."""
