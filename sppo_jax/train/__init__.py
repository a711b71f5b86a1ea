"""The training run: set-up, step, loop, metrics and checkpoint."""
