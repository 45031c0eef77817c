"""Serve an engine to clients that speak the API of Tinker (isoloss-serve)."""
