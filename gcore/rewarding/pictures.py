"""Rewards for pictures of diffusion models: scorers of the CLIP family, and the size of a compressed picture.

    rewards.functions: [{name: clip, path: "gcore.rewarding.pictures:Clip", args: {model: /models/clip-vit-large}}]

They run in reward workers, which read the pictures from files. A class is constructed once per worker.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gcore.types import UserError


class Clip:
    """How well a picture matches its prompt: the cosine of the two embeddings of a CLIP model of transformers.

    `model`: its folder. `processor`: a folder with its tokenizer and preprocessor_config.json, if these are elsewhere
    (PickScore). `learned_scale`: times the model's own temperature, as PickScore's numbers are given. `factor`: times
    this number.
    """

    def __init__(
        self,
        model: str,
        processor: str | None = None,
        learned_scale: bool = False,
        factor: float = 1.0,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        import torch
        from transformers import CLIPModel, CLIPTokenizer
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        source = Path(processor or model)
        for folder, key in ((Path(model), "model"), (source, "processor")):
            if not folder.is_dir():
                raise UserError(f"Clip: args.{key}={folder}: no such folder; expected one of a CLIP model")
        if not (file := source / "preprocessor_config.json").is_file():
            raise UserError(
                f"Clip: no {file}; expected the settings of the image processor (args.processor: its folder)"
            )
        self._images = CLIPImageProcessorPil.from_pretrained(str(source), local_files_only=True)
        self._tokenizer = CLIPTokenizer.from_pretrained(str(source), local_files_only=True)
        loaded: Any = CLIPModel.from_pretrained(model, dtype=getattr(torch, dtype), local_files_only=True)
        self._model = loaded.to(device).eval()
        scale = self._model.logit_scale.exp().item() if learned_scale else 1.0
        self._factor = factor * scale

    def __call__(self, images: Sequence[np.ndarray], prompts: Sequence[str], **_: Any) -> list[float]:
        import torch

        pixels = self._images(list(images), return_tensors="pt", input_data_format="channels_last")["pixel_values"]
        limit = self._model.config.text_config.max_position_embeddings
        texts = self._tokenizer(list(prompts), padding=True, truncation=True, max_length=limit, return_tensors="pt")
        inputs = {"pixel_values": pixels.to(self._model.dtype), **texts}
        with torch.inference_mode():
            outputs = self._model(**{name: tensor.to(self._model.device) for name, tensor in inputs.items()})
        cosines = torch.nn.functional.cosine_similarity(outputs.image_embeds.float(), outputs.text_embeds.float())
        rewards: list[float] = (cosines * self._factor).tolist()
        return rewards


def jpeg_kilobytes(images: Sequence[np.ndarray], prompts: Sequence[str], quality: int = 95, **_: Any) -> list[float]:
    """Kilobytes of a picture as JPEG: with a negative weight, a reward for compressible pictures (DDPO)."""
    from PIL import Image

    sizes = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(image)).save(file, "JPEG", quality=quality)
        sizes.append(file.tell() / 1000)
    return sizes
