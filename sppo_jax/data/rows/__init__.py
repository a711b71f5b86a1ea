"""Sequences: documents packed into rows of equal length, in the order of a run, from one source or several."""
