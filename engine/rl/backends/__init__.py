"""Generate completions, with a model in this process or a fleet of servers (docs/rollout.md)."""
