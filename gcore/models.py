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


def check_policy(model: PolicyModel, tokenizer: Any) -> None:
    """Before anything starts and without weights: the network is of a kind that can be trained here, and has the layers
    that model.lora names. Raises UserError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    if model.build is None:
        try:
            config = AutoConfig.from_pretrained(str(model.path), local_files_only=True, **options)
        except (OSError, ValueError, KeyError) as error:
            raise _unloadable(model, error) from error
        _check(config)
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


def load_model(model: Model, tokenizer: Any, seed: int, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model with its starting weights, in eval mode. The same seed builds the same weights in every process."""
    network = _load(model) if model.build is None else _build(model.build, tokenizer, seed, scorer=False)
    _check(network.config)
    _without_dropout(network)
    network.to(device=device, dtype=dtype)  # type: ignore[call-arg]
    return network.eval()


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
    tokenizer, where given, says which token is padding; else config.json must.
    """
    if model.build is not None and not (new_head and tokenizer is not None):
        raise UserError("model.build: a scorer made here has learned nothing; expected model.path (gcore train-rm)")
    network = _load_scorer(model, seed, new_head) if model.build is None else _build(model.build, tokenizer, seed, True)
    if tokenizer is not None:
        network.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if network.config.get_text_config().pad_token_id is None:
        raise UserError(f"model.path={model.path}: its config.json has no pad_token_id, so texts cannot be batched")
    network.config.use_cache = False  # nothing is generated
    _without_dropout(network)
    network.to(device=device, dtype=dtype)  # type: ignore[call-arg]
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


def _load(model: Model) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            str(model.path),
            dtype=torch.float32,
            trust_remote_code=model.trust_remote_code,
            local_files_only=True,
            attn_implementation="sdpa",
        )
    except (OSError, ValueError) as error:
        raise _unloadable(model, error) from error


def _unloadable(model: Model, error: Exception) -> UserError:
    first = str(error).strip().splitlines()[0]
    return UserError(f"model.path={model.path}: cannot load a causal language model from there: {first}")


def _load_scorer(model: Model, seed: int, new_head: bool) -> PreTrainedModel:
    """Weights that the folder lacks are made up by the library: right for a new head, and wrong for anything else."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    where, one = f"model.path={model.path}", "expected a sequence-classification model with one label"
    if not Path(str(model.path)).is_dir():
        raise UserError(f"{where}: no such folder (expected a Hugging Face folder on this machine)")
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(str(model.path), **options)
        if any("SequenceClassification" in name for name in config.architectures or ()):
            if config.num_labels != 1:
                raise UserError(f"{where}: has {config.num_labels} labels; {one}")
        elif not new_head:
            raise UserError(f"{where}: is {config.architectures}; {one} (gcore train-rm makes one)")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network, info = AutoModelForSequenceClassification.from_pretrained(
                str(model.path), dtype=torch.float32, num_labels=1, output_loading_info=True, **options
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
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def _check(config: Any) -> None:
    """Refuse what the embedded engine and the FSDP trainer would compute wrongly."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UserError(
            f"model of type {config.model_type} has layers of kind {sorted(kinds)}; "
            "the embedded engine and the FSDP trainer support full attention alone so far (key: model.path)"
        )
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise UserError(
                f"model of type {config.model_type} scales its logits ({name}={getattr(config, name)}), "
                "which the trainer does not support so far (key: model.path)"
            )
