"""Support a run: console, log files, profile, environment and garbage collection, watchdog."""
