"""G-Core: a reinforcement-learning trainer with parallel controllers and dynamic placement."""

__version__ = "0.1.0"
