"""Stand-ins for rollout servers, and how real ones are started."""
