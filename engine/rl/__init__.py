"""loop.py: prompts -> rollout (backends/, reward/) -> experience (advantages) -> losses -> the step of engine/step."""
