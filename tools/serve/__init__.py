"""Serve the Tinker API from an engine of one's own (docs/serve.md): a front process, which speaks HTTP, and ranks."""
