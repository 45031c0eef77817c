"""Tiny models of every family, and their twins in transformers and plain Megatron-Core."""
