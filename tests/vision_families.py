"""Small models of every family that takes media, with random weights, their processors, engines and samples."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import transformers

from gcore.config.base import Model
from gcore.config.data import Data, Dataset
from gcore.content.media import ArrayRef, Media, hash_of
from gcore.generation.embedded import EmbeddedBackend
from gcore.generation.engine_shell import SteppedEngine
from gcore.generation.noise import noise_key
from gcore.media.images import make_processor
from gcore.models.decoders import forbid, forbidden_tokens
from gcore.models.networks import load_model, make_empty
from gcore.prompts.processor import load_processor
from gcore.prompts.source import Templater
from gcore.prompts.tokenizer import build_char_tokenizer, load_tokenizer
from gcore.training.critic import open_critic, value_model
from gcore.training.shards import fill
from gcore.types import Completion, Key, MicroBatch, Pixels, Request, Sample, SamplingParams

ALPHABET = "0123456789+=? \n.<>cdenos"  # with the characters of timestamps
SPECIAL = ("<image>", "<start>", "<end>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
SPECIAL += ("<|video|>", "<audio>", "<start_audio>", "<end_audio>", "<|image|>", "<|image_start|>", "<|image_end|>")
SPECIAL += ("<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
QWEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
ROWS = tuple(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% elif part['type'] == 'video' %}<start><video><end>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}="
)
PLACEHOLDERS = {"gemma3": "<start>", "llama4": "<|image|>", **dict.fromkeys(QWEN, "<start><image><end>")}
TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN_VISION = {"depth": 2, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "patch_size": 4}
GDN = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS |= {"shared_expert_intermediate_size": 24}
N_GRAMS = {"hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [1, 3], "ple_embed_dim": 16, "ple_conv_kernel_size": 2}
N_GRAMS |= {"heads_per_ngram": 2, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 4}
N_GRAMS |= {"split_ngram_parts": 2}
INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 24, "indexer_budget": 6}
INDEXER |= {"indexer_compress_ratio": 3}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
TILE = {"height": 16, "width": 16}


def tokenizer() -> Any:
    made = build_char_tokenizer(ALPHABET)
    made.add_special_tokens({"additional_special_tokens": [*SPECIAL, *ROWS]})
    names = {"image_token": "<image>", "boi_token": "<start>", "eoi_token": "<end>", "video_token": "<video>"}
    names |= {"start_image_token": "<start>", "end_image_token": "<end>", "context_image_token": "<image>"}
    names |= {"audio_token": "<audio>", "boa_token": "<start_audio>", "eoa_token": "<end_audio>"}
    names |= {"vision_start_token": "<start>", "vision_end_token": "<end>"}
    made._set_model_specific_special_tokens(names)
    return made


def _text(kind: str, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, "vocab_size": len(tokenizer()), **TEXT, **more}


def _ids() -> dict[str, int]:
    token = tokenizer().convert_tokens_to_ids
    return {"image_token_id": token("<image>"), "video_token_id": token("<video>")}


def _qwen(kind: str) -> Any:
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    if kind == "Qwen3VL":
        text = _text("qwen3_vl_text", head_dim=12, rope_parameters={**sections, "mrope_interleaved": True})
        vision = {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    else:
        text = _text("qwen2_5_vl_text", rope_parameters=sections)
        vision = {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48}
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    config = getattr(transformers, f"{kind}Config")
    return config(text_config=text, vision_config=vision, tie_word_embeddings=True, **_ids())


CLASSES = {"qwen3_5": "Qwen3_5Config", "qwen3_5_moe": "Qwen3_5MoeConfig", "qwen4_exp": "Qwen4ExpConfig"}


def _qwen3_5(kind: str, attention: str = "full_attention", **more: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]}
    layers = {"num_hidden_layers": 4, "layer_types": ["linear_attention", attention] * 2}
    sizes = {"head_dim": 24, "rope_parameters": {**rope, "mrope_interleaved": True}}
    vision = {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48}
    text = _text(f"{kind}_text", **sizes, **layers, **GDN, **more)
    vision["num_position_embeddings"] = 64
    config = getattr(transformers, CLASSES[kind])
    return config(text_config=text, vision_config=vision, tie_word_embeddings=True, **_ids())


def _gemma3() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    text = _text("gemma3_text", head_dim=12, query_pre_attn_scalar=12, sliding_window=4)
    text |= {"layer_types": ["sliding_attention", "full_attention"]}
    text |= {"rope_parameters": {"full_attention": rope, "sliding_attention": rope}}
    vision = {**VISION, "image_size": 16, "patch_size": 4, "vision_use_head": False}
    ids = {"image_token_id": _ids()["image_token_id"], "mm_tokens_per_image": 4}
    return transformers.Gemma3Config(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)


def _gemma4(**more: Any) -> Any:
    text = _text("gemma4_text", head_dim=12, global_head_dim=16, sliding_window=16, **more)
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    vision = {**VISION, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2}
    vision |= {"position_embedding_size": 512}
    token = tokenizer().convert_tokens_to_ids
    ids = {"image_token_id": token("<image>"), "video_token_id": token("<|video|>"), "audio_token_id": token("<audio>")}
    return transformers.Gemma4Config(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)


def _llama4() -> Any:
    kinds = ["chunked_attention", "full_attention"]
    text = _text("llama4_text", head_dim=12, intermediate_size_mlp=48, attention_chunk_size=8, layer_types=kinds)
    text |= {"no_rope_layers": [1, 0], "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    vision = {**VISION, "image_size": 16, "patch_size": 4, "projector_input_dim": 32, "projector_output_dim": 32}
    vision |= {"vision_output_dim": 32, "intermediate_size": 128}
    token = tokenizer().convert_tokens_to_ids("<|patch|>")
    return transformers.Llama4Config(text_config=text, vision_config=vision, image_token_index=token)


def _internvl() -> Any:
    vision = {**VISION, "image_size": [16, 16], "patch_size": [4, 4], "use_qk_norm": True}
    ids = {"image_token_id": _ids()["image_token_id"]}
    return transformers.InternVLConfig(
        text_config=_text("qwen2"), vision_config=vision, tie_word_embeddings=True, **ids
    )


def _idefics(kind: str) -> Any:
    vision = {**VISION, "image_size": 16, "patch_size": 4}
    rest = {"scale_factor": 2, "pad_token_id": 0, "tie_word_embeddings": True}
    config = getattr(transformers, f"{kind}Config")
    return config(text_config=_text("llama"), vision_config=vision, image_token_id=_ids()["image_token_id"], **rest)


def _llava() -> Any:
    vision = {
        "model_type": "siglip_vision_model",
        **VISION,
        "image_size": 16,
        "patch_size": 4,
        "vision_use_head": False,
    }
    rest = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]], "vision_feature_layer": -1}
    rest |= {"vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"}
    return transformers.LlavaOnevisionConfig(
        text_config=_text("qwen2"), vision_config=vision, tie_word_embeddings=True, **rest, **_llava_ids()
    )


def _llava_ids() -> dict[str, int]:
    return {f"{name}_token_index": _ids()[f"{name}_token_id"] for name in ("image", "video")} | _ids()


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VL"),
    "qwen3_vl": lambda: _qwen("Qwen3VL"),
    "qwen3_5": lambda: _qwen3_5("qwen3_5"),
    "qwen3_5_moe": lambda: _qwen3_5("qwen3_5_moe", **EXPERTS),
    "qwen4_exp": lambda: _qwen3_5("qwen4_exp", "indexed_attention", **EXPERTS, **N_GRAMS, **INDEXER),
    "gemma3": _gemma3,
    "gemma4": lambda: _gemma4(
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=len(tokenizer()), num_kv_shared_layers=2
    ),
    "gemma4-blocks": lambda: _gemma4(
        hidden_size_per_layer_input=0, use_bidirectional_attention="vision", attention_k_eq_v=True
    ),
    "llama4": _llama4,
    "internvl": _internvl,
    "idefics3": lambda: _idefics("Idefics3"),
    "smolvlm": lambda: _idefics("SmolVLM"),
    "llava_onevision": _llava,
}
SPLIT = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": True, **HALF}
PATCHED = {"shortest_edge": 64, "longest_edge": 512}
IMAGES: dict[str, dict[str, Any]] = {  # settings of image processors
    **{family: {**HALF, "patch_size": 4, "merge_size": 2, "size": dict(PATCHED)} for family in QWEN},
    "gemma3": {**HALF, "size": TILE},
    "gemma4": {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
    "llama4": {**HALF, "size": TILE, "max_patches": 4},
    "internvl": {**HALF, "size": TILE, "crop_to_patches": True, "min_patches": 1, "max_patches": 3},
    "idefics3": SPLIT,
    "smolvlm": SPLIT,
    "llava_onevision": {**HALF, "size": TILE, "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]},
}
SETTINGS: dict[str, dict[str, Any]] = {  # of processors
    "gemma3": {"image_seq_length": 4},
    "llama4": {"patch_size": 4, "pixel_shuffle_ratio": 0.5},
    "internvl": {"image_seq_length": 4},
    "idefics3": {"image_seq_len": 4},
    "smolvlm": {"image_seq_len": 4},
    "llava_onevision": {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
}


# of video processors: Qwen3-VL limits the pixels of all frames, Qwen2.5-VL those of each frame
VIDEOS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": IMAGES["qwen2_5_vl"],
    "qwen3_vl": {**IMAGES["qwen3_vl"], "size": {"shortest_edge": 128, "longest_edge": 4096}},
    "qwen3_5": {**IMAGES["qwen3_vl"], "size": {"shortest_edge": 128, "longest_edge": 4096}},
}


def processor(family: str) -> Any:
    """Of transformers."""
    name = family_of(family)
    made = make_processor(name, IMAGES[name], SETTINGS.get(name, {}), tokenizer())
    return _gemma4_processor(made) if name == "gemma4" else made


def _gemma4_processor(made: Any) -> Any:
    """Its module imports torchvision, and calls nothing of it with an image processor for Pillow."""
    names = (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    )
    with mock.patch.dict(sys.modules, {name: MagicMock(__spec__=None) for name in names}):
        module = importlib.import_module("transformers.models.gemma4.processing_gemma4")
    lenient = type("", (module.Gemma4Processor,), {"check_argument_for_proper_class": lambda *_: None})
    return lenient(None, made.image_processor, made.tokenizer, None)


def family_of(name: str) -> str:
    """Some families have two kinds of models here: gemma4-blocks -> gemma4"""
    return name.partition("-")[0]


def save(family: str, folder: Path, scale: float = 1.2) -> Path:
    """A model's folder, with weights large enough that attention chooses."""
    torch.manual_seed(0)
    network = transformers.AutoModelForImageTextToText.from_config(CONFIGS[family]())
    family = family_of(family)
    randomize(network, scale, embedding=0.1 if "gemma" in family else 0.4)  # Gemma multiplies it
    network.save_pretrained(folder)
    made = tokenizer()
    made.chat_template = TEMPLATE.replace("IMAGE", PLACEHOLDERS.get(family, "<image>"))
    made.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES[family]))
    (folder / "processor_config.json").write_text(json.dumps(SETTINGS.get(family, {})))
    if family in VIDEOS:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS[family]))
    return folder


