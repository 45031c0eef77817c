"""Modules of a transformer layer, and what they compute."""
