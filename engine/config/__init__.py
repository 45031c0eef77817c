"""Define the keys of a run, with their meaning and bounds, the rules between them, parsing and help."""
