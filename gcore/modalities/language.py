"""Language models: a step is a token, the output text. Models that take images and videos are language models whose
prompts have media (media_keys.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gcore.config.megatron import check_family, check_shape, check_tensor_parallel
from gcore.config.tree import Config
from gcore.content.base import Modality
from gcore.content.families import FAMILIES
from gcore.content.text import ConversationModality, TextModality
from gcore.cost.shapes import model_shape
from gcore.cost.workload import CostModel
from gcore.generation.served import check_served
from gcore.generation.spec import EngineSpec, make_engine
from gcore.modalities.media_keys import check_media_keys
from gcore.modalities.router_replay import model_type, replay_warning, replays_experts
from gcore.prompts.processor import load_processor, media_family
from gcore.prompts.source import Templater
from gcore.prompts.tokenizer import load_tokenizer, stop_tokens
from gcore.types import Topology, UserError

if TYPE_CHECKING:
    import torch

    from gcore.content.processor import MediaProcessor
    from gcore.protocols import Engine, TrainerInfo
    from gcore.training.backend import Backend


BUILT = ("qwen3", "qwen2", "llama", "qwen3_moe")  # architectures of model.build that need no check, which takes seconds


@dataclass(frozen=True)
class Language:
    """Implements PolicyKind. `media_folder`: where the media of prompts are stored; None: they stay in memory."""

    config: Config
    media_folder: Path | None = None
    unscored: ClassVar[str] = ""
    activation_bytes: ClassVar[float | None] = None

    @property
    def media(self) -> tuple[str, ...]:
        family = media_family(self.config.model)
        return FAMILIES[family].kinds if family else ()

    def check(self, topology: Topology, trains: bool) -> list[str]:
        config, training = self.config, self.config.training
        if trains and training.backend == "megatron":
            check_family(model_type(config))
            check_shape(topology, model_shape(config.model, "model"))
        check_media_keys(config, media_family(config.model))
        if trains and training.backend == "fsdp" and topology.tensor > 1:
            if config.model.lora is not None:
                key = f"placement.trainer.tensor_parallel={topology.tensor}"
                raise UserError(f"{key}: the matrices of adapters are not split; expected 1, or no model.lora")
            try:
                shape = model_shape(config.model, "model")
            except UserError:  # a kind of model that the planner does not know: trainer ranks check it
                pass
            else:
                check_tensor_parallel(topology.tensor, shape)
        if not trains:
            return []
        replays_experts(config)
        return replay_warning(config)

    def check_network(self) -> None:
        """Built models of common architectures without adapters need no check. A trainer rank of a reward model loads
        a language model or a scorer."""
        config = self.config
        if config.generates:
            check_served(config.model, config.generation.engine, "model")
        if config.objective == "reward_model" or config.training.emulated is not None:
            return
        build = config.model.build
        if build is None or build.architecture not in BUILT or config.model.lora is not None:
            from gcore.models.networks import check_policy

            check_policy(config.model, self.tokenizer, config.max_length)

    def unshared(self) -> str:
        config, training = self.config, self.config.training
        if training.backend != "fsdp":
            return f"training.backend={training.backend}"
        if training.context_parallel > 1:
            return f"training.context_parallel={training.context_parallel}"
        from gcore.models.decoders import traits_of
        from gcore.models.networks import config_of
        from gcore.training.logprob_model import why_unshared

        return why_unshared(traits_of(config_of(config.model, self.tokenizer, config.max_length)))

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.config.model, chat=self.config.objective == "reward_model")

    @cached_property
    def processor(self) -> MediaProcessor | None:
        """Of a model that takes media."""
        engine = self.config.generation.engine
        return load_processor(self.config.model, self.tokenizer, self.media_folder, engine=engine)

    def templater(self, split: Literal["train", "eval"], eval_set: str = "") -> Templater:
        config, stops = self.config, stop_tokens(self.config.model, self.tokenizer)
        scored = config.objective == "reward_model"
        return Templater(self.tokenizer, config.data, split, eval_set, self.processor, stops, scored)

    def modalities(self) -> tuple[Modality, Modality]:
        config, generation = self.config, self.config.generation
        kind = ConversationModality if config.objective == "reward_model" else TextModality
        make = partial(
            kind,
            tokenizer=self.tokenizer,
            stop_tokens=stop_tokens(config.model, self.tokenizer),
            max_prompt_length=config.data.max_prompt_length,
            processor=self.processor,
        )
        in_evaluations = generation.model_copy(update=config.evaluation.sampling)
        return make(generation, keep_experts=replays_experts(config)), make(in_evaluations)

    def take_media_bytes(self) -> int:
        return self.processor.take_bytes() if self.processor is not None else 0

    def cost_model(self, info: TrainerInfo) -> CostModel:
        """Of the policy's own shape. A model whose shape is not known has that of a dense decoder of its width."""
        try:
            cost = model_shape(self.config.model, "model.path").cost
        except UserError:
            return CostModel(crossover=6.0 * info.hidden_size)
        return cost.recomputed() if self.config.training.activation_checkpointing is True else cost

    @property
    def engines_sleep(self) -> bool:
        return self.config.generation.traits.sleeps

    def engine(self, spec: EngineSpec) -> Engine:
        return make_engine(spec)

    def backend(self, topology: Topology, shard: int, device: torch.device, dtype: torch.dtype) -> Backend:
        import torch

        from gcore.models.networks import load_scorer, make_empty
        from gcore.prompts.tokenizer import with_padding
        from gcore.training.backend import NewNetwork
        from gcore.training.critic import networks_of
        from gcore.training.fsdp import FsdpBackend
        from gcore.training.logprob_model import LogprobModel, ScoreModel
        from gcore.training.media_model import MediaLogprobModel
        from gcore.weights.pretrained import open_weights

        config, tokenizer = self.config, self.tokenizer
        model, seed, context = config.model, config.run.seed, config.training.context_parallel
        if config.objective == "reward_model":
            padded = with_padding(tokenizer, model)
            scorer = partial(load_scorer, model, seed, torch.float32, device, tokenizer=padded, new_head=True)
            return FsdpBackend(config, {"policy": NewNetwork(scorer, ScoreModel)}, device, dtype, shard)
        make = partial(make_empty, model, tokenizer, config.max_length)
        weights = partial(open_weights, model=model, seed=seed, tokenizer=tokenizer)
        policy = NewNetwork(make, MediaLogprobModel if self.media else LogprobModel, weights)
        networks = networks_of(config, policy, tokenizer, config.max_length)
        if config.training.backend == "megatron":
            from gcore.training.megatron.backend import MegatronBackend

            return MegatronBackend(config, networks, device, dtype, topology, context)
        return FsdpBackend(config, networks, device, dtype, shard, topology.tensor, context)

    def export(self, checkpoint: Path, folder: Path, adapters: Path) -> int:
        from gcore.checkpoint.export import export_language_model

        return export_language_model(self.config, checkpoint, folder, adapters, self.tokenizer, self.processor)
