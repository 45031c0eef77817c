"""What watches a run: watchdog, profile, console, log files."""
