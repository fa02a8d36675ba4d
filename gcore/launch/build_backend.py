"""Builds the backend of a critic rank (FSDP2). Called in the compute thread of the rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gcore.config.tree import Config
from gcore.launch.plan import Plan
from gcore.training.backend import Backend


def build_critic_backend(
    config: Config, plan: Plan, device: torch.device, dtype: torch.dtype, tokenizer: Any
) -> Backend:
    """Of a critic with ranks of its own: the critic is the network that is called policy there."""
    from gcore.training.critic import fill_from_folder, new_critic, value_model
    from gcore.training.fsdp import FsdpBackend
    from gcore.training.state import CRITIC_FOLDERS

    longest = config.data.max_prompt_length + config.generation.max_response_length
    critic = new_critic(config, tokenizer, device, longest)
    assert critic is not None
    fill = partial(
        fill_from_folder,
        model=config.critic.model or config.model,
        seed=config.run.seed,
        device=device,
        tokenizer=tokenizer,
    )
    keys = {"lr": config.critic.lr, "max_grad_norm": config.critic.max_grad_norm}
    own = {
        "training": config.training.model_copy(update=keys),
        "model": config.model.model_copy(update={"lora": None}),
    }
    return FsdpBackend(
        config.model_copy(update=own),
        critic.make,
        device,
        dtype,
        plan.critic_shard,
        fill=fill,
        wrap=value_model,
        folders=CRITIC_FOLDERS,
    )
