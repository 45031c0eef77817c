"""Talk to SGLang: its endpoints, and the ways in which weights reach it."""
