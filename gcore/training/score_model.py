"""The StepModel of scalar reward models: a conversation -> one number.

The only step of a sample is its last token (content.tokens.Tokens.split(tokens, 1)). Its output takes the place of the
logprob in objective.StepOutputs, so pairs of scores are trained like pairs of logprobs: see training/preference.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from gcore.training import context
from gcore.training.logprob_model import LogprobModel, Packed
from gcore.types import Key, MicroBatch, Sample, UserError


class ScoreModel(LogprobModel):
    """Implements step_model.StepModel with a sequence-classification network of one label."""

    replays = False

    def check_sharing(self, num_ranks: int) -> None:
        raise UserError("a reward model is trained without context parallelism (key: training.context_parallel)")

    def pack(self, micro: MicroBatch, samples: Mapping[Key, Sample], ranks: context.RowGroup) -> Packed:
        packed = super().pack(micro, samples, ranks)
        # the state after the last token, not the one that predicts it
        return packed if packed.is_padding else dataclasses.replace(packed, select_S=packed.select_S + 1)

    def _outputs(self, hidden_SD: Tensor, packed: Packed) -> tuple[Tensor, ...]:
        scores_S = self.network.score(hidden_SD).float().sum(-1)  # of one label
        return scores_S, torch.zeros_like(scores_S)
