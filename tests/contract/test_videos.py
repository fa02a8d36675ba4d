"""Videos of Qwen-VL: patches, the text of the prompt, positions, engine and trainer, against transformers' own joint
forward pass over one sequence.

transformers cannot process videos without torchvision, so pixels are compared with plain loops. docs/vision.md has a
comparison with its video processors.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from gcore.config.base import Model
from gcore.content.media import BadMedia, Media, Video
from gcore.media.videos import VideoProcessor, edges_of_video
from gcore.models.towers import positions_of
from gcore.prompts.processor import load_processor
from gcore.prompts.tokenizer import load_tokenizer
from gcore.training.media_model import MediaLogprobModel
from gcore.types import Pixels, UserError
from tests.vision_families import HALF, VIDEOS, MediaWorld, computed, made_once, off, picture, save

CLOSE = {"qwen3_5": 5e-5}  # as in test_families.py, where it has a delta rule; else 2e-5
FAMILIES = list(VIDEOS)


def frames(seed: int, number: int, height: int = 16, width: int = 16) -> Pixels:
    return np.stack([picture(100 * seed + i, height, width) for i in range(number)])


def video(seed: int, number: int, height: int = 16, width: int = 16, **more: Any) -> dict[str, Any]:
    return {"type": "video", "video": frames(seed, number, height, width), **more}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


# the parts of each prompt: an odd number of frames, two videos and an image, frames that are resized, no video
PROMPTS: list[list[dict[str, Any]]] = [
    [video(0, 5), text("0+7")],
    [
        text("1"),
        video(1, 4, 16, 24, fps=1.0),
        text("+"),
        {"type": "image", "image": picture(7)},
        video(2, 2, fps=0.7),
        text("?"),
    ],
    [video(3, 6, 20, 30), text("2")],
    [{"type": "image", "image": picture(8)}, text("3")],
    [text("4+4")],
]


class World(MediaWorld):
    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        super().__init__(save(family, folder), PROMPTS)

    def inputs(self, content: Any) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(content.tokens_T.astype(np.int64))[None]
        config = self.network.config
        kinds = (tokens == config.image_token_id).int() + 2 * (tokens == config.video_token_id).int()
        found = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "mm_token_type_ids": kinds}
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            own = [medium.tensors() for medium in content.media if medium.kind == kind]
            if own:
                found[pixels] = torch.cat([torch.from_numpy(np.array(each["pixel_values"])) for each in own])
                found[f"{kind}_grid_thw"] = torch.cat([torch.from_numpy(each["image_grid_thw"]) for each in own])
        if self.family == "qwen2_5_vl" and "video_grid_thw" in found:
            seconds = [medium.seconds for medium in content.media if medium.kind == "video"]
            found["second_per_grid_ts"] = torch.tensor(seconds)
        return found


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    yield from made_once(World, tmp_path_factory)


# --- pixels


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("number", [4, 5])
def test_patches_hold_two_frames(family: str, number: int):
    """Features of 2 x 2 patches, row by row; of each patch the channels, then the frames, then its pixels."""
    made = VideoProcessor(family, VIDEOS[family])
    given = frames(1, number, 16, 24)
    found = made.inputs(given)
    padded = np.concatenate([given, given[-1:]]) if number % 2 else given
    values = padded.astype(np.float32) / 255 * 2 - 1  # HALF
    expected = []
    for time, row, column in itertools.product(range(len(padded) // 2), range(2), range(3)):
        for down, right in itertools.product(range(2), range(2)):
            y, x = 4 * (2 * row + down), 4 * (2 * column + right)
            patch = values[2 * time : 2 * time + 2, y : y + 4, x : x + 4]
            expected.append(patch.transpose(3, 0, 1, 2).flatten())
    assert HALF["image_mean"] == [0.5] * 3 and found["image_grid_thw"].tolist() == [[len(padded) // 2, 4, 6]]
    assert off(found["pixel_values"], np.stack(expected)) < 1e-6


def test_the_size_of_frames_is_that_of_transformers():
    rng = np.random.default_rng(0)
    for _ in range(500):
        number, height, width = (int(n) for n in rng.integers([2, 8, 8], [64, 900, 900]))
        limits = {"factor": 28, "min_pixels": 10_000, "max_pixels": 2_000_000}
        expected = smart_resize(num_frames=number, height=height, width=width, temporal_factor=2, **limits)
        assert edges_of_video(number, height, width, 2, 28, 10_000, 2_000_000) == expected
    with pytest.raises(UserError, match="a video of 1 frames; expected at least 2"):
        edges_of_video(1, 32, 32, 2, 28, 1, 9999)


def test_limits_of_frames():
    """Of Qwen2.5-VL for each frame, of Qwen3-VL for all together, and the cap that files may ask for."""
    given = frames(0, 8, 32, 32)
    small = {**VIDEOS["qwen3_vl"], "size": {"shortest_edge": 64, "longest_edge": 2048}}

    def grid(family: str, **more: Any) -> list[int]:
        return VideoProcessor(family, {**small, **more}).inputs(given)["image_grid_thw"][0].tolist()

    assert grid("qwen3_vl") == [4, 4, 4] and grid("qwen2_5_vl") == [4, 8, 8]
    assert grid("qwen2_5_vl", min_pixels=64, max_pixels=256) == [4, 4, 4]
    assert grid("qwen3_vl", cap_pixels_per_frame=True, max_video_tokens=1) == [4, 2, 2]
    assert VideoProcessor("qwen2_5_vl", {}).inputs(given)["image_grid_thw"][0].tolist() == [4, 24, 24]  # 128 * 28**2


# --- prompts


def test_the_text_of_a_prompt(worlds: Callable[[str], World]):
    """As the processors of transformers expand the placeholder. Frames are at 0, 0.5, 1, 1.5, 2 seconds, the last one
    twice; then at 0, 1, 2, 3; then at 0 and 1.4."""

    def shown(family: str, number: int) -> str:
        world = worlds(family)
        return str(world.tokenizer.decode(world.contents[number].tokens_P)).replace("<video>" * 4, "[4]")

    assert shown("qwen2_5_vl", 0).endswith("<start>[4][4][4]<end>0+7=")
    parts = "".join(f"<{time} seconds><start>[4]<end>" for time in ("0.2", "1.2", "2.0"))
    assert shown("qwen3_vl", 0).endswith(f"<start>{parts}<end>0+7=")
    image = "<start>" + "<image>" * 4 + "<end>"
    first = "".join(f"<{time} seconds><start>{'<video>' * 6}<end>" for time in ("0.5", "2.5")).replace(
        "<video>" * 4, "[4]"
    )
    assert shown("qwen3_vl", 1).endswith(f"1<start>{first}<end>+{image}<start><0.7 seconds><start>[4]<end><end>?=")


@pytest.mark.parametrize("family", FAMILIES)
def test_media_of_a_prompt(family: str, worlds: Callable[[str], World]):
    world = worlds(family)
    found = world.contents[1].media
    assert [m.kind for m in found] == ["video", "image", "video"]
    assert [m.grid for m in found] == [(2, 2, 3), (1, 2, 2), (1, 2, 2)]
    assert [m.seconds for m in found] == [2.0, 0.0, 2 / 0.7]
    assert [len(m.places) for m in found] == [12, 4, 4]
    assert np.array_equal(found[0].array.read(), frames(1, 4, 16, 24))
    assert Media.from_json(found[0].as_json()).seconds == 2.0
    assert [size for _, size in world.contents[1].work.media] == [
        384,
        384,
        256,
        256,
    ]  # the tower encodes two frames like an image
    other = [{"role": "user", "content": [replace_fps(part, 3.0) for part in PROMPTS[0]]}]
    assert world.templater.content({"prompt": other})[2].prefix_key() != world.contents[0].prefix_key()


def replace_fps(part: dict[str, Any], fps: float) -> dict[str, Any]:
    return {**part, "fps": fps} if part["type"] == "video" else part


def test_videos_that_do_not_fit_are_refused(worlds: Callable[[str], World], tmp_path: Path):
    world = worlds("qwen3_vl")
    with pytest.raises(BadMedia, match="a video of 1 frames; expected at least 2"):
        world.templater.content({"prompt": "1", "video": frames(0, 1)})
    with pytest.raises(BadMedia, match="a video with fps=0; expected a number above 0"):
        world.templater.content({"prompt": [{"role": "user", "content": [video(0, 2, fps=0)]}]})
    with pytest.raises(UserError, match="video, and placeholders of image in the prompt"):
        world.processor.content("<start><image><end>", [("video", Video(frames(0, 2), 2.0))])
    vllm = load_processor(world.model, world.tokenizer, None, engine="vllm")
    with pytest.raises(UserError, match=r"a video; expected images: generation\.engine=vllm gets only images"):
        vllm.content("<start><video><end>", [("video", Video(frames(0, 2), 2.0))])
    model = Model(path=str(save("gemma3", tmp_path)))
    gemma = load_processor(model, load_tokenizer(model), None)
    with pytest.raises(UserError, match="a video; expected images: videos are not supported for gemma3"):
        gemma.content("1", [("video", Video(frames(0, 2), 2.0))])


# --- engine and trainer


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_transformers(family: str, worlds: Callable[[str], World]):
    world = worlds(family)
    for sample in world.samples.values():
        given = world.inputs(sample.content)
        if "image_grid_thw" not in given and "video_grid_thw" not in given:
            continue
        given = {name: value for name, value in given.items() if not name.startswith("pixel")}
        expected, _ = world.network.model.get_rope_index(**given)
        found = positions_of(world.network.config, sample.content.size, sample.content.media)
        assert found.tolist() == expected[:, 0].tolist()
    times = positions_of(world.network.config, world.contents[0].size, world.contents[0].media)[0]
    step = np.diff(times[world.contents[0].media[0].places[::4]])
    assert step.tolist() == ([4, 4] if family == "qwen2_5_vl" else [17, 17])  # a second; 2 rows and 15 tokens of text


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_are_the_joint_forward_pass(family: str, worlds: Callable[[str], World]):
    """Packed and alone; siblings share the features of their videos."""
    world = worlds(family)
    keys = list(world.samples)
    expected = {key: world.reference(world.samples[key]) for key in keys}
    for key in keys:
        assert off(world.samples[key].rollout_logprobs_S, expected[key]) < CLOSE.get(family, 2e-5)
    critic = world.critic()
    values = {key: world.reference(world.samples[key], critic.network.score.weight[0]) for key in keys}
    model = MediaLogprobModel(copy.deepcopy(world.network))
    for rows in ([keys[:3], keys[3:6], keys[6:]], [[key] for key in keys], [keys]):
        model.encoded = 0
        for model_, wanted in ((model, expected), (critic, values)):
            found = computed(model_, world.samples, rows)
            assert max(off(found[key], wanted[key]) for key in keys) < CLOSE.get(family, 2e-5)
        assert model.encoded == 6


@pytest.mark.parametrize("family", FAMILIES)
def test_it_sees_the_order_of_frames_and_the_time(family: str, worlds: Callable[[str], World]):
    world = worlds(family)
    request = world.requests[0]
    (own,) = request.content.media
    turned = world.processor.content("<start><video><end>0+7=", [("video", Video(frames(0, 5)[::-1].copy(), 2.0))])
    slow = world.processor.content("<start><video><end>0+7=", [("video", Video(frames(0, 5), 0.5))])
    plain = world.processor.content("<start><video><end>0+7=", [("video", Video(frames(0, 5), 2.0))])
    a, b, c = world.generate([replace(request, content=each) for each in (plain, turned, slow)])
    assert off(a.logprobs_S[:1], b.logprobs_S[:1]) > 1e-4 and off(a.logprobs_S[:1], c.logprobs_S[:1]) > 1e-4
    assert own.key == plain.media[0].key
