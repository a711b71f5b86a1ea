"""What flexible groups would do with documents, as text and JSON."""