@torch.no_grad()
def randomize(network: Any, scale: float = 1.2, embedding: float = 0.4) -> None:
    for name, parameter in network.named_parameters():
        if "linear_attn" in name and parameter.dim() > 1:  # as in test_families.py
            parameter.normal_(std=parameter.shape[-1] ** -0.5 * 0.4)
        elif parameter.dim() > 1:
            parameter.normal_(std=embedding if "embed_tokens" in name else parameter[0].numel() ** -0.5 * scale)
        elif name.endswith("bias"):
            parameter.normal_(std=0.3)


def picture(seed: int, height: int = 16, width: int = 16) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def sound(seed: int, samples: int) -> np.ndarray:
    """Tones and noise."""
    rng, at = np.random.default_rng(seed), np.arange(samples) / 16_000
    tones = sum(np.sin(2 * np.pi * frequency * at) for frequency in rng.uniform(80, 4000, 3))
    return (0.2 * tones + 0.05 * rng.standard_normal(samples)).astype(np.float32)


ALONE: Any = SimpleNamespace(size=1)  # ranks that share a sample: one


def computed(model: Any, samples: Mapping[Key, Sample], rows: list[list[Key]]) -> dict[Key, np.ndarray]:
    """The first output of a StepModel, for samples that are packed into these rows."""
    width = max(sum(samples[key].content.size for key in row) for row in rows)
    packed = model.pack(MicroBatch(tuple(map(tuple, rows)), width), samples, ALONE)
    with torch.no_grad():
        found = model(packed)[0]
    return {key: found[packed.sample_S == i].numpy() for i, key in enumerate(packed.keys)}


