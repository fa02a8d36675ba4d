"""The critic of PPO: a network that predicts, before each step of a sample, the reward to come.

    policy, reward model or language model ──body──> decoder ──hidden state before a step──> value head ──> one number

It is a sequence-classification network of transformers with one label, as reward models are. The critic of a policy
that takes images is the policy's network with that head: it sees the same images. It is sharded like the policy before
it has any weights, and it never leaves the trainer: engines and exports do not see it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcore.config.base import Model
from gcore.config.tree import Config
from gcore.hub import model_folder
from gcore.models.networks import load_scorer, load_whole, make_empty
from gcore.models.towers import takes_media
from gcore.training.logprob_model import LogprobModel
from gcore.training.media_model import MediaLogprobModel
from gcore.training.shards import local_of, materialise, part_of, reshard
from gcore.training.step_model import ON_CPU, Compute
from gcore.types import UserError
from gcore.weights.files import WeightFiles
from gcore.weights.pretrained import Read, stored_tensors

log = logging.getLogger(__name__)
HEAD = "score.weight"


class ValueModel(LogprobModel):
    """Implements step_model.StepModel: one value per step, of the state before it."""

    replays = False  # its routers are its own

    def _outputs(self, hidden_SD: Tensor, *_: Tensor | None) -> tuple[Tensor, ...]:
        return (hidden_SD.float() @ self.network.score.weight[0].float(),)


class MediaValueModel(ValueModel, MediaLogprobModel):
    """The same for a network that takes images: packed, placed and encoded as for the policy."""


def value_model(network: Any, compute: Compute = ON_CPU) -> ValueModel:
    """A step_model.Wrap."""
    return (MediaValueModel if takes_media(network) else ValueModel)(network, compute)


@dataclass(frozen=True, slots=True)
class NewCritic:
    """How a backend makes the critic. `make`: the network, perhaps without weights. `fill`: gives it its weights after
    sharding; the second argument is the sharded policy. `read`: for backends that fill it themselves, a reader of its
    weights and their names; None: it is a copy of the policy with a head of zeros."""

    make: Callable[[], Any]
    fill: Callable[[Any, Any], None]
    read: Callable[[Any], tuple[Read, set[str]]] | None = None


def new_critic(config: Config, tokenizer: Any, device: torch.device, max_length: int) -> NewCritic | None:
    """None: the algorithm has no critic."""
    if not config.algorithm.estimator.critic:
        return None
    model, seed = config.critic.model or config.model, config.run.seed
    copies_policy = config.critic.model is None and config.model.lora is None

    def fill(critic: Any, policy: Any) -> None:
        if copies_policy:
            fill_from_policy(critic, policy, device)
        else:
            fill_from_folder(critic.network, model, seed, device, tokenizer)

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

    def read(network: Any) -> tuple[Read, set[str]]:
        return _open(network, model, seed, tokenizer)

    return NewCritic(make, fill, None if copies_policy else read)


@torch.no_grad()
def fill_from_policy(critic: Any, policy: Any, device: torch.device) -> None:
    """The body of the policy, and a head of zeros. Both are sharded in the same way: each rank copies its shards."""
    reshard(policy)
    materialise(critic, device)
    body, buffers = dict(policy.network.named_parameters()), dict(policy.network.named_buffers())
    for name, parameter in critic.network.named_parameters():
        if name == HEAD:
            local_of(parameter).zero_()
        else:
            parameter.copy_(body[name])
    for name, buffer in critic.network.named_buffers():
        buffer.copy_(buffers[name])


@torch.no_grad()
def fill_from_folder(network: Any, model: Model, seed: int, device: torch.device, tokenizer: Any) -> None:
    """The weights of a reward model, or of a language model with a head of zeros; each rank reads its shards."""
    materialise(network, device)
    read, names = _open(network, model, seed, tokenizer)
    for name, tensor in stored_tensors(network).items():
        local = local_of(tensor)
        if name == HEAD and name not in names:
            local.zero_()
        elif local.numel():
            local.copy_(read(name, part_of(tensor)))


def _open(network: Any, model: Model, seed: int, tokenizer: Any) -> tuple[Read, set[str]]:
    """A reader of the weights by the names of the network, and the names that it has."""
    needed = {name: tuple(tensor.shape) for name, tensor in stored_tensors(network).items()}
    whole: Any
    if model.build is not None:
        whole = load_whole(model, tokenizer, seed)
    else:
        files = WeightFiles(model_folder(model, weights=True))
        differing = [n for n, shape in needed.items() if n in files and files.shapes[n] != shape]
        if differing:
            got, expected = files.shapes[differing[0]], needed[differing[0]]
            raise UserError(f"critic.model.path={model.path}: {differing[0]} has shape {got}; expected {expected}")
        if all(name in files or name == HEAD for name in needed):
            return files.read, set(files)
        log.warning("critic.model.path=%s: names differ; the whole model is read into host memory", model.path)
        if takes_media(network):
            whole = load_whole(model, tokenizer, seed)
        else:
            whole = load_scorer(model, seed, torch.float32, torch.device("cpu"), tokenizer=tokenizer, new_head=True)
    tensors = {**dict(whole.named_parameters(remove_duplicate=False)), **dict(whole.named_buffers())}
    return lambda name, part: tensors[name].detach()[part], set(tensors)
