"""Memory of a device: estimates, limits, the check before a run, offloading."""
