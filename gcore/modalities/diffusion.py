"""Diffusion and flow models: a step is a denoising step, the output a picture or a video."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gcore.config.denoising import Denoising
from gcore.config.tree import Config
from gcore.content.base import Modality
from gcore.content.latents import LatentModality
from gcore.cost.denoisers import COMPILED_SHARE, MOST_ACTIVATIONS, shape_of
from gcore.cost.workload import CostModel
from gcore.modalities.media_keys import check_media_keys
from gcore.prompts.conditions import ConditionTemplater, pass_tokens, transformer_config
from gcore.types import Topology

if TYPE_CHECKING:
    import torch

    from gcore.generation.spec import EngineSpec
    from gcore.protocols import Engine, TrainerInfo
    from gcore.training.fsdp import FsdpBackend


@dataclass(frozen=True)
class Diffusion:
    """Implements PolicyKind."""

    config: Config
    unscored: ClassVar[str] = "not called: their input is a picture, which only a run makes"
    media: ClassVar[tuple[str, ...]] = ()
    tokenizer: ClassVar[Any] = None
    engines_sleep: ClassVar[bool] = True

    @property
    def _spec(self) -> Denoising:
        assert self.config.generation.denoising is not None
        return self.config.generation.denoising

    def check(self, topology: Topology, trains: bool) -> list[str]:
        check_media_keys(self.config, None)
        return []

    def check_network(self) -> None:
        """The classes of model.lora.targets and the kind of transformer."""
        from gcore.diffusion.pipelines import check_denoiser

        check_denoiser(self.config)

    def unshared(self) -> str:
        return "samples of a diffusion model have no prefixes"

    @property
    def activation_bytes(self) -> float:
        """Without recomputation: the passes of one sample are in one micro-batch. 0: a small model that is built."""
        if self.config.model.path is None:
            return 0.0
        spec = self._spec
        return (spec.window.size if spec.window else spec.steps - 1) * sum(self._layers[:2]) * self._row_bytes

    @property
    def _row_bytes(self) -> float:
        """That a layer keeps of one denoising step."""
        share = 1.0 if self.config.training.compile is False else COMPILED_SHARE
        return pass_tokens(self.config.model, self._spec) * self._layers[2] * MOST_ACTIVATIONS * share

    @property
    def _layers(self) -> tuple[int, int, int]:
        """How many, how many with one stream, and their width."""
        about = transformer_config(self.config.model)
        width = int(about["num_attention_heads"]) * int(about["attention_head_dim"])
        return int(about["num_layers"]), int(about.get("num_single_layers") or 0), width

    def templater(self, split: Literal["train", "eval"], eval_set: str = "") -> ConditionTemplater:
        return ConditionTemplater(self.config, split, eval_set)

    def modalities(self) -> tuple[Modality, Modality]:
        generation = self.config.generation
        in_evaluations = generation.model_copy(update=self.config.evaluation.sampling)
        return LatentModality(generation), LatentModality(in_evaluations)

    def take_media_bytes(self) -> int:
        return 0

    def cost_model(self, info: TrainerInfo) -> CostModel:
        if self.config.model.path is not None and (shape := shape_of(*self._layers)) is not None:
            # the tokens of the two passes of guidance are counted once
            passes = 1 if self._spec.guidance_scale == 1 or shape.embeds_guidance else 2
            return replace(shape.cost, crossover=shape.cost.crossover * passes)
        return CostModel(crossover=12.0 * info.hidden_size, causal=False)  # 12 matrices of this width in a layer

    def engine(self, spec: EngineSpec) -> Engine:
        from gcore.diffusion.pipelines import load_denoiser
        from gcore.generation.diffusion import DiffusionBackend
        from gcore.generation.engine_shell import SteppedEngine
        from gcore.models.networks import adapters_of

        config, generation, (device, dtype) = self.config, self.config.generation, spec.placed()
        denoiser = load_denoiser(config, device, dtype, encoders=True)
        lora, stale = config.model.lora, config.sampling.staleness
        backend = DiffusionBackend(
            denoiser,
            self._spec,
            config.run.folder / "latents" / spec.name,
            generation.max_concurrent,
            keep=stale + 2 * config.checkpoint.every if stale else 1,  # checkpoints refer to samples not trained on yet
            adapters=adapters_of(denoiser, lora) if lora else None,
            compiled=device.type == "cuda" and not generation.eager,
        )
        return SteppedEngine(backend, spec.open_tracer(), generation.min_step_s)

    def backend(self, topology: Topology, shard: int, device: torch.device, dtype: torch.dtype) -> FsdpBackend:
        import torch

        from gcore.diffusion.pipelines import load_denoiser
        from gcore.training.backend import NewNetwork
        from gcore.training.denoise_model import DenoiseModel
        from gcore.training.fsdp import FsdpBackend

        config, training = self.config, self.config.training
        velocity = config.algorithm.kl_estimator == "velocity"
        chooses = training.activation_checkpointing == "auto" and device.type == "cuda"
        wrap = functools.partial(DenoiseModel, spec=self._spec, seed=config.run.seed, velocity=velocity)
        if chooses and config.model.path is not None:
            wrap = functools.partial(wrap, row_bytes=self._row_bytes)
        make = functools.partial(load_denoiser, config, device, torch.float32, encoders=False)
        return FsdpBackend(config, {"policy": NewNetwork(make, wrap)}, device, dtype, shard)

    def export(self, checkpoint: Path, folder: Path, adapters: Path) -> int:
        from gcore.checkpoint.export_pipeline import export_pipeline

        return export_pipeline(self.config, checkpoint, folder, adapters)
