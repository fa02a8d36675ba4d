"""The simulator imports the constants of a run. Those it may not import (a stage does not import another) are equal."""

from gcore.simulate import costs
from gcore.training import logprob_model


def test_logits_of_the_trainer():
    assert costs.LOGITS_AT_ONCE == logprob_model.LOGITS_AT_ONCE
