"""Writes a model with random weights of a given shape and a character tokenizer, to measure steps without downloads.

python bench/random_model.py 1.5B FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import SHAPES, qwen2_config


def write_config(size: str, folder: Path) -> Path:
    """Only config.json: the weights are made by the processes that use them."""
    qwen2_config(
        size, max_position_embeddings=4096, architectures=["Qwen2ForCausalLM"], dtype="bfloat16"
    ).save_pretrained(folder)
    return folder


def write(size: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from gcore.prompts.tokenizer import build_char_tokenizer

    config = AutoConfig.from_pretrained(write_config(size, folder))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    network.config.pad_token_id, network.config.eos_token_id, network.config.bos_token_id = 0, 2, 1
    network.cpu().save_pretrained(folder)
    build_char_tokenizer("0123456789+=").save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    write(args.size, args.folder)


if __name__ == "__main__":
    main()
