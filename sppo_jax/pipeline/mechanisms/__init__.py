"""What goes on beside the units of a tick: one file a mechanism. `mechanism.py` has the hooks, and their order."""
