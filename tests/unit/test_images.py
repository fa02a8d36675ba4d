"""Images at the boundary: how they travel, who refuses them, and what vLLM is told of them."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gcore.clients import EngineClient
from gcore.config.base import BuildModel, Model
from gcore.content.tokens import Tokens
from gcore.cost.replica_speed import ReplicaSpeed
from gcore.emulate.engine import EmulatedEngine
from gcore.generation.embedded import EmbeddedBackend
from gcore.generation.engine_shell import SteppedEngine
from gcore.generation.pool import EnginePool
from gcore.generation.request_check import check_request
from gcore.generation.vllm_core import with_images
from gcore.models.networks import load_model
from gcore.prompts.tokenizer import build_char_tokenizer
from gcore.types import Completion, Pixels, Request, SamplingParams, UserError
from tests.vision_families import raw_image


def image(seed: int = 0, height: int = 4, width: int = 6) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def ask(*images: Pixels, key: int = 0) -> Request:
    return Request(Tokens(np.array([4, 9, 5], np.int32), media=tuple(map(raw_image, images))), SamplingParams(8), key)


# --- how they travel


def test_siblings_travel_with_one_copy():
    picture = image(0, 100, 100)
    siblings = [ask(picture, key=i) for i in range(8)]
    sent = pickle.dumps(siblings, protocol=5)
    assert picture.nbytes < len(sent) < 1.1 * picture.nbytes
    assert all(np.array_equal(request.content.media[0].array, picture) for request in pickle.loads(sent))
    assert Request(Tokens(np.array([4], np.int32)), SamplingParams(8), 0).content.media == ()


def test_what_a_drain_takes_back_goes_on_with_its_images():
    asked: list[Request] = []

    class Replica:
        """Gives back two tokens when it is drained, and the rest when it is asked again."""

        name, drained = "engine-0", asyncio.Event()

        async def call(self, method: str, *args: Any) -> Any:
            if method == "abort":
                return self.drained.set()
            (request,) = args[0]
            asked.append(request)
            if len(asked) == 1:
                await self.drained.wait()
            made = np.full(2 if len(asked) == 1 else request.params.max_tokens, 7, np.int32)
            finish: Any = "abort" if len(asked) == 1 else "length"
            return [
                Completion(Tokens.steps(made), -np.ones(len(made), np.float32), np.zeros(len(made), np.int32), finish)
            ]

    async def moved() -> Completion:
        pool, request = EnginePool([EngineClient(Replica())]), ask(image(0), image(1))
        answer = asyncio.ensure_future(pool.generate([request]))
        while not asked:
            await asyncio.sleep(0)
        await pool.drain("engine-0")
        pool.reopen("engine-0")
        return (await answer)[0]

    found = asyncio.run(asyncio.wait_for(moved(), 60))
    assert found.content.tokens_S.tolist() == [7] * 8
    assert [request.content.tokens_T.tolist() for request in asked] == [[4, 9, 5], [4, 9, 5, 7, 7]]
    images = [request.content.media for request in asked]
    assert images[1] is images[0] and len(images[1]) == 2


# --- who refuses them


def embedded() -> SteppedEngine:
    tokenizer = build_char_tokenizer("0123456789+=")
    build = BuildModel(alphabet="0123456789+=", hidden_size=32, intermediate_size=32, layers=1, heads=2, kv_heads=1)
    network = load_model(Model(build=build), tokenizer, 0, torch.float32, torch.device("cpu"))
    return SteppedEngine(EmbeddedBackend(network, max_concurrent=2, max_length=64))


def emulated() -> EmulatedEngine:
    free = dict.fromkeys(("per_sequence_s", "prefill_s_per_token", "sleep_s", "wake_s", "weights_s"), 0.0)
    return EmulatedEngine(ReplicaSpeed(base_s=0.001, max_concurrent=2, **free))


@pytest.mark.parametrize("make", [embedded, emulated])
def test_engines_of_text_refuse_images(make: Callable[[], Any]):
    engine = make()
    with pytest.raises(UserError, match=r"has 2 images, expected none"):
        asyncio.run(asyncio.wait_for(engine.generate([ask(), ask(image(0), image(1))]), 60))
    assert len(asyncio.run(asyncio.wait_for(engine.generate([ask()]), 60))[0].content.tokens_S) == 8
    if make is embedded:
        engine.close()


@pytest.mark.parametrize(
    "bad", [image().astype(np.float32), image()[0], image()[..., :1], image()[:0], image().transpose(2, 0, 1)]
)
def test_only_pixels_are_images(bad: Any):
    check_request(ask(image(0), image(1)), max_length=64, vocabulary=16, accepts=("image",))
    with pytest.raises(UserError, match=r"expected uint8, height x width x 3"):
        check_request(ask(image(0), bad), max_length=64, vocabulary=16, accepts=("image",))


def test_logprobs_of_given_tokens_are_refused_with_images():
    """An engine that scores would read the places of the images as text."""
    request = ask(image(0))
    request = replace(
        request, params=SamplingParams(0), content=replace(request.content, tokens_S=np.ones(3, np.int32))
    )
    text = replace(request, content=replace(request.content, media=()))
    check_request(text, max_length=64, vocabulary=16, accepts=("image",))
    with pytest.raises(UserError, match=r"has 1 images, expected none: teachers read only text"):
        check_request(request, max_length=64, vocabulary=16, accepts=("image",))


# --- what vLLM is told


def told(request: Request, length: int = 20, max_length: int = 64) -> Any:
    """The prompt as vLLM gets it; it makes `length` tokens of it."""

    def process(name: str, prompt: Any, sampling: Any, priority: int) -> Any:
        assert (name, sampling, priority) == ("7", "sampling", 3)
        return SimpleNamespace(prompt=prompt, prompt_token_ids=[0] * length)

    prompt = {"prompt_token_ids": [4, 9, 5], "cache_salt": "0"}
    return with_images(process, request, max_length, "7", prompt, "sampling", priority=3).prompt


def test_images_go_with_the_tokens():
    prompt = told(ask(image(0), image(1)))
    assert (prompt["prompt_token_ids"], prompt["cache_salt"]) == ([4, 9, 5], "0")
    given = prompt["multi_modal_data"]["image"]
    assert [picture.mode for picture in given] == ["RGB", "RGB"]
    assert all(np.array_equal(np.asarray(picture), image(i)) for i, picture in enumerate(given))


def test_a_prompt_is_as_long_as_its_images_make_it():
    assert told(ask(image()), length=56)
    with pytest.raises(ValueError, match=r"57 tokens with its images \+ max_tokens 8 = 65 exceeds the engine's 64"):
        told(ask(image()), length=57)


def test_whatever_a_processor_raises_is_a_refusal():
    def choke(*args: Any) -> Any:
        raise RuntimeError("found 0 placeholders")

    with pytest.raises(ValueError, match="2 images in 3 tokens: found 0 placeholders"):
        with_images(choke, ask(image(0), image(1)), 64, "7", {}, None)
