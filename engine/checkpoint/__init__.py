"""Stage, write and read checkpoints."""
