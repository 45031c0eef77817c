"""Dry runs and what they count."""
