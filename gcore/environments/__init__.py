"""Environments: what a policy acts in. Each one runs in processes of its own beside the controllers."""
