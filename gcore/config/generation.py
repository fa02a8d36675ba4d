"""Section `generation`: the engine of the policy, and how it samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gcore.config.base import Count, NonNegative, PositiveInt, Serving
from gcore.config.denoising import Denoising
from gcore.config.engines import engines_with


class Generation(Serving):
    max_response_length: PositiveInt = 256
    """Maximum number of tokens per response."""
    temperature: NonNegative = 1.0
    """Sampling temperature of the rollouts."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off. With top-p or top-k, sampling uses a truncated distribution, but logprobs and
    importance weights are those of the full distribution, see `keep_sampling_mask`."""
    top_k: Count = 0
    """Sample among the k most likely tokens; 0 is off. For importance weights see `top_p`."""
    keep_sampling_mask: bool = False
    """Correct for top-p and top-k: the engine also returns the set of tokens that it sampled from at each step, and all
    logprobs (engine, trainer, reference) are normalised over this set. Only `embedded`: other engines do not return
    the set."""
    sleep: Literal["auto", 0, 1, 2] = "auto"
    """vLLM: GPU memory that engines free during training. 0: none; 1: all, weights move to host memory; 2: all, weights
    are dropped. `auto`: 2 on GPUs (1 with `model.lora`), 0 on CPU and if generation continues during training."""
    media: Literal["auto"] | bool = "auto"
    """vLLM, of a model that takes media: false reads text alone, without the towers, and decodes faster. `auto`: true
    if rows of the datasets have media; set true if only tools return some."""
    denoising: Denoising | None = None
    """The policy is a diffusion or flow model with this sampler, see docs/diffusion.md. Default: a language model."""

    @model_validator(mode="after")
    def _mask(self) -> Generation:
        if self.keep_sampling_mask and not self.traits.sampling_mask:
            raise ValueError(
                f"keep_sampling_mask=true needs engine={engines_with('sampling_mask')}: engine={self.engine} does not "
                "return the set of "
                "tokens that top_p and top_k keep; set generation.keep_sampling_mask=false, or top_p=1 and top_k=0"
            )
        return self
