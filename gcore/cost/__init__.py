"""What work costs: FLOPs, seconds and bytes by closed formulas. Runs, `gcore plan` and the simulator use the same."""
