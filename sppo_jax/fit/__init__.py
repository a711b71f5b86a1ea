"""Compiling a plan's train step for machines that are not here, and what the compiler says of it."""
