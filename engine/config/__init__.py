"""Keys: their meaning and bounds, rules between them, parsing and help."""
