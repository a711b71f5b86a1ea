"""The executor: one SPMD program per Plan; the only place with `shard_map`."""
