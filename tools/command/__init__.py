"""isoloss: one command for recipes and tools. The folder isoloss/ holds the top of the package, which setup.py maps."""
