"""The report of a run, drawn from its directory."""
