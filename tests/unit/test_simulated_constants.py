"""The planner and the simulator have copies of a run's constants that they may not import (a stage does not import
another). They are equal."""

from gcore.cost import training_memory
from gcore.training import fsdp, logprob_model, optimizer
from gcore.weights import bucket


def test_constants_of_the_trainer():
    assert training_memory.LOGITS_AT_ONCE == logprob_model.LOGITS_AT_ONCE
    assert training_memory.LAYERS_PER_GROUP == fsdp.LAYERS_PER_GROUP
    assert (training_memory.PART_BYTES, training_memory.SLOTS) == (optimizer.PART_BYTES, optimizer.SLOTS)
    assert training_memory.TOKENS_AT_ONCE == fsdp.TOKENS_AT_ONCE
    assert training_memory.MOST_AT_ONCE == fsdp.MOST_AT_ONCE
    assert training_memory.BUCKET_BYTES == bucket.BUCKET_BYTES
