"""Folders of diffusers pipelines with tiny random networks and tokenizers made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "projection_dim": 16,
    "max_position_embeddings": 77,
    "eos_token_id": 1,
    "bos_token_id": 0,
}


def clip_tokenizer(folder: Path) -> Any:
    from transformers import CLIPTokenizer
    from transformers.models.clip.tokenization_clip import CLIPTokenizer as _  # noqa: F401

    folder.mkdir(parents=True, exist_ok=True)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77)


def t5_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((c, -2.0) for c in "\u2581abcdefghijklmnopqrstuvwxyz")]
    backend = Tokenizer(models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return T5TokenizerFast(tokenizer_object=backend, model_max_length=32, extra_ids=0)


def vae_of(channels: int) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        shift_factor=0.1,
        scaling_factor=1.5,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def save_sd3(folder: Path) -> Path:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    torch.manual_seed(0)
    tokenizer = clip_tokenizer(folder / "words")
    config = CLIPTextConfig(vocab_size=len(tokenizer), hidden_act="gelu", **CLIP)
    transformer = SD3Transformer2DModel(
        sample_size=4,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=8,
    )
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae_of(4),
        text_encoder=CLIPTextModelWithProjection(config),
        tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(config),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipe.save_pretrained(folder / "sd3")
    return folder / "sd3"


def save_flux(folder: Path, guidance_embeds: bool = True) -> Path:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(0)
    words, pieces = clip_tokenizer(folder / "words"), t5_tokenizer()
    t5 = T5Config(vocab_size=len(pieces), d_model=24, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=16,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 4, 8),
    )
    pipe = FluxPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae_of(4),
        text_encoder=CLIPTextModel(CLIPTextConfig(vocab_size=len(words), hidden_act="gelu", **CLIP)),
        tokenizer=words,
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=pieces,
    )
    name = "flux" if guidance_embeds else "schnell"
    pipe.save_pretrained(folder / name)
    return folder / name
