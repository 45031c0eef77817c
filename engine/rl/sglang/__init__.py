"""SGLang servers as a rollout backend (docs/rollout.md)."""
