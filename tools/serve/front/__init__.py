"""The process that talks to clients; it imports no torch."""
