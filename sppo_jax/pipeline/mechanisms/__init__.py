"""What goes on beside the units of a tick: one file a mechanism. `pipeline/mechanism.py` has the hooks in order."""
