"""What `isoloss.tools.doctor` looks at: packages, the machine, rollout servers."""
