"""Reinforcement learning in front of the shared training step."""
