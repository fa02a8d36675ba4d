"""Sections `critic` (the value network of PPO) and `placement.critic` (its processes, if it has ranks of its own)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from gcore.config.base import Auto, Count, Model, NonNegative, PositiveInt, Section

if TYPE_CHECKING:
    from gcore.config.tree import Config


class Critic(Section):
    model: Model | None = None
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

    @model_validator(mode="after")
    def _stored(self) -> Critic:
        if self.model is not None and self.model.build is not None:
            raise ValueError("critic.model.build: expected critic.model.path, or no critic.model: a copy of the policy")
        return self


class CriticPlacement(Section):
    ranks: Count = 0
    """Processes of the critic of `adv_estimator: gae`, beside the trainer's: policy and critic then train at the same
    time. They use FSDP2. 0: the critic is on the trainer ranks. On GPUs only with `mode: disaggregated`."""
    shard: PositiveInt | Auto = "auto"
    """Ranks that share one copy of weights and optimizer state. `auto`: all of them on GPUs, 1 on CPU."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads per process; `auto`: cores of a node divided by its trainer and critic ranks."""

    @model_validator(mode="after")
    def _whole_copies(self) -> CriticPlacement:
        if self.shard != "auto" and self.ranks % self.shard:
            raise ValueError(f"shard={self.shard} must divide ranks={self.ranks}")
        return self


class CriticView:
    """Where the critic is, and where it starts: a part of config.tree.Config."""

    if TYPE_CHECKING:
        algorithm: Any
        critic: Any
        model: Any
        placement: Any

    @property
    def critic_ranks(self) -> int:
        """Ranks of the critic alone; 0: there is no critic, or it is on the trainer ranks."""
        return int(self.placement.critic.ranks) if self.algorithm.estimator.critic else 0

    @property
    def critic_copies_policy(self) -> bool:
        """It starts as the policy at the start of reinforcement learning; otherwise from a folder."""
        return self.critic.model is None and self.model.lora is None


def check_critic(config: Config) -> None:
    """Raises ValueError if the critic cannot have ranks of its own."""
    ranks = config.critic_ranks
    if not ranks:
        return
    given = f"placement.critic.ranks={ranks}"
    if config.runtime == "local" and ranks > 1:
        raise ValueError(f"{given}: runtime=local has one process; expected 0 or 1, or runtime=ray")
    if config.training.emulated is not None:
        raise ValueError(f"{given}: training.backend=emulated has no critic; expected 0")
    if config.placement.mode in ("static", "dynamic", "colocated"):
        raise ValueError(
            f"{given}: placement.mode={config.placement.mode} divides all devices into slots; expected 0, or "
            "placement.mode=shared or disaggregated"
        )
