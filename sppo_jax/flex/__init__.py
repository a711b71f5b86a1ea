"""Flexible sequence-parallel groups: which documents of a window of rows share which members of the `seq` axis."""
