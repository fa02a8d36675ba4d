"""How responses become rewards: functions of the user's or ours, called in the signatures people already have."""

from gcore.rewarding.functions import Adapter, Answer, adapt, load_function
from gcore.rewarding.rewarder import RuleRewarder

__all__ = ["Adapter", "Answer", "RuleRewarder", "adapt", "load_function"]
