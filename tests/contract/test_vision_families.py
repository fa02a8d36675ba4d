"""Vision-language families: engine, trainer and processing agree with transformers, for ragged numbers and sizes of
images, packed and alone.

The reference is the library's own processor over a whole prompt, and its own joint forward pass over one sequence.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gcore.config.base import Lora, Model, PolicyModel
from gcore.config.data import Data, Dataset
from gcore.generation.embedded import EmbeddedBackend
from gcore.generation.engine_shell import SteppedEngine
from gcore.generation.noise import noise_key
from gcore.media.images import NEED_TORCHVISION
from gcore.models.decoders import decoder_of, forbid, forbidden_tokens
from gcore.models.networks import Adapters, adapters_in, load_model, make_empty
from gcore.prompts.processor import load_processor
from gcore.prompts.source import Templater
from gcore.prompts.tokenizer import load_tokenizer
from gcore.training.critic import ValueModel, open_critic, value_model
from gcore.training.media_model import MediaLogprobModel
from gcore.training.shards import fill
from gcore.types import Completion, Prompt, Request, Sample, SamplingParams, UserError
from gcore.weights.receiver import FolderWeights
from tests.vision_families import CONFIGS, computed, made_once, off, picture, processor, save

CPU = torch.device("cpu")
FAMILIES = [name for name in CONFIGS if name not in NEED_TORCHVISION or importlib.util.find_spec("torchvision")]
# as in test_families.py, where they have a delta rule; else 1e-5
CLOSE = {"qwen3_5": 5e-5, "qwen3_5_moe": 5e-5, "qwen4_exp": 5e-5, "gemma4": 2e-5, "gemma4-blocks": 2e-5}
FAR = {"qwen3_5_moe": 5e-4}  # its first token is nearly certain
# images of each prompt, as (height, width)
RAGGED = [[(16, 16)], [(16, 32), (24, 16)], [], [(32, 32)], [(16, 16), (16, 16), (40, 16)]]


class World:
    """A family's model, its engine, and the completions of ragged prompts, two siblings each."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self.model = family, Model(path=str(save(family, folder)))
        self.tokenizer = load_tokenizer(self.model)
        self.vision = load_processor(self.model, self.tokenizer, folder / "media")
        self.network = load_model(self.model, self.tokenizer, 0, torch.float32, CPU, max_length=320)
        templater = Templater(self.tokenizer, Data(train=Dataset(path="x")), processor=self.vision)
        self.images = [[picture(10 * i + j, *size) for j, size in enumerate(sizes)] for i, sizes in enumerate(RAGGED)]
        rows = [{"prompt": f"{i}+7", "images": images} for i, images in enumerate(self.images)]
        self.prompts: list[Prompt] = [templater.prompt(row, i, i) for i, row in enumerate(rows)]
        params = SamplingParams(6, stop_tokens=(self.tokenizer.eos_token_id,))
        self.requests = [Request(p.content, params, noise_key(p.id, s)) for p in self.prompts for s in range(2)]
        self.engine = SteppedEngine(EmbeddedBackend(self.network, max_concurrent=16, max_length=320))
        self.completions = self.generate(self.requests)
        self.samples = {
            (i, 0): Sample(i, 0, r.content.extended(c.content), np.ones(c.content.num_steps, bool), c.logprobs_S)
            for i, (r, c) in enumerate(zip(self.requests, self.completions, strict=True))
        }

    def generate(self, requests: list[Request]) -> list[Completion]:
        return asyncio.run(asyncio.wait_for(self.engine.generate(requests), 60))

    def inputs(self, number: int) -> tuple[list[int], torch.Tensor, dict[str, Any]]:
        """Tokens of a prompt and of a response, and the inputs of the joint forward pass, by transformers alone."""
        sample, prompt = self.samples[number, 0].content, self.prompts[number // 2]
        images = self.images[number // 2]
        options = {"add_special_tokens": False, "return_mm_token_type_ids": True}
        if images:
            inputs = dict(processor(self.family)(text=[prompt.text], images=[images], return_tensors="pt", **options))
        else:
            inputs = dict(self.tokenizer(prompt.text, add_special_tokens=False, return_tensors="pt"))
        tokens = inputs["input_ids"][0].tolist()
        answer = torch.tensor(sample.tokens_S)[None].long()
        for name, more in {
            "input_ids": answer,
            "attention_mask": 1,
            "mm_token_type_ids": 0,
            "token_type_ids": 0,
        }.items():
            if name in inputs:
                added = torch.zeros_like(answer) + more
                inputs[name] = torch.cat([inputs[name], added.to(inputs[name].dtype)], 1)
        if self.family == "llama4":  # its pixels are in bfloat16
            inputs = {name: value.float() if "pixel" in name else value for name, value in inputs.items()}
        if self.family == "gemma3" and "mm_token_type_ids" in inputs:
            inputs["token_type_ids"] = inputs.pop("mm_token_type_ids")
        if "qwen" not in self.family and "gemma4" not in self.family:
            inputs.pop("mm_token_type_ids", None)
        inputs.pop("token_type_ids", None) if self.family != "gemma3" else None
        return tokens, answer, inputs

    def reference(self, number: int) -> tuple[list[int], np.ndarray]:
        """Tokens of a prompt and logprobs of a response, by transformers alone."""
        tokens, answer, inputs = self.inputs(number)
        with torch.no_grad():
            logits = self.network(**inputs).logits[0, len(tokens) - 1 : -1]
        logits = forbid(logits.float(), forbidden_tokens(self.network.config))
        return tokens, logits.log_softmax(-1).gather(-1, answer[0][:, None])[:, 0].numpy()

    def values(self, number: int, head: torch.Tensor) -> np.ndarray:
        """Of the steps of a response, by transformers alone: `head` on the hidden states before them."""
        tokens, _, inputs = self.inputs(number)
        found = list[torch.Tensor]()
        keep = decoder_of(self.network).register_forward_hook(lambda *seen: found.append(seen[2].last_hidden_state))
        with torch.no_grad():
            self.network(**inputs)
        keep.remove()
        return (found[0][0, len(tokens) - 1 : -1] @ head.detach()).numpy()

    def critic(self) -> ValueModel:
        """From the model's folder, with a head that is not zero."""
        critic = value_model(make_empty(self.model, self.tokenizer, 256, scorer=True))
        fill(critic.network, open_critic(critic.network, self.model, 0, self.tokenizer), CPU)
        with torch.no_grad():
            critic.network.score.weight.normal_(generator=torch.Generator().manual_seed(1))
        return critic


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    yield from made_once(World, tmp_path_factory)


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_processing_are_those_of_transformers(family: str, worlds: Callable[[str], World]):
    world = worlds(family)
    for number, completion in enumerate(world.completions):
        tokens, logprobs = world.reference(number)
        assert tokens == world.requests[number].content.tokens_P.tolist()
        assert off(completion.logprobs_S, logprobs) < CLOSE.get(family, 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_that_reads_the_folder_expects_the_names_that_trainers_send(family, worlds):
    """The files of most families have other names."""
    network = worlds(family).network
    expected = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    assert FolderWeights(Path(str(worlds(family).model.path))).shapes == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_added_to_the_weights_of_the_network(family, worlds):
    """In an engine that reads the folder: it gets factors, by the names of the network, and merges them."""
    folder, parameters = Path(str(worlds(family).model.path)), dict(worlds(family).network.named_parameters())
    model = PolicyModel(path=str(folder), lora=Lora(rank=2, parts=["text", "vision"]))
    adapters, weights = adapters_in(folder, model), FolderWeights(folder)
    shapes = weights.shapes
    assert adapters is not None and any("vis" in layer for layer in adapters.layers)
    for whole in (False, True):
        base = weights.base(adapters, "cpu", torch.float32, whole)
        assert base is not None and (whole or base.tensors.keys() == _matrices(adapters))
        # files have experts one by one, and tables of n-grams in parts, and so they are sent
        other = base.tensors.keys() ^ shapes.keys() if whole else ()
        assert all(".mlp.experts." in name or "ngram_embedding" in name for name in other)
        found = {name: tensor for name, tensor in base.tensors.items() if name in parameters}
        assert all(torch.equal(tensor, parameters[name]) for name, tensor in found.items())
        factors = {name: torch.ones(shape) for name, shape in adapters.shapes(shapes).items()}
        merged = dict(base.merged(factors))
        assert merged.keys() == _matrices(adapters)
        for name, found in merged.items():
            assert torch.allclose(found, parameters[name] + adapters.scale * 2)


def _matrices(adapters: Adapters) -> set[str]:
    return {f"{layer}.weight" for layer in adapters.layers}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_looks(family: str, worlds: Callable[[str], World]):
    """Other pixels and nothing else: other logprobs."""
    world = worlds(family)
    request = world.requests[2]
    images = request.content.media
    exchanged = replace(images[0], key="other", inputs={n: _noisy(a) for n, a in images[0].tensors().items()})
    other = replace(request, content=replace(request.content, media=(exchanged, *images[1:])))
    before, after, again = world.generate([request, other, request])
    assert off(before.logprobs_S[:1], after.logprobs_S[:1]) > FAR.get(family, 1e-3)
    assert np.array_equal(before.logprobs_S, again.logprobs_S)


def _noisy(array: np.ndarray) -> np.ndarray:
    return -array if array.dtype.kind == "f" else array


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_packed_and_alone(family: str, worlds: Callable[[str], World]):
    world = worlds(family)
    keys, model = list(world.samples), MediaLogprobModel(copy.deepcopy(world.network))
    for rows in ([keys[:4], keys[4:7], keys[7:]], [[key] for key in keys], [keys]):
        model.encoded = 0
        found = computed(model, world.samples, rows)
        for key in keys:
            assert off(found[key], world.samples[key].rollout_logprobs_S) < CLOSE.get(family, 1e-5)
        assert model.encoded == sum(map(len, RAGGED))  # siblings share the features of their images


@pytest.mark.parametrize("family", FAMILIES)
def test_values_packed_and_alone(family: str, worlds: Callable[[str], World]):
    """The critic starts from the policy's folder, and its values are those of the joint forward pass."""
    world = worlds(family)
    keys, critic = list(world.samples), world.critic()
    expected = [world.values(number, critic.network.score.weight[0]) for number in range(len(keys))]
    assert max(np.abs(values).max() for values in expected) > 1
    for rows in ([keys[:4], keys[4:7], keys[7:]], [[key] for key in keys], [keys]):
        found = computed(critic, world.samples, rows)
        for key, values in zip(keys, expected, strict=True):
            assert off(found[key], values) < CLOSE.get(family, 1e-5)


def test_without_its_processor_a_model_reads_text(tmp_path):
    model = Model(path=str(save("qwen3_5", tmp_path)))
    (tmp_path / "preprocessor_config.json").unlink()
    tokenizer = load_tokenizer(model)
    vision = load_processor(model, tokenizer, None)
    assert vision is not None and vision.content("1+2=", []).tokens_P.tolist() == tokenizer("1+2=")["input_ids"]
    with pytest.raises(UserError, match=r"an image; expected text: .*no preprocessor_config\.json"):
        vision.content("<image>", [("image", picture(0))])
    with pytest.raises(UserError, match=r"rewards\.judges\.0\.model: .*no preprocessor_config\.json"):
        load_processor(model, tokenizer, None, "rewards.judges.0.model")
