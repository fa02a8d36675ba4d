"""A teacher: another language model whose logprobs of the policy's own tokens are rewards (on-policy distillation).

    rollouts ──requests that generate nothing──> engine of the teacher ──logprobs of each step──> log ratios

The reward of a step is log p_teacher - log p_policy of the sampled token, with the logprob of the engine that sampled
it. Its mean is an estimate of the negative reverse KL of the policy to the teacher. Unlike a judge's verdict it belongs
to a token, so it is added to the advantages of the steps and not to the reward that siblings are compared by.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from gcore.rewarding.source import Answer, Source
from gcore.types import Completion, Request, Rollout, SamplingParams, UserError

Ask = Callable[[Sequence[Request], int], Awaitable[list[Completion]]]  # requests, number of the prompt


class TeacherSource(Source):
    def __init__(self, name: str, weight: float, ask: Ask) -> None:
        super().__init__(name, weight)  # one attempt: the pool repeats requests of a replica that dies
        self._ask = ask

    async def answer(self, group: Sequence[Rollout]) -> Answer:
        requests = [Request(r.content, SamplingParams(0, temperature=r.temperature), noise_key=0) for r in group]
        scored = await self._ask(requests, group[0].prompt.id)
        steps, extras = [], []
        for rollout, completion in zip(group, scored, strict=True):
            ratio_S = np.where(rollout.mask_S, completion.logprobs_S - rollout.logprobs_S, 0.0).astype(np.float32)
            steps.append(ratio_S)
            actions = max(int(rollout.mask_S.sum()), 1)
            extras.append({"reverse_kl": -float(ratio_S.sum(dtype=np.float64)) / actions})
        return Answer([None] * len(group), extras, steps=steps)


def check_tokenizers(policy: Any, teacher: Any, key: str) -> None:
    """The same token must have the same number. UserError otherwise."""
    if policy.get_vocab() != teacher.get_vocab():
        raise UserError(
            f"{key}: the vocabulary of the teacher's tokenizer differs from that of the policy: its logprobs would be "
            f"of other tokens; expected a teacher with the tokenizer of model"
        )
