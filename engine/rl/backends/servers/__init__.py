"""Run and watch a fleet of inference servers of any kind: processes, health, retries, versions."""
