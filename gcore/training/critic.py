"""The critic of PPO: a network that predicts, before each step of a sample, the reward to come.

    policy, reward model or language model ──body──> decoder ──hidden state before a step──> value head ──> one number

It is a sequence-classification network of transformers with one label, as reward models are. The critic of a policy
that takes images is the policy's network with that head: it sees the same images. It is sharded like the policy before
it has any weights, and it never leaves the trainer: engines and exports do not see it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gcore.config.base import Model
from gcore.config.tree import Config
from gcore.hub import model_folder
from gcore.models.networks import SCORE, load_scorer, load_whole, make_empty
from gcore.models.towers import takes_media
from gcore.training.backend import NewNetwork
from gcore.training.logprob_model import LogprobModel, Packed
from gcore.training.media_model import MediaLogprobModel
from gcore.training.state import TrainedName
from gcore.training.step_model import ON_CPU, Compute
from gcore.types import UserError
from gcore.weights.pretrained import Read, WeightFiles, read_whole, stored_tensors

log = logging.getLogger(__name__)


class ValueModel(LogprobModel):
    """Implements step_model.StepModel: one value per step, of the state before it."""

    replays = False  # its routers are its own

    def _outputs(self, hidden_SD: Tensor, packed: Packed) -> tuple[Tensor, ...]:
        return (hidden_SD.float() @ self.network.score.weight[0].float(),)


class MediaValueModel(ValueModel, MediaLogprobModel):
    """The same for a network that takes images: packed, placed and encoded as for the policy."""


def value_model(network: Any, compute: Compute = ON_CPU) -> ValueModel:
    """A step_model.Wrap."""
    return (MediaValueModel if takes_media(network) else ValueModel)(network, compute)


def networks_of(
    config: Config, policy: NewNetwork, tokenizer: Any, max_length: int | None = None
) -> dict[TrainedName, NewNetwork]:
    """What a trainer rank trains: the policy, and the critic, if that has no ranks of its own."""
    if not config.algorithm.estimator.critic or config.critic_ranks:
        return {"policy": policy}
    return {"policy": policy, "critic": new_critic(config, tokenizer, max_length)}


def new_critic(config: Config, tokenizer: Any, max_length: int | None = None) -> NewNetwork:
    model = config.critic.model or config.model

    def make() -> Any:
        try:
            return make_empty(model, tokenizer, max_length, scorer=True)
        except UserError:
            raise
        except ValueError as error:  # transformers has no such network
            first = " ".join(str(error).split())[:200]
            raise UserError(
                f"the critic cannot be made from {model.path or 'model.build'}: {first} (keys: critic.model, "
                "algorithm.adv_estimator)"
            ) from error

    # ranks of its own start from the folder: the policy is sent to them later (weights/transfer.py)
    copies_policy = config.critic_copies_policy and not config.critic_ranks
    weights = partial(open_critic, model=model, seed=config.run.seed, tokenizer=tokenizer)
    return NewNetwork(make, value_model, None if copies_policy else weights)


def open_critic(network: Any, model: Model, seed: int, tokenizer: Any) -> Read:
    """The weights of a reward model, or of a language model with a head of zeros, by the names of the network."""
    needed = {name: tuple(tensor.shape) for name, tensor in stored_tensors(network).items()}
    read, names = _stored(network, needed, model, seed, tokenizer)
    return lambda name, part: read(name, part) if name in names else torch.zeros(needed[name])[part]


def _stored(
    network: Any, needed: Mapping[str, tuple[int, ...]], model: Model, seed: int, tokenizer: Any
) -> tuple[Read, Collection[str]]:
    """A reader, and the names that it has: all of them, or all but that of the head."""
    whole: Any
    if model.build is not None:
        whole = load_whole(model, tokenizer, seed)
    else:
        files = WeightFiles(model_folder(model, weights=True))
        differing = [n for n, shape in needed.items() if files.shapes.get(n, shape) != shape]
        if differing:
            got, expected = files.shapes[differing[0]], needed[differing[0]]
            raise UserError(f"critic.model.path={model.path}: {differing[0]} has shape {got}; expected {expected}")
        if all(name in files.shapes or name == SCORE for name in needed):
            return files.read, files.shapes
        log.warning("critic.model.path=%s: names differ; the whole model is read into host memory", model.path)
        if takes_media(network):
            whole = load_whole(model, tokenizer, seed)
        else:
            whole = load_scorer(model, seed, torch.float32, torch.device("cpu"), tokenizer=tokenizer, new_head=True)
    return read_whole(whole)
