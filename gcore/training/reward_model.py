"""Bradley-Terry training of a scalar reward model, in one process on one device.

    pairs ──sort by length, cut to the token budget──> scores of chosen and rejected ──-log sigmoid(difference)──> AdamW

Both answers of a pair are in the same batch. The loss of a step is the mean over its pairs, however they are batched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from gcore.config.reward_model import PairTraining
from gcore.models import score_texts
from gcore.training.schedule import decay_groups, learning_rate
from gcore.types import Ints, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Pair = tuple[Ints, Ints]  # (chosen_T, rejected_T): the tokens of two conversations, the first is preferred


def bradley_terry(differences_B: Tensor) -> Tensor:
    """The loss of each pair: -log of the probability that the chosen answer wins. 0 -> log 2"""
    return -F.logsigmoid(differences_B)


class PairTrainer:
    """Trains the given network in place: float32 weights, forward and backward in `dtype`."""

    def __init__(self, network: PreTrainedModel, training: PairTraining, dtype: torch.dtype) -> None:
        self.network, self._training, self._dtype = network, training, dtype
        if training.threads != "auto":
            torch.set_num_threads(training.threads)
        groups = decay_groups(network.parameters(), training.weight_decay, training.weight_decay_norms)
        self._optimizer = torch.optim.AdamW(groups, lr=training.lr, betas=training.betas)
        self.updates = self._bad_in_a_row = 0

    def update(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """One optimizer step. It is skipped if the loss or the gradient is not finite."""
        training, rows = self._training, list[Tensor]()
        for part in self._parts(pairs):
            differences_B = self._differences(part)
            (bradley_terry(differences_B).sum() / len(pairs)).backward()
            rows.append(differences_B.detach())
        found = _summary(torch.cat(rows))
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.network.parameters(), training.max_grad_norm))
        lr = learning_rate(
            self.updates,
            peak=training.lr,
            total=training.steps,
            warmup=training.warmup_steps,
            schedule=training.schedule,
        )
        finite = math.isfinite(found["loss"]) and math.isfinite(grad_norm)
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        self._bad_in_a_row = 0 if finite else self._bad_in_a_row + 1
        if self._bad_in_a_row >= training.max_bad_updates:
            raise UserError(
                f"{self._bad_in_a_row} steps in a row had a NaN or infinite loss (step {self.updates}); lower "
                "training.lr, or raise training.max_bad_updates to skip more"
            )
        return {**found, "grad_norm": grad_norm, "lr": lr, "skipped": float(not finite)}

    @torch.no_grad()
    def evaluate(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Means over the pairs: `loss`, `accuracy` (how often chosen scores higher), `margin` (by how much)."""
        return _summary(torch.cat([self._differences(part) for part in self._parts(pairs)]))

    def _parts(self, pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
        """Pairs of similar length together, at most `max_tokens_per_batch` padded tokens at a time."""
        part: list[Pair] = []
        for pair in sorted(pairs, key=_length, reverse=True):
            if part and 2 * (len(part) + 1) * _length(part[0]) > self._training.max_tokens_per_batch:
                yield part
                part = []
            part.append(pair)
        yield part

    def _differences(self, pairs: Sequence[Pair]) -> Tensor:
        """Score of the chosen answer minus that of the rejected one."""
        texts = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
        device = self.network.device.type
        with torch.autocast(device, self._dtype, enabled=self._dtype != torch.float32):
            scores = score_texts(self.network, texts, max(map(_length, pairs)))
        chosen_B, rejected_B = scores.chunk(2)
        return chosen_B - rejected_B


def _length(pair: Pair) -> int:
    return max(map(len, pair))


def _summary(differences_B: Tensor) -> dict[str, float]:
    d = differences_B.double()
    return {
        "loss": float(bradley_terry(d).mean()),
        "accuracy": float((d > 0).double().mean()),
        "margin": float(d.mean()),
    }
