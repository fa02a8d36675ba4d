"""The configuration tree of `gcore train`. Every key is a field with a docstring.

Imports neither torch nor ray, so that `gcore train --dry-run`, editors and tests load it fast. Unknown keys are errors.
Each fact is configured once: derived values are properties, or are resolved by `launch/plan.py`.
The imports below say which file has a section; what sections contradict in each other is in contradictions.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from gcore.config.algorithm import Algorithm
from gcore.config.base import Auto, PolicyModel, PositiveInt, Section
from gcore.config.contradictions import check
from gcore.config.data import Data
from gcore.config.denoising import implied_by_denoising
from gcore.config.environments import EnvironmentSettings, implied_by_environment
from gcore.config.generation import Generation
from gcore.config.objects import FunctionPath
from gcore.config.placement import Placement
from gcore.config.preference import OBJECTIVES, Needs, Objective, Preference, implied_by_pairs
from gcore.config.presets import implied_by_preset
from gcore.config.rewards import Rewards
from gcore.config.run import Checkpoint, EndpointSettings, Evaluation, Faults, Observe, Run
from gcore.config.sampling import Sampling
from gcore.config.sandbox import SandboxSettings
from gcore.config.training import Critic, Training


class Config(Section):
    run: Run = Run()
    """Name, folder, seed and length of the run."""
    model: PolicyModel
    """The policy."""
    data: Data
    """Prompts."""
    controllers: PositiveInt | Auto = "auto"
    """Equal controller processes that share the samples; `auto`: one per data-parallel trainer rank. Results do not
    depend on it."""
    runtime: Literal["ray", "local"] = "ray"
    """`ray`: one process per replica or rank, on one machine or several (RAY_ADDRESS joins a cluster); `local`:
    everything in one process, all controllers too, for debuggers."""
    workflow: FunctionPath = "gcore.workflows.context:generate_and_reward"
    """The function that makes a group of samples, `file.py:NAME` or `package.module:NAME`, see docs/extending.md. With
    `environment`, the default plays in it."""
    environment: EnvironmentSettings | None = None
    """An environment that the policy acts in over several turns, see docs/environments.md."""
    objective: Objective = "policy"
    """What is trained. `policy`: reinforcement learning with `algorithm`; `sft`: the answers of the dataset; all
    others: pairs of answers, by the loss of this name, see docs/preference.md. `reward_model`: a scalar
    reward model, on pairs of answers."""
    preference: Preference = Preference()
    """Training on pairs."""
    algorithm: Algorithm = Algorithm()
    """Advantages and loss."""
    generation: Generation = Generation()
    """The policy's engine and how it samples."""
    rewards: Rewards = Rewards()
    """How responses are scored."""
    sandbox: SandboxSettings | None = None
    """Where workflows run untrusted programs (`ctx.sandbox`), see docs/sandboxes.md."""
    sampling: Sampling = Sampling()
    """Numbers of prompts and samples per step, filters and staleness."""
    training: Training = Training()
    """The trainer and its optimizer."""
    critic: Critic = Critic()
    """The value network of `algorithm.adv_estimator: gae`."""
    placement: Placement = Placement()
    """Processes and devices per role."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving of checkpoints."""
    evaluation: Evaluation = Evaluation()
    """How held-out prompts (`data.eval`) are answered and counted."""
    endpoint: EndpointSettings = EndpointSettings()
    """The policy by HTTP, for agents of workflows that call `ctx.serve`, see docs/extending.md."""
    observe: Observe = Observe()
    """Progress and logs, and how often to evaluate."""
    faults: Faults = Faults()
    """Faults to inject, for tests of the recovery (needs `runtime: ray`)."""

    @property
    def needs(self) -> Needs:
        """What the objective trains on."""
        return OBJECTIVES[self.objective]

    @property
    def is_offline(self) -> bool:
        """All samples are answers of the dataset: no policy generates them, no reward scores them."""
        return self.objective != "policy" and not (self.needs.pairs and self.preference.pairs == "rollouts")

    def trains_on_answers(self, split: str) -> bool:
        """The rows of this dataset have answers to train on, or to compute the loss of."""
        return self.is_offline and (split == "train" or not self.rewards.names)

    @property
    def generates(self) -> bool:
        """The run has engines of the policy: for samples, or only to evaluate."""
        return not self.is_offline or (self.data.eval is not None and bool(self.rewards.names))

    @property
    def max_length(self) -> int:
        """Tokens of a prompt with its response."""
        return self.data.max_prompt_length + self.generation.max_response_length

    def changed(self, section: str, **values: Any) -> Config:
        """With these values in a section."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    @property
    def has_reference(self) -> bool:
        """The trainer keeps the initial policy."""
        return self.algorithm.kl_coef > 0 if self.objective == "policy" else self.needs.reference

    @property
    def needs_passes(self) -> bool:
        """Passes of the trainer before the update."""
        return self.algorithm.needs_passes if self.objective == "policy" else self.needs.reference

    @property
    def critic_ranks(self) -> int:
        """Ranks of the critic alone; 0: there is no critic, or it is on the trainer ranks."""
        return self.placement.critic.ranks if self.algorithm.estimator.critic else 0

    @property
    def critic_copies_policy(self) -> bool:
        """It starts as the policy at the start of reinforcement learning; otherwise from a folder."""
        return self.critic.model is None and self.model.lora is None

    @model_validator(mode="before")
    @classmethod
    def _implied(cls, tree: Any) -> Any:
        """The keys that a recipe does not set, and that others of its keys imply."""
        if not isinstance(tree, dict):
            return tree
        tree = {**implied_by_environment(tree)}
        tree = _filled(tree, implied_by_pairs(tree))
        tree = _filled(tree, implied_by_denoising(tree))
        return _filled(tree, implied_by_preset(tree, Generation.model_fields["max_response_length"].default))

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        check(self)
        return self


def _filled(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with the values of keys that it does not set. The validation reports sections of a wrong type."""
    filled = {**values, **tree}
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(filled[name], Mapping):
            filled[name] = _filled(filled[name], value)
    return filled
