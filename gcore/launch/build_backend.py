"""Builds the backend of a trainer rank (FSDP2 or Megatron-Core) or of a critic rank (FSDP2). Called in the compute
thread of the rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gcore.config.tree import Config
from gcore.launch.plan import Plan
from gcore.training.backend import Backend


def build_backend(config: Config, plan: Plan, device: torch.device, dtype: torch.dtype, tokenizer: Any) -> Backend:
    if config.generation.denoising is not None:
        from gcore.launch.build_diffusion import diffusion_backend

        return diffusion_backend(config, plan, device, dtype)
    from gcore.models.networks import load_scorer, make_empty
    from gcore.prompts.processor import vision_family
    from gcore.prompts.tokenizer import with_padding
    from gcore.training import loading
    from gcore.training.critic import new_critic
    from gcore.training.fsdp import FsdpBackend
    from gcore.training.logprob_model import LogprobModel
    from gcore.training.score_model import ScoreModel
    from gcore.training.vision_model import VisionLogprobModel
    from gcore.weights.pretrained import open_weights

    model, seed, context = config.model, config.run.seed, config.training.context_parallel
    if config.objective == "reward_model":
        padded = with_padding(tokenizer, model)
        scorer = partial(load_scorer, model, seed, torch.float32, device, tokenizer=padded, new_head=True)
        return FsdpBackend(config, scorer, device, dtype, plan.shard, wrap=ScoreModel)
    longest = config.data.max_prompt_length + config.generation.max_response_length
    make = partial(make_empty, model, tokenizer, longest)
    critic = None if config.critic_ranks else new_critic(config, tokenizer, device, longest)
    if config.training.backend == "megatron":
        from gcore.training.megatron.backend import MegatronBackend

        read = partial(open_weights, model=model, seed=seed, tokenizer=tokenizer)
        return MegatronBackend(config, make, device, dtype, plan.topology, read, context, critic)
    fill = partial(loading.fill, model=model, seed=seed, device=device, tokenizer=tokenizer)
    shards = (plan.shard, plan.tensor_parallel)
    wrap = VisionLogprobModel if vision_family(model) else LogprobModel
    return FsdpBackend(config, make, device, dtype, *shards, fill, context, wrap, critic)


def build_critic_backend(
    config: Config, plan: Plan, device: torch.device, dtype: torch.dtype, tokenizer: Any
) -> Backend:
    """Of a critic with ranks of its own."""
    from gcore.training.critic import fill_from_folder, new_critic, value_model
    from gcore.training.fsdp import FsdpBackend

    longest = config.data.max_prompt_length + config.generation.max_response_length
    critic = new_critic(config, tokenizer, device, longest)
    assert critic is not None
    given = {"model": config.critic.model or config.model, "seed": config.run.seed, "tokenizer": tokenizer}
    fill = partial(fill_from_folder, device=device, **given)
    return FsdpBackend(
        config, critic.make, device, dtype, plan.critic_shard, fill=fill, wrap=value_model, first="critic"
    )
