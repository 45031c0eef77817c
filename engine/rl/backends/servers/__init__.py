"""What a fleet of inference servers needs, of whatever kind: processes, health, retries, versions."""
