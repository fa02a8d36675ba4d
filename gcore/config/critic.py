"""Sections `critic` (the value network of PPO) and `placement.critic` (its processes, if it has ranks of its own)."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from gcore.config.base import Count, Model, NonNegative, Section


class StoredModel(Model):
    @model_validator(mode="after")
    def _check_stored(self) -> Self:
        """The critic starts from a folder, or as a copy of the policy."""
        if self.build is not None:
            raise ValueError("critic.model.build: expected critic.model.path, or no critic.model: a copy of the policy")
        return self


class Critic(Section):
    model: StoredModel | None = None
    """Where the value network of `adv_estimator: gae` starts: a reward model (`objective: reward_model`) or a language
    model, with the tokenizer of the policy. A language model gets a value head of zeros. If the policy takes images, of
    the same family. Default: the policy at the start of reinforcement learning; with `model.lora`, the weights in its
    folder."""
    lr: NonNegative = 1e-5
    """Peak learning rate; the schedule is that of `training`."""
    warmup_steps: Count = 0
    """Training steps at the start in which only the critic trains."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Clip the change of a value in a training step: the loss is the larger one of the plain and the clipped value.
    `null`: off."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this global norm."""
