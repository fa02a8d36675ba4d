"""Audio clips of Qwen2-Audio: frames, tokens, engine, trainer and gradients, against transformers' own processor and
joint forward pass over one sequence. There, clips are padded to the window and masked; here they are not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gcore.config.base import Lora, Model
from gcore.content.media import BadMedia, Media
from gcore.media.audio import FILE, RATE, Clips
from gcore.models.networks import adapters_of, load_model
from gcore.models.towers import encode, positions_of, smallest_medium, tower_parameters
from gcore.prompts.processor import load_processor
from gcore.prompts.tokenizer import build_char_tokenizer, load_tokenizer
from gcore.training.media_model import MediaLogprobModel
from gcore.types import MicroBatch, UserError
from tests.vision_families import ALONE, CPU, TEXT, MediaWorld, computed, made_once, off, randomize, save, sound

CLOSE = 1e-5
SPECIAL = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
SETTINGS = {"feature_size": 16, "sampling_rate": RATE, "hop_length": 160, "n_fft": 400, "chunk_length": 2}
SETTINGS |= {"feature_extractor_type": "WhisperFeatureExtractor"}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
    "<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}="
)


def clip(seed: int, samples: int) -> dict[str, Any]:
    return {"type": "audio", "audio": {"array": sound(seed, samples), "sampling_rate": RATE}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


# lengths in samples: a frame is 160. One feature, two clips, the whole window, the window without its last frame
PROMPTS: list[list[dict[str, Any]]] = [
    [clip(0, 700), text("0+7")],
    [text("1"), clip(1, 8_000), text("+"), clip(2, 20_321), text("?")],
    [clip(3, 2 * RATE), text("2")],
    [clip(4, 2 * RATE - 170), text("2"), clip(1, 8_000)],
    [text("4+4")],
]


class Extractor(transformers.WhisperFeatureExtractor):
    """In numpy, as without torch: with torch, the transform is in float32."""

    def _torch_extract_fbank_features(self, waveform: Any, device: str = "cpu") -> Any:
        return self._np_extract_fbank_features(waveform, device)


def own_processor(tokenizer: Any, extractor: Any = Extractor) -> Any:
    options = {name: value for name, value in SETTINGS.items() if name != "feature_extractor_type"}
    return transformers.Qwen2AudioProcessor(extractor(**options), tokenizer, chat_template=TEMPLATE)


def save_audio(folder: Path) -> Path:
    tokenizer = build_char_tokenizer("0123456789+=?")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = TEMPLATE
    tower = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    tower |= {"num_mel_bins": 16, "max_source_positions": 100}
    words = {"model_type": "qwen2", "vocab_size": len(tokenizer), **TEXT, "tie_word_embeddings": False}
    token = tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    config = transformers.Qwen2AudioConfig(audio_config=tower, text_config=words, audio_token_index=token)
    torch.manual_seed(0)
    network = transformers.Qwen2AudioForConditionalGeneration(config)
    randomize(network)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / FILE).write_text(json.dumps(SETTINGS))
    return folder


class World(MediaWorld):
    def __init__(self, family: str, folder: Path) -> None:
        super().__init__(save_audio(folder), PROMPTS)
        self.own = own_processor(self.tokenizer)

    def inputs(self, content: Any) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(content.tokens_T.astype(np.int64))[None]
        found = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if content.media:
            clips = [np.array(medium.array.read()) for medium in content.media]
            made = self.own(text="<|AUDIO|>" * len(clips), audio=clips, sampling_rate=RATE, return_tensors="pt")
            found |= {name: made[name] for name in ("input_features", "feature_attention_mask")}
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    worlds = made_once(World, tmp_path_factory)
    yield next(worlds)("qwen2_audio")
    next(worlds, None)


# --- frames and tokens


@pytest.mark.parametrize("samples", [321, 480, 700, 8_000, 20_321, 2 * RATE - 170, 2 * RATE - 1, 2 * RATE])
def test_frames_are_those_of_transformers(world: World, samples: int):
    """Of a clip that is padded to the window: the convolutions read no frames behind those that are here."""
    given = sound(9, samples)
    found = Clips(SETTINGS, world.tokenizer).expand(given, given, 1)
    (expected,) = world.own.feature_extractor(given, sampling_rate=RATE)["input_features"]
    frames = found.inputs["input_features"]
    assert frames.shape == (16, min(-(-samples // 160) + 2, 200)) and frames.dtype == np.float32
    assert off(frames, expected[:, : frames.shape[1]]) < CLOSE
    (in_float32,) = transformers.WhisperFeatureExtractor(**SETTINGS)(given, sampling_rate=RATE)["input_features"]
    assert off(frames, in_float32[:, : frames.shape[1]]) < 2e-3


def test_silence_has_frames(world: World):
    given = np.zeros(4_000, np.float32)
    found = Clips(SETTINGS, world.tokenizer).expand(given, given, 1).inputs["input_features"]
    assert np.array_equal(found, np.full((16, 27), -1.5, np.float32))


def test_the_tokens_of_prompts_are_those_of_transformers(world: World):
    for parts, content in zip(PROMPTS, world.contents, strict=True):
        clips = [part["audio"]["array"] for part in parts if part["type"] == "audio"]
        whole = world.tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        options = {"audio": clips, "sampling_rate": RATE} if clips else {}
        assert world.own(text=whole, **options)["input_ids"][0] == content.tokens_P.tolist()
    media = world.contents[1].media
    assert [len(m.places) for m in media] == [12, 32] and [m.kind for m in media] == ["audio"] * 2
    assert world.contents[1].work.media == (("audio", 50), ("audio", 128))  # frames
    assert world.contents[0].work.media == (("audio", 5),) and len(world.contents[0].media[0].places) == 1
    again = Media.from_json(media[0].as_json())
    assert np.array_equal(again.array.read(), PROMPTS[1][1]["audio"]["array"]) and again.key == media[0].key
    assert positions_of(world.network.config, 5, media).tolist() == [[0, 1, 2, 3, 4]]


# --- engine and trainer


def test_engine_and_trainer_are_the_joint_forward_pass(world: World):
    """Packed and alone, for logprobs and for the values of a critic; a clip of several samples is encoded once."""
    keys = list(world.samples)
    expected = {key: world.reference(world.samples[key]) for key in keys}
    for key in keys:
        assert off(world.samples[key].rollout_logprobs_S, expected[key]) < CLOSE
    assert world.backend._media.encoded == 5  # of 12 in all requests
    critic = world.critic()
    values = {key: world.reference(world.samples[key], critic.network.score.weight[0]) for key in keys}
    for rows in ([keys[:3], keys[3:6], keys[6:]], [[key] for key in keys], [keys]):
        model = MediaLogprobModel(world.network)
        for model_, wanted in ((model, expected), (critic, values)):
            found = computed(model_, world.samples, rows)
            assert max(off(found[key], wanted[key]) for key in keys) < CLOSE
        assert model.encoded == 5


def test_gradients_are_those_of_the_joint_forward_pass(world: World):
    """Of encoder, projector and decoder, with packed rows and clips that samples share."""
    network, reference = (load_model(world.model, world.tokenizer, 0, torch.float32, CPU) for _ in range(2))
    model, keys = MediaLogprobModel(network), list(world.samples)
    rows = tuple(keys[:4]), tuple(keys[4:])
    width = max(sum(world.samples[key].content.size for key in row) for row in rows)
    packed = model.pack(MicroBatch(rows, width), world.samples, ALONE)
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=len(packed.targets_S)).astype(np.float32))
    weights /= len(weights)
    (model(packed)[0] * weights).sum().backward()
    for i, key in enumerate(packed.keys):
        (world.logprobs(reference, world.samples[key]) * weights[packed.sample_S == i]).sum().backward()
    found, expected = (dict(each.named_parameters()) for each in (network, reference))
    for name in expected:
        assert torch.allclose(found[name].grad, expected[name].grad, atol=CLOSE, rtol=1e-4), name
    towers = tower_parameters(network).keys()
    assert len(towers) > 30 and "model.multi_modal_projector.linear.weight" in towers
    assert all(float(expected[name].grad.abs().max()) > 1e-6 for name in towers)


def test_a_clip_is_encoded_alone(world: World):
    """To the last bit, whatever other clips are there."""
    media = [medium for content in world.contents for medium in content.media]
    with torch.no_grad():
        together = encode(world.network, media)
        for medium, (features,) in zip(media, together, strict=True):
            assert features.shape == (len(medium.places), 48)
            assert torch.equal(encode(world.network, [medium])[0][0], features)
        ((unused,),) = encode(world.network, [smallest_medium(world.network)])
    assert unused.shape == (1, 48)


def test_it_hears_the_clip(world: World):
    request = world.requests[1 * 2]

    def content(*clips: np.ndarray) -> Any:
        mark = "<|audio_bos|><|AUDIO|><|audio_eos|>"
        return world.processor.content(f"<bos>1{mark}+{mark}?=", [("audio", each) for each in clips])

    one, two = sound(1, 8_000), sound(2, 20_321)
    assert np.array_equal(content(one, two).tokens_P, request.content.tokens_P)
    asked = [replace(request, content=each) for each in (content(one, two), content(one[::-1].copy(), two))]
    same, turned = world.generate(asked)
    assert np.array_equal(same.logprobs_S, world.completions[2].logprobs_S)
    assert off(same.logprobs_S[:1], turned.logprobs_S[:1]) > 1e-4


def test_adapters_fit_the_encoder(world: World):
    layers = adapters_of(world.network, Lora(parts=["vision"])).layers
    assert "model.multi_modal_projector.linear" in layers and len(layers) == 2 * 6 + 1
    assert all(name.startswith(("model.audio_tower.layers.", "model.multi_modal")) for name in layers)


# --- what does not fit


def test_clips_that_do_not_fit_are_refused(world: World, tmp_path: Path):
    def row(samples: int) -> dict[str, Any]:
        return {"prompt": "1", "audio": {"array": sound(0, samples), "sampling_rate": RATE}}

    with pytest.raises(BadMedia, match=r"an audio clip of 0\.020 seconds; expected more than 0\.02 and at most 2, as"):
        world.templater.content(row(320))
    with pytest.raises(BadMedia, match=r"an audio clip of 2\.000 seconds; expected more than 0\.02 and at most 2, as"):
        world.templater.content(row(2 * RATE + 1))
    with pytest.raises(UserError, match="audio, and placeholders of no image in the prompt"):
        world.processor.content("1", [("audio", sound(0, 700))])
    for engine in ("vllm", "sglang"):
        there = load_processor(world.model, world.tokenizer, None, engine=engine)
        with pytest.raises(UserError, match=rf"generation\.engine={engine} gets only .*use embedded for audio clips"):
            there.content("<|AUDIO|>", [("audio", sound(0, 700))])
    model = Model(path=str(save("gemma3", tmp_path)))
    gemma = load_processor(model, load_tokenizer(model), None)
    with pytest.raises(UserError, match="an audio clip; expected images: audio clips are not supported for gemma3"):
        gemma.content("1", [("audio", sound(0, 700))])
    (tmp_path / "rate").mkdir()
    (tmp_path / "rate" / FILE).write_text(json.dumps({**SETTINGS, "sampling_rate": 24_000}))
    with pytest.raises(UserError, match="sampling_rate=24000; expected 16000"):
        Clips(json.loads((tmp_path / "rate" / FILE).read_text()), world.tokenizer)
