"""Rewards for pictures: a tiny random CLIP model against its own parts, compressed sizes, and their use by a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gcore.content.media import store
from gcore.rewarding.pictures import Clip, jpeg_kilobytes
from gcore.rewarding.signatures import load_reward
from gcore.rewarding.worker import call_all
from gcore.types import UserError
from tests.unit.tiny_pipelines import CLIP, clip_tokenizer

SETTINGS = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}, "image_processor_type": "CLIP"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from transformers import CLIPConfig, CLIPModel

    place = tmp_path_factory.mktemp("clip")
    tokenizer = clip_tokenizer(place / "words")
    text = {**CLIP, "vocab_size": len(tokenizer)}
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**tower, "image_size": 8, "patch_size": 4, "projection_dim": 16}
    torch.manual_seed(0)
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    CLIPModel(config).save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    (place / "model" / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return place / "model"


def pictures(number: int = 3, side: int = 8) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (side, side, 3)).astype(np.uint8) for _ in range(number)]


def test_the_cosine_of_picture_and_prompt(folder):
    from transformers import CLIPModel, CLIPTokenizer

    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), CLIPTokenizer.from_pretrained(folder)
    images, prompts = pictures(), ["a cat", "a dog", "sun"]
    found = Clip(str(folder))(images=images, prompts=prompts, answer=["x"] * 3)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
    for image, prompt, value in zip(images, prompts, found, strict=True):  # one by one: padding changes nothing
        pixels = (torch.tensor(image).permute(2, 0, 1) / 255 - mean) / std
        with torch.no_grad():
            seen = model.visual_projection(model.vision_model(pixels[None]).pooler_output)
            read = model.text_projection(model.text_model(**tokenizer([prompt], return_tensors="pt")).pooler_output)
        assert value == pytest.approx(float(torch.cosine_similarity(seen, read)), abs=1e-5)
    assert len(set(found)) == 3
    scale = float(model.logit_scale.detach().exp())
    scaled = Clip(str(folder), learned_scale=True, factor=0.5)(images=images, prompts=prompts)
    assert scaled == pytest.approx([0.5 * scale * value for value in found], rel=1e-5)


def test_large_pictures_are_resized_and_long_prompts_cut(folder):
    (value,) = Clip(str(folder))(images=pictures(1, side=32), prompts=["word " * 200])
    assert -1 <= value <= 1


def test_it_is_a_reward_of_a_recipe(folder, tmp_path):
    path = "gcore.rewarding.pictures:Clip"
    clip = load_reward(path, {"model": str(folder)})
    assert clip.missing({"prompt"}) == []
    images, prompts = pictures(2), ["a cat", "a dog"]
    (rewards,) = call_all(clip, [{"images": [store(image, tmp_path) for image in images], "prompts": prompts}])
    assert rewards == Clip(str(folder))(images=images, prompts=prompts)
    with pytest.raises(UserError, match="no such folder"):
        Clip("/nowhere")
    with pytest.raises(UserError, match="Clip"):
        load_reward(path, {"modell": "x"})


def test_noise_is_larger_than_grey():
    flat = np.full((64, 64, 3), 9, np.uint8)
    noise, grey = jpeg_kilobytes([*pictures(1, 64), flat], ["x", "y"])
    assert noise > 4 * grey > 0
    assert jpeg_kilobytes(pictures(1, 64), ["x"], quality=20)[0] < noise
