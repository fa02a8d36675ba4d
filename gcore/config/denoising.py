"""Section `generation.denoising`: how a diffusion or flow model samples. Its presence makes the policy a denoiser."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from gcore.config.base import NonNegative, PositiveInt, Section, refuse_value
from gcore.config.engines import engines_with
from gcore.config.megatron import TRAINER

if TYPE_CHECKING:
    from gcore.config.tree import Config

NOISE_LEVELS = {"flow_sde": 0.7, "dance": 0.3, "ddim": 1.0}  # of the papers


class Window(Section):
    size: PositiveInt = 4
    """Consecutive denoising steps that are stochastic and trained; all others follow the ODE."""
    order: Literal["sliding", "random"] = "sliding"
    """`sliding`: the window moves from noise to image during the run; `random`: a random place for each prompt."""
    every: PositiveInt = 25
    """Sliding: training steps between two moves of one denoising step. They are counted in prompts,
    `sampling.prompts_per_step` each."""


class Denoising(Section):
    sampler: Literal["flow_sde", "dance", "ddim"] = "flow_sde"
    """`flow_sde`: rectified flow, noise of Flow-GRPO; `dance`: rectified flow, constant noise of DanceGRPO; `ddim`: a
    network that predicts the noise of a DDPM, sampled by DDIM with noise (DDPO). The last step is always
    deterministic."""
    steps: PositiveInt = 10
    """Denoising steps per sample; sets `generation.max_response_length`."""
    noise_level: NonNegative | None = None
    """Strength of the noise: `a` of Flow-GRPO, `eta` of DanceGRPO and DDIM. Default: 0.7, 0.3 and 1."""
    window: Window | None = None
    """Stochastic and trained steps (MixGRPO). Default: all steps except the last."""
    shift: Annotated[float, Field(gt=0)] = 1.0
    """Flows: more steps near the noise, s' = shift s / (1 + (shift - 1) s); Stable Diffusion 3 uses 3."""
    betas: tuple[float, float] = (0.00085, 0.012)
    """DDIM: first and last beta of the 1,000 training steps; their square roots are evenly spaced."""
    guidance_scale: Annotated[float, Field(ge=0)] = 1.0
    """Classifier-free guidance in sampling and in training: v = v_empty + scale (v_prompt - v_empty). 1: off. Models
    that were distilled with guidance get the number as input instead."""
    logprob: Literal["mean", "sum"] = "mean"
    """Logprob of a step: `mean` over the numbers of the latents, as in the papers, whose clip ranges suit it, or their
    `sum`, which is the logprob of the Gaussian."""
    shared_start: bool = False
    """All samples of a prompt start from the same noise (DanceGRPO)."""
    height: PositiveInt = 512
    """Height of the pictures in pixels; a built model has its own."""
    width: PositiveInt = 512
    """Width of the pictures in pixels; a built model has its own."""
    frames: PositiveInt = 1
    """Frames of a video; only for video models."""

    @property
    def level(self) -> float:
        return NOISE_LEVELS[self.sampler] if self.noise_level is None else self.noise_level

    def window_at(self, number: int, prompts_per_step: int, random: float) -> tuple[int, int]:
        """The first stochastic step of a prompt and the one after the last. `random`: in [0, 1), of the prompt."""
        trainable = self.steps - 1
        if self.window is None:
            return 0, trainable
        places = trainable - self.window.size + 1
        if self.window.order == "random":
            first = int(random * places)
        else:
            moves = number // (self.window.every * prompts_per_step)
            first = min(moves, places - 1)
        return first, first + self.window.size

    @model_validator(mode="after")
    def _steps(self) -> Denoising:
        if self.steps < 2:
            raise ValueError(
                "steps=1: the last step is deterministic, so nothing could be trained; expected at least 2"
            )
        if self.window is not None and self.window.size >= self.steps:
            raise ValueError(
                f"window.size={self.window.size} must be below steps={self.steps}: the last is an ODE step"
            )
        if not self.level:
            raise ValueError("noise_level=0: without noise there is nothing to train; expected a number above 0")
        if not 0 < self.betas[0] < self.betas[1] < 1:
            raise ValueError(f"betas={self.betas}; expected 0 < first < last < 1")
        return self


def implied_by_denoising(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The steps of a sample are its denoising steps. `tree`: a parsed recipe."""
    match tree:
        case {"generation": {"denoising": dict() as denoising}}:
            steps = denoising.get("steps", Denoising.model_fields["steps"].default)
            return {"generation": {"max_response_length": steps}}
    return {}


def check_denoising(config: Config) -> None:
    """ValueError if keys of language models and of diffusion models contradict each other."""
    generation, model, algorithm, training = config.generation, config.model, config.algorithm, config.training
    compares_predictions = algorithm.kl_coef > 0 and algorithm.kl_of_gaussians
    if generation.denoising is None:
        if model.denoiser is not None:
            raise ValueError("model.denoiser is a diffusion model: set generation.denoising ({} uses the defaults)")
        if compares_predictions:
            raise ValueError(f"algorithm.kl_estimator={algorithm.kl_estimator} needs generation.denoising")
        return
    if config.is_offline or algorithm.estimator.critic:
        what = f"algorithm.adv_estimator={algorithm.adv_estimator}" if algorithm.estimator.critic else config.objective
        raise ValueError(f"generation.denoising: {what} is for language models; expected a policy without a critic")
    if algorithm.entropy_coef or algorithm.adaptive_entropy is not None:
        key = "entropy_coef" if algorithm.entropy_coef else "adaptive_entropy"
        raise ValueError(f"algorithm.{key}: the entropy of a denoising step is constant; expected it unset")
    if compares_predictions and algorithm.kl_in != "loss":
        raise ValueError(f"algorithm.kl_estimator={algorithm.kl_estimator} needs kl_in=loss, got {algorithm.kl_in}")
    refuse = partial(refuse_value, config, "generation.denoising")
    steps, built = generation.denoising.steps, model.denoiser
    refuse("model.build", model.build is not None, "model.denoiser or model.path: it is a language model")
    refuse("model.lora", bool(model.lora and built), "none: model.denoiser trains all weights, as it starts from 0")
    refuse("generation.max_response_length", generation.max_response_length != steps, f"it unset, or steps={steps}")
    for name, off in (("temperature", 1), ("top_p", 1), ("top_k", 0), ("keep_sampling_mask", False)):
        refuse(f"generation.{name}", getattr(generation, name) != off, "it unset: it is of language models")
    refuse("generation.engine", not generation.traits.denoises, engines_with("denoises"))
    refuse("training.backend", training.backend != "fsdp", "fsdp")
    refuse("training.warm_start", training.warm_start is not None and not built, "none with a model from model.path")
    refuse("training.context_parallel", training.context_parallel > 1, "1")
    refuse(f"{TRAINER}.tensor_parallel", config.placement.trainer.tensor_parallel > 1, "1")
