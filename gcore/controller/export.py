"""`gcore export`: writes the policy of a checkpoint as a Hugging Face folder, and checks it by reloading.

runs/NAME/step_N ──> FOLDER: safetensors, config, tokenizer with chat template
                 └─> FOLDER-adapter: the adapters in PEFT's format (with model.lora, which FOLDER has merged)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore.checkpoint import store
from gcore.config import load_config
from gcore.types import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from gcore.models import Adapters


def locate(path: Path) -> tuple[Path, Path]:
    """(run folder, checkpoint) for `runs/NAME` or `runs/NAME/step_N`."""
    if (path / store.MANIFEST).is_file():
        return path.parent, store.verify(path)
    found = store.complete(path)
    if not found:
        raise UserError(f"{path}: no complete checkpoint there; expected runs/NAME or runs/NAME/step_N")
    return path, store.verify(found[-1])


def adapter_folder(folder: Path) -> Path:
    """The folder of the adapters: export/model -> export/model-adapter"""
    return folder.with_name(f"{folder.resolve().name}-adapter")


def export(source: Path, folder: Path) -> float:
    """Write the policy to `folder`. Returns the largest difference of logits after reloading it."""
    run, checkpoint = locate(source)
    config = load_config(run / "config.yaml")
    for place in (folder, *([adapter_folder(folder)] if config.model.lora else [])):
        if place.exists() and any(place.iterdir()):
            raise UserError(f"{place}: the folder is not empty; choose another folder to export to")
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gcore.models import adapters_of, load_model
    from gcore.prompts.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    network: Any = load_model(config.model, tokenizer, config.run.seed, torch.float32, torch.device("cpu"))
    weights = load_file(checkpoint / "model.safetensors")
    if config.model.lora is not None:
        adapters = adapters_of(network, config.model.lora)
        _save_adapters(adapter_folder(folder), network, adapters, weights, config.model.path)
        weights = _merged(network, adapters, weights)
    network.load_state_dict(weights, strict=False)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    if AutoTokenizer.from_pretrained(folder).get_vocab() != tokenizer.get_vocab():
        raise RuntimeError(f"{folder}: the reloaded tokenizer has another vocabulary")
    tokens = torch.arange(64).remainder(len(tokenizer))[None]
    with torch.no_grad():
        difference = float((network(tokens).logits - again(tokens).logits).abs().max())
    if difference > 1e-4:
        raise RuntimeError(f"{folder}: the exported model differs from the checkpoint by {difference:.2e} in logits")
    return difference


def _merged(network: Any, adapters: Adapters, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    from gcore.models import LORA_A, LORA_B

    base = network.state_dict()
    names = {layer: f"{layer}.weight" for layer in adapters.layers}
    return {
        name: adapters.merge(base[name], factors[layer + LORA_A], factors[layer + LORA_B])
        for layer, name in names.items()
    }


def _save_adapters(
    folder: Path, network: Any, adapters: Adapters, factors: dict[str, Tensor], base: str | None
) -> None:
    from safetensors.torch import save_file

    ends = sorted({layer.rpartition(".")[2] for layer in adapters.layers})
    matched = {name for name, _ in network.named_modules() if name.rpartition(".")[2] in ends}
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ends if matched == set(adapters.layers) else list(adapters.layers),
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in factors.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=1))
