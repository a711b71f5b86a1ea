"""The training run: set-up, step, loop, metrics, evaluation and checkpoint."""
