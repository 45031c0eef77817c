"""isoloss-config: configurations side by side."""
