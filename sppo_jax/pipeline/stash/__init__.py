"""The stash: the arrays of a forward that a backward needs, on the device or on the host."""
