"""Processes: what each prepares before jax starts, how several meet and agree, and how they end.

Only `host_pool` imports jax when it is imported; the others ask `compat` inside the functions that need jax.
"""
