"""What a run reads, as text."""
