"""Weights apart from a model: their names, how they map, and the files that hold them."""
