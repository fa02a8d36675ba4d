"""Before a run: checks, the plan, and the construction of the objects of every role from the configuration."""
