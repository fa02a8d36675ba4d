"""Which role owns which device at which time: grid and rules (pure), the monitor, and the placer that moves blocks."""