def made_once(make: Callable[[str, Path], Any], folders: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """For a fixture: what `make` makes of a family and a folder. Engines are closed at the end."""
    made: dict[str, Any] = {}

    def world(family: str) -> Any:
        if family not in made:
            made[family] = make(family, folders.mktemp(family))
        return made[family]

    yield world
    for one in made.values():
        one.engine.close()


def raw_image(pixels: Pixels | ArrayRef) -> Media:
    """An image that was not processed, for engines that do so themselves."""
    key = pixels.path if isinstance(pixels, ArrayRef) else hash_of(pixels)
    return Media("image", key, pixels, work=(("image", pixels.shape[0] * pixels.shape[1]),))


CPU = torch.device("cpu")


class MediaWorld:
    """The model in a folder, its engine, and the completions of prompts, given as their parts, two siblings each."""

    def __init__(self, folder: Path, prompts: list[list[dict[str, Any]]], max_length: int = 384) -> None:
        self.model = Model(path=str(folder))
        self.tokenizer = load_tokenizer(self.model)
        self.processor = load_processor(self.model, self.tokenizer, folder / "media")
        self.network = load_model(self.model, self.tokenizer, 0, torch.float32, CPU, max_length=max_length)
        self.templater = Templater(self.tokenizer, Data(train=Dataset(path="x")), processor=self.processor)
        rows = [{"prompt": [{"role": "user", "content": parts}]} for parts in prompts]
        self.contents = [self.templater.prompt(row, i, i).content for i, row in enumerate(rows)]
        params = SamplingParams(6, stop_tokens=(self.tokenizer.eos_token_id,))
        self.requests = [Request(c, params, noise_key(i, s)) for i, c in enumerate(self.contents) for s in range(2)]
        self.backend = EmbeddedBackend(self.network, max_concurrent=16, max_length=max_length)
        self.engine = SteppedEngine(self.backend)
        self.completions = self.generate(self.requests)
        self.samples = {
            (i, 0): Sample(i, 0, r.content.extended(c.content), np.ones(c.content.num_steps, bool), c.logprobs_S)
            for i, (r, c) in enumerate(zip(self.requests, self.completions, strict=True))
        }

    def generate(self, requests: list[Request]) -> list[Completion]:
        return asyncio.run(asyncio.wait_for(self.engine.generate(requests), 60))

    def inputs(self, content: Any) -> dict[str, torch.Tensor]:
        """Of the joint forward pass of transformers."""
        raise NotImplementedError

    def logprobs(self, network: Any, sample: Sample) -> torch.Tensor:
        """Of the steps, by transformers alone."""
        content: Any = sample.content
        first, steps = len(content.tokens_P) - 1, torch.from_numpy(content.tokens_S.astype(np.int64))
        logits = network(**self.inputs(content)).logits[0, first:-1].float()
        logprobs = forbid(logits, forbidden_tokens(network.config)).log_softmax(-1)
        return logprobs.gather(-1, steps[:, None])[:, 0]

    def reference(self, sample: Sample, head: torch.Tensor | None = None) -> np.ndarray:
        """Logprobs of the steps by transformers alone; with a `head`, their values."""
        content: Any = sample.content
        with torch.no_grad():
            if head is None:
                return self.logprobs(self.network, sample).numpy()
            hidden = self.network.model(**self.inputs(content)).last_hidden_state
            return (hidden[0, len(content.tokens_P) - 1 : -1] @ head).numpy()

    def critic(self) -> Any:
        """With a random head."""
        critic = value_model(make_empty(self.model, self.tokenizer, 384, scorer=True))
        fill(critic.network, open_critic(critic.network, self.model, 0, self.tokenizer), CPU)
        with torch.no_grad():
            critic.network.score.weight.normal_(generator=torch.Generator().manual_seed(1))
        return critic


def off(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference."""
    return float(np.abs(a - b).max())
