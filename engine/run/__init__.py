"""Around the steps: folder, metrics, checkpoints when they are due, spikes, stragglers, preemption, the end."""
