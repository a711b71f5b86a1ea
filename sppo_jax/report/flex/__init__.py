"""The report on flexible groups for documents, as text and JSON."""
