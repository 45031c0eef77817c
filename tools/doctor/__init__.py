"""Check packages, the machine and rollout servers, before a run starts there."""
