"""What a run reads, in numbers and samples."""
