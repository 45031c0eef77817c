"""Do what every run needs around its steps: folder, metrics, checkpoints, warnings, spikes, preemption, export."""
