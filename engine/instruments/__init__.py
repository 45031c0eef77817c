"""What a run uses around its work: console, log files, garbage collection, profile, environment, watchdog."""
