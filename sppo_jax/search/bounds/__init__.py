"""Bounds: the least memory and the least seconds of a choice before it is built, and the heap of open choices."""
