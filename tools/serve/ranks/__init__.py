"""The processes that compute."""
