"""G-Core: a reinforcement-learning trainer with parallel controllers."""

__version__ = "0.1.0"
