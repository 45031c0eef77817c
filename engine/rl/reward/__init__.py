"""Rewards of completions (docs/rewards.md)."""
