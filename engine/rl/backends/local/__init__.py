"""Generation in the trainer's own processes."""
