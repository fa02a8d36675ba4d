"""The policy as a transformers model: loaded from a folder, or built small from the configuration.

Engines and trainer ranks both start here, so that they hold the same network under the same parameter names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gcore.config.tree import BuildModel, Model
from gcore.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    network = _load(model) if model.build is None else _build(model.build, tokenizer, seed)
    _check(network.config)
    _without_dropout(network)
    network.to(device=device, dtype=dtype)  # type: ignore[call-arg]
    return network.eval()


def to_wire(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array in host memory, for other processes. numpy has no bfloat16: its bits travel as int16."""
    tensor = tensor.to("cpu", copy=True)
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def from_wire(value: torch.Tensor | np.ndarray) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    tensor = torch.from_numpy(value)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


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
        first = str(error).strip().splitlines()[0]
        raise UserError(f"model.path={model.path}: cannot load a causal language model from there: {first}") from error


def _build(build: BuildModel, tokenizer: Any, seed: int) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

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
