"""What flexible teams would do with documents, as text and JSON."""
