"""Around the steps: folder, metrics, checkpoints when they are due, the end of a run."""
