"""Who owns which device when: plans (pure), the monitor, the policy that moves slots, and the switch that does it."""
