"""From the configuration of another trainer to ours. `command` is the tool; one file for each trainer holds its keys."""
