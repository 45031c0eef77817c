"""Checkpoints from one format into the other, as ranges of bytes."""
