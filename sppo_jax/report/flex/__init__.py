"""The report on flexible teams for documents, as text and JSON."""
