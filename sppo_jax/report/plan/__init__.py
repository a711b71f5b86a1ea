"""The report of a plan: as text, as a page, as JSON."""
