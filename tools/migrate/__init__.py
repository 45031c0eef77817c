"""From the configuration of another trainer to ours. `command` is the tool, and each trainer has files of its keys."""
