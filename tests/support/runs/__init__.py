"""Whole runs: their folders, phases, processes and warm starts."""
