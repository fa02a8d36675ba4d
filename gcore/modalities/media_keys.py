"""Which keys fit a model that takes media, and a model that takes none. No torch."""

from __future__ import annotations

from gcore.config.engines import engines_taking
from gcore.config.tree import Config
from gcore.content.families import FAMILIES, KINDS
from gcore.prompts.processor import media_family
from gcore.types import UserError


def check_media_keys(config: Config, family: str | None) -> None:
    """Raises UserError for a key that does not fit. `family`: of a policy that takes media."""
    _check_critic(config, family)
    if family is None:
        if config.training.vision_lr is not None:
            raise UserError(
                f"training.vision_lr={config.training.vision_lr}: the model has no vision tower; expected it unset"
            )
        return
    kind, what = FAMILIES[family].kinds[0], _taken(family)
    training, placement, engine = config.training, config.placement.trainer, config.generation.traits
    refused = {
        "training.backend": (training.backend == "megatron", "Megatron-Core trains models of text"),
        "training.context_parallel": (training.context_parallel > 1, f"ranks cannot share a sample with {what}"),
        "placement.trainer.tensor_parallel": (placement.tensor_parallel > 1, "matrices of a tower are not split"),
        "generation.engine": (not engine.takes(kind), f"{what} need {engines_taking(kind)}"),
        "generation.engine (with model.build)": (
            engine.loads_folder and config.model.build is not None,
            f"{engine.library} needs the folder of a model with its processor",
        ),
        "training.vision_lr": (
            training.vision_lr == 0 and config.model.lora is not None and "vision" in config.model.lora.parts,
            "the adapters of the vision tower (model.lora.parts) would not learn",
        ),
        "objective": (config.objective == "reward_model", "a reward model reads only text"),
    }
    for key, (is_refused, why) in refused.items():
        if is_refused:
            raise UserError(f"{key}={_value(config, key)}: {why}; the model takes {what} ({family}, docs/vision.md)")


def _check_critic(config: Config, family: str | None) -> None:
    """Media are processed once, for the policy: the critic must take them in the same form."""
    model = config.critic.model
    if model is None or not config.algorithm.estimator.critic:
        return
    found = media_family(model, "critic.model")
    if found != family:
        kinds = [
            f"takes {_taken(kind)} ({kind})" if kind else f"takes no {_taken(found or family)}"
            for kind in (found, family)
        ]
        raise UserError(f"critic.model.path={model.path}: {kinds[0]}; the policy {kinds[1]}, expected the same family")


def _taken(family: str | None) -> str:
    return KINDS[FAMILIES[family].kinds[0]].plural if family else "media"


def _value(config: Config, key: str) -> object:
    found: object = config
    for name in key.partition(" ")[0].split("."):
        found = getattr(found, name)
    return found if isinstance(found, int | float | str) else "..."
