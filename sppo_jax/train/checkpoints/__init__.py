"""What a run keeps: its directory, checkpoints and what they hold, and how another run begins from them."""
