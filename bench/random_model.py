"""Writes a model with random weights of a given shape and a character tokenizer, to measure steps without downloads.

python bench/random_model.py 1.5B FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import SHAPES, model_config

TOWER = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}


def write_config(size: str, folder: Path) -> Path:
    """Only config.json: the weights are made by the processes that use them."""
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as text_alone
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as with_tower

    config = model_config(size, max_position_embeddings=32_768, dtype="bfloat16")
    outer = {"qwen3_5_text": Qwen3_5Config, "qwen3_5_moe_text": Qwen3_5MoeConfig}.get(config.model_type)
    if outer is not None:  # vLLM serves it with a tower for images; here, a small one
        config = outer(
            text_config=config.to_dict(),
            vision_config={**TOWER, "out_hidden_size": config.hidden_size},
            tie_word_embeddings=config.tie_word_embeddings,
            dtype="bfloat16",
        )
    kind = config.model_type
    config.architectures = [with_tower[kind] if kind in with_tower else text_alone[kind]]
    config.save_pretrained(folder)
    return folder


def write(size: str, folder: Path) -> None:
    import torch
    import transformers

    from gcore.prompts.tokenizer import build_char_tokenizer

    config = transformers.AutoConfig.from_pretrained(write_config(size, folder))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        torch.manual_seed(0)
        network = getattr(transformers, config.architectures[0])._from_config(config, dtype=torch.bfloat16)
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
