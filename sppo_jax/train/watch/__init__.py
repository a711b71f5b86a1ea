"""What watches a run: signals, processes that are stuck, processes that differ."""
