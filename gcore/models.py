"""Transformers models, loaded from a folder or built small from the configuration: the policy, and scalar scorers.

Engines and trainer ranks both start here, so that they hold the same network under the same parameter names. So do the
training and the serving of scorers, which share how a batch is laid out.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gcore.config.tree import BuildModel, Lora, Model, PolicyModel
from gcore.decoders import check_length, check_network, implementation, traits_of
from gcore.hub import model_folder
from gcore.types import Ints, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"  # an adapter's factors: the layer's name and this, as in PEFT


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank additions to some matrices of a network: Adapters(("model.layers.0.mlp.up_proj",), rank=16, alpha=32)"""

    layers: tuple[str, ...]
    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def shapes(self, whole: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Of the factors, where `whole` are those of the network's weights."""
        found: dict[str, tuple[int, ...]] = {}
        for layer in self.layers:
            width_out, width_in = whole[f"{layer}.weight"]
            found |= {layer + LORA_A: (self.rank, width_in), layer + LORA_B: (width_out, self.rank)}
        return found

    def merge(self, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The matrix that does what base and adapter do together. In float32."""
        return torch.addmm(base.float(), b.float(), a.float(), alpha=self.scale)


def adapters_of(network: Any, lora: Lora) -> Adapters:
    """Where model.lora puts adapters in this network."""
    decoder = network.get_decoder()
    body = next(name for name, module in network.named_modules() if module is decoder)
    linear = [name for name, module in decoder.layers.named_modules() if isinstance(module, torch.nn.Linear)]
    there = sorted({name.rpartition(".")[2] for name in linear})
    if strange := [t for t in lora.targets if not any(f".{name}".endswith(f".{t}") for name in linear)]:
        raise UserError(f"model.lora.targets: no linear layer is called {', '.join(strange)}; expected some of {there}")
    wanted = tuple(f".{target}" for target in lora.targets or there)
    layers = tuple(f"{body}.layers.{name}" for name in linear if f".{name}".endswith(wanted))
    if not layers:
        raise UserError(f"model.lora: a model of type {network.config.model_type} has no linear layers to adapt")
    return Adapters(layers, lora.rank, lora.alpha)


def adapters_in(folder: Path, model: PolicyModel) -> Adapters | None:
    """The same of the network in a folder, which is not loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if model.lora is None:
        return None
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True, **options)
    with torch.device("meta"):
        return adapters_of(AutoModelForCausalLM.from_config(config, **options), model.lora)


def check_policy(model: PolicyModel, tokenizer: Any, max_length: int) -> None:
    """Before anything starts and without weights: the network is of a kind that can be trained here, and has the layers
    that model.lora names. Raises UserError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    if model.build is None:
        try:
            config = AutoConfig.from_pretrained(str(model_folder(model)), local_files_only=True, **options)
            traits_of(config)
            check_length(config, max_length)
        except UserError:
            raise
        except (OSError, ValueError, KeyError) as error:
            raise _unloadable(model, error) from error
    if model.lora is not None:
        with torch.device("meta"):
            if model.build is not None:
                adapters_of(_build(model.build, tokenizer, 0, scorer=False), model.lora)
            else:
                adapters_of(AutoModelForCausalLM.from_config(config, **options), model.lora)


def pick_device(name: str, index: int = 0) -> torch.device:
    """`auto` is a GPU if there is one. Several roles on one machine take GPU number `index` modulo what is visible."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UserError("training.device=cuda: PyTorch sees no GPU here; use training.device=cpu (or auto)")
        return torch.device("cuda", index % torch.cuda.device_count())
    return torch.device("cpu")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def load_model(
    model: Model,
    tokenizer: Any,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_length: int | None = None,
) -> PreTrainedModel:
    """The model with its starting weights, in eval mode. The same seed builds the same weights in every process.

    `max_length` of the sequences it will see, where that is known: some models compute longer ones differently.
    """
    network = _load(model, max_length) if model.build is None else _build(model.build, tokenizer, seed, scorer=False)
    _without_dropout(network)
    _place(network, dtype, device)
    check_network(network.eval())
    return network


def _place(network: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Parameters in this precision. Buffers keep theirs: rotary frequencies in bfloat16 would be 0.4 % off, which is
    more than a radian at position 4,095."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(device=device, dtype=dtype)
    network.to(device)  # type: ignore[arg-type]


def save_built(model: Model, tokenizer: Any, seed: int) -> Path:
    """A built model as a folder, for engines that load from one; removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="gcore-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    load_model(model, tokenizer, seed, torch.float32, torch.device("cpu")).save_pretrained(folder)
    return folder


def load_scorer(
    model: Model, seed: int, dtype: torch.dtype, device: torch.device, *, tokenizer: Any = None, new_head: bool = False
) -> PreTrainedModel:
    """A sequence-classification model with one label, in eval mode. One that serves has learned its scores elsewhere.

    `new_head` is for training: a causal language model gets a seeded head then, and `model.build` is allowed. The
    tokenizer says which token is padding, in training always, else where config.json does not.
    """
    if model.build is not None and not (new_head and tokenizer is not None):
        raise UserError("model.build: a scorer made here has learned nothing; expected model.path (gcore train-rm)")
    network = _load_scorer(model, seed, new_head) if model.build is None else _build(model.build, tokenizer, seed, True)
    text_config = network.config.get_text_config()
    if tokenizer is not None and (new_head or text_config.pad_token_id is None):
        text_config.pad_token_id = tokenizer.pad_token_id
    if text_config.pad_token_id is None:
        raise UserError(
            f"model.path={model.path}: its config.json has no pad_token_id and its tokenizer no token that could pad, "
            "so texts cannot be batched (set pad_token_id in config.json)"
        )
    network.config.use_cache = False  # nothing is generated
    _without_dropout(network)
    _place(network, dtype, device)
    return network.eval()


def score_texts(network: PreTrainedModel, texts: Sequence[Ints], width: int) -> torch.Tensor:
    """One score a text, in float32. Shorter ones are padded at the right: causal attention never looks there."""
    tokens = np.full((len(texts), width), network.config.get_text_config().pad_token_id, np.int64)
    mask = np.zeros((len(texts), width), np.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)], mask[row, : len(text)] = text, 1
    tokens_RW, mask_RW = (torch.from_numpy(array).to(network.device) for array in (tokens, mask))
    scores: torch.Tensor = network(input_ids=tokens_RW, attention_mask=mask_RW).logits
    return scores[:, 0].float()


def longest_text(scorer: PreTrainedModel) -> int:
    """In tokens. One position is left over: serving pads every text."""
    return (getattr(scorer.config.get_text_config(), "max_position_embeddings", None) or 2**31) - 1


def _load(model: Model, max_length: int | None) -> PreTrainedModel:
    """What is not supported is refused before any weights are read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(str(model_folder(model)), **options)
        traits_of(config)
        check_length(config, max_length)
        return AutoModelForCausalLM.from_pretrained(
            str(model_folder(model, weights=True)),
            dtype=torch.float32,
            attn_implementation=implementation(config),
            **options,
        )
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise _unloadable(model, error) from error


def _unloadable(model: Model, error: Exception) -> UserError:
    first = str(error).strip().splitlines()[0]
    return UserError(f"model.path={model.path}: cannot load a causal language model from there: {first}")


def _load_scorer(model: Model, seed: int, new_head: bool) -> PreTrainedModel:
    """Weights that the folder lacks are made up by the library: right for a new head, and wrong for anything else."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    where, one = f"model.path={model.path}", "expected a sequence-classification model with one label"
    folder = str(model_folder(model, weights=True))
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        if any("SequenceClassification" in name for name in config.architectures or ()):
            if config.num_labels != 1:
                raise UserError(f"{where}: has {config.num_labels} labels; {one}")
        elif not new_head:
            raise UserError(f"{where}: is {config.architectures}; {one} (gcore train-rm makes one)")
        how = {"attn_implementation": "eager"} if implementation(config) == "eager" else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network, info = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=torch.float32, num_labels=1, output_loading_info=True, **how, **options
            )
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        first = " ".join(str(error).split())[:300]
        raise UserError(f"{where}: cannot load a scorer from there: {first}") from error
    body = f"{network.base_model_prefix}."
    missing = sorted(name for name in info["missing_keys"] if not new_head or name.startswith(body))
    if missing:
        raise UserError(f"{where}: lacks the weights {missing[0]} ({len(missing)} in all)")
    scorer: PreTrainedModel = network
    return scorer


def _build(build: BuildModel, tokenizer: Any, seed: int, scorer: bool) -> PreTrainedModel:
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        LlamaConfig,
        Qwen2Config,
        Qwen3Config,
    )

    families = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}
    config = families[build.architecture](
        vocab_size=len(tokenizer),
        hidden_size=build.hidden_size,
        intermediate_size=build.intermediate_size,
        num_hidden_layers=build.layers,
        num_attention_heads=build.heads,
        num_key_value_heads=build.kv_heads,
        head_dim=build.hidden_size // build.heads,
        max_position_embeddings=build.max_length,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if scorer:
            config.num_labels = 1
            return AutoModelForSequenceClassification.from_config(config)
        return AutoModelForCausalLM.from_config(config)


def _without_dropout(network: PreTrainedModel) -> None:
    """Logprobs before and during an update must be those of the same policy; dropout would add noise to both."""
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "jitter_noise"):  # the latter: a router's, in mixtures of experts
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
