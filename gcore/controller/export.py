"""A checkpoint as a Hugging Face folder: safetensors, config, tokenizer with chat template. Checked by reloading."""

from __future__ import annotations

from pathlib import Path

from gcore.checkpoint import store
from gcore.config import load_config
from gcore.types import UserError


def locate(path: Path) -> tuple[Path, Path]:
    """(run folder, checkpoint) for `runs/NAME` or `runs/NAME/step_N`."""
    if (path / store.MANIFEST).is_file():
        return path.parent, store.verify(path)
    found = store.complete(path)
    if not found:
        raise UserError(f"{path}: no complete checkpoint there; expected runs/NAME or runs/NAME/step_N")
    return path, store.verify(found[-1])


def export(source: Path, folder: Path) -> float:
    """Write the policy to `folder`; returns the largest difference of logits after reloading it."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gcore.models import load_model
    from gcore.prompts.tokenizer import load_tokenizer

    run, checkpoint = locate(source)
    config = load_config(run / "config.yaml")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; choose a new folder to export to")
    tokenizer = load_tokenizer(config.model)
    network = load_model(config.model, tokenizer, config.run.seed, torch.float32, torch.device("cpu"))
    network.load_state_dict(load_file(checkpoint / "model.safetensors"), strict=False)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    if AutoTokenizer.from_pretrained(folder).get_vocab() != tokenizer.get_vocab():
        raise RuntimeError(f"{folder}: the tokenizer does not reload as it was")
    tokens = torch.arange(64).remainder(len(tokenizer))[None]
    with torch.no_grad():
        difference = float((network(tokens).logits - again(tokens).logits).abs().max())
    if difference > 1e-4:
        raise RuntimeError(f"{folder}: the exported model differs from the checkpoint by {difference:.2e} in logits")
    return difference
