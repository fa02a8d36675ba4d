"""Images with the prompt, as vLLM takes them: a small vision-language model against transformers' own.

The model is an Idefics3 of random weights: of the families that vLLM can import without torchvision, the one whose
processor needs nothing but Pillow. A prompt has one `<image>` for each image; vLLM makes 16 of it, between marks.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from gcore.clients import EngineClient
from gcore.generation.pool import EnginePool
from gcore.models.decoders import forbid
from gcore.prompts.tokenizer import build_char_tokenizer
from gcore.types import Completion, Pixels, Request, UserError
from tests.contract.test_engine import (
    CLOSE,
    ON_GPU,
    VLLM,
    ask,
    network_of,
    prompt,
    run,
    until_generated,
    vllm,
    weights_of,
)
from tests.contract.test_vllm_engine import BLOCK, cached_prompts
from tests.vision_families import raw_image

missing = not VLLM or importlib.util.find_spec("PIL") is None
pytestmark = pytest.mark.skipif(missing, reason="vllm or Pillow is not installed")

LONG = 512
CACHE = 7 * BLOCK / 2**30  # room for 6 blocks of 128 tokens
MARK, IMAGE, WHOLE = 16, 17, 19  # tokens: around an image, of it, and "this is all of it"
SPACE = 16  # tokens of an image
EDGE = 32  # of what the model sees of it, in pixels


def seeing(seed: int) -> Any:
    """A model that sees, with distributions that are neither flat nor certain. Its head is tied, as in small ones."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    sizes = {"intermediate_size": 64, "num_hidden_layers": 2}
    text = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"vocab_size": 20, "max_position_embeddings": LONG, "pad_token_id": 0, "tie_word_embeddings": True}
    vision = {"hidden_size": 64, "num_attention_heads": 2, "image_size": EDGE, "patch_size": EDGE // 8}
    torch.manual_seed(seed)
    config = Idefics3Config(
        vision_config={**vision, **sizes},
        text_config={**text, **sizes},
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    network = Idefics3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return network


def processor() -> Any:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer, edge = build_char_tokenizer("0123456789+="), {"longest_edge": EDGE}
    special = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    assert tokenizer.convert_tokens_to_ids(special) == [MARK, IMAGE, 18, WHOLE]
    pictures = Idefics3ImageProcessorPil(do_image_splitting=False, size=edge, max_image_size=edge)
    return Idefics3Processor(pictures, tokenizer, image_seq_len=SPACE)


@pytest.fixture(scope="module")
def network() -> Any:
    return seeing(0)


@pytest.fixture(scope="module")
def opened(network: Any) -> Iterator[Any]:
    from gcore.generation.engine_shell import SteppedEngine
    from gcore.generation.spec import LibraryOptions
    from gcore.generation.vllm import VllmBackend

    options = LibraryOptions(max_concurrent=8, max_length=LONG, dtype="float32", cpu_cache_gib=CACHE, **ON_GPU)
    with TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        processor().save_pretrained(folder)
        engine = SteppedEngine(VllmBackend(Path(folder), options))
        yield engine
        engine.close()


@pytest.fixture
def engine(opened: Any, network: Any) -> Any:
    """With the weights of `network` as version 0, and nothing cached."""
    load(opened, 0, network)
    return opened


def load(engine: Any, version: int, network: Any) -> None:
    asyncio.run(asyncio.wait_for(engine.load_weights(version, weights_of(network)), 60))


def image(seed: int, height: int = 20, width: int = 24) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def with_images(request: Request, *images: Pixels) -> Request:
    return replace(request, content=replace(request.content, media=tuple(map(raw_image, images))))


def about(images: tuple[Pixels, ...], length: int = 6, max_tokens: int = 10, **options: Any) -> Request:
    """A question of `length` tokens, with the images after its first two."""
    words = prompt(length)
    tokens = np.concatenate([words[:2], [IMAGE] * len(images), words[2:]]).astype(np.int32)
    return with_images(ask(tokens, max_tokens, **options), *images)


def exactly(network: Any, request: Request, completion: Completion) -> bool:
    """What transformers says, from pixels that transformers' processor made."""
    spread = [
        [MARK, WHOLE] + [IMAGE] * SPACE + [MARK] if token == IMAGE else [token] for token in request.content.tokens_T
    ]
    tokens = [int(token) for part in spread for token in part]
    images = [medium.array for medium in request.content.media]
    seen = processor().image_processor(images, input_data_format="channels_last", return_tensors="pt")
    pixels = {name: seen[name] for name in ("pixel_values", "pixel_attention_mask")}
    with torch.no_grad():
        ids = torch.tensor([tokens + completion.content.tokens_S.tolist()])
        inputs = network.get_input_embeddings()(ids)
        features = network.model.get_image_features(**pixels).pooler_output.flatten(0, 1)
        inputs[0, [i for i, token in enumerate(tokens) if token == IMAGE]] = features  # one that it says is a word
        logits = network(inputs_embeds=inputs).logits[0, len(tokens) - 1 : -1]
        table = forbid(logits, (IMAGE,)).log_softmax(-1)  # it never says an image
    answer = ids[0, len(tokens) :]
    off = np.abs(completion.logprobs_S - table.gather(-1, answer[:, None])[:, 0].numpy()).max()
    return bool(off < CLOSE) and (request.params.temperature > 0 or torch.equal(table.argmax(-1), answer))


# --- what is seen


def test_greedy_is_that_of_transformers(engine, network):
    wide, tall = image(2, 16, 40), image(3, 40, 16)
    kinds = [(image(0),), (image(1),), (wide,), (tall,), (image(0), image(1)), (image(1), image(0))]
    requests = [about(images, temperature=0) for images in kinds]
    found = run(engine, *requests)
    assert all(exactly(network, request, c) for request, c in zip(requests, found, strict=True))
    assert len({c.logprobs_S.tobytes() for c in found}) == len(kinds)  # it looks, and minds the order


def test_siblings_share_the_image_and_its_prefix(engine, network):
    requests, answers = [about((image(0),), 300, key=i) for i in range(4)], list[Completion]()
    first, *others = cached_prompts(engine, lambda: answers.extend(run(engine, *requests)))
    assert first == 0 and len(others) == 3 and min(others) >= 256
    assert all(exactly(network, request, c) for request, c in zip(requests, answers, strict=True))
    assert len({c.content.tokens_S.tobytes() for c in answers}) == 4


def test_a_prefix_belongs_to_its_image(engine, network):
    """Tokens are the same for all of them. The last two images have the same bytes in another shape."""
    for picture in (image(0), image(1), np.ascontiguousarray(image(0).reshape(24, 20, 3))):
        request, answers = about((picture,), 300, temperature=0), list[Completion]()
        assert cached_prompts(engine, lambda r=request, a=answers: a.extend(run(engine, r, r)))[0] == 0
        assert all(exactly(network, request, c) for c in answers)


def test_without_an_image_it_reads(engine, network):
    request = about((), temperature=0)
    (found,) = run(engine, request)
    with torch.no_grad():
        ids = torch.tensor([request.content.tokens_T.tolist() + found.content.tokens_S.tolist()])
        assert (
            network(input_ids=ids).logits[0].argmax(-1)[len(request.content.tokens_T) - 1 : -1].tolist()
            == ids[0, 6:].tolist()
        )


# --- weights


def test_what_was_seen_dies_with_the_weights_that_saw_it(engine, network):
    """The eyes alone are new: the encoder's answers are kept by vLLM apart from prefixes."""
    new, request = seeing(0), about((image(0),), temperature=0)
    with torch.no_grad():
        new.model.connector.modality_projection.proj.weight.copy_(
            seeing(1).model.connector.modality_projection.proj.weight
        )
    (before,) = run(engine, request)
    load(engine, 1, new)
    (after,) = run(engine, request)
    assert exactly(network, request, before) and exactly(new, request, after) and not exactly(network, request, after)
    load(engine, 2, seeing(2))
    assert exactly(seeing(2), request, run(engine, request)[0])


def test_who_gives_way_after_new_weights_looks_again(engine, network, monkeypatch):
    """Two samples have room when the weights come, and no more at the end: one is read again, with its image."""
    scheduler, gave_way = engine.backend.core.engine_core.engine_core.scheduler, list[str]()
    preempt, new = scheduler._preempt_request, seeing(3)

    def seen(request: Any, *args: Any, **options: Any) -> Any:
        gave_way.append(request.request_id)
        return preempt(request, *args, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", seen)
    requests = [about((image(i),), 100, 380, key=i) for i in range(2)]

    async def generate() -> list[Completion]:
        answers = asyncio.ensure_future(engine.generate(requests))
        await until_generated(engine, int((await engine.stats()).generated_tokens) + 20)
        await engine.load_weights(1, weights_of(new))
        assert not gave_way
        return await answers

    for c in asyncio.run(asyncio.wait_for(generate(), 60)):
        assert len(c.content.tokens_S) == 380 and set(c.versions_S.tolist()) == {0, 1}
    assert gave_way
    assert exactly(new, requests[0], run(engine, requests[0])[0])


def test_a_moved_sample_takes_its_images_along(engine, network):
    """The replica is drained in mid-sentence: what is left is asked again, with the tokens it has."""
    request = about((image(0), image(1)), 20, 300, temperature=0)

    class Replica:
        name = "engine-0"

        async def call(self, method: str, *args: Any) -> Any:
            return await getattr(engine, method)(*args)

    async def moved() -> Completion:
        pool = EnginePool([EngineClient(Replica())])
        answer = asyncio.ensure_future(pool.generate([request]))
        await until_generated(engine, int((await engine.stats()).generated_tokens) + 20)
        await pool.drain("engine-0")
        assert not answer.done()
        pool.reopen("engine-0")
        return (await answer)[0]

    found = asyncio.run(asyncio.wait_for(moved(), 60))
    assert len(found.content.tokens_S) == 300 and exactly(network, request, found)


# --- what is refused


def test_refused_images_change_no_other(engine, network):
    good, other = about((image(0),), temperature=0), image(7)
    for bad, words in (
        (with_images(good, image(0), image(1)), "2 images in 7 tokens"),  # one place for two
        (with_images(about(()), image(0)), "1 images in 6 tokens"),
        (about((other,), LONG - 20, 10), r"prompt of 511 tokens with its images \+ max_tokens 10 = 521 exceeds"),
        (about((other,), LONG - 12, 10), "longer than the maximum model length of 512"),
        (with_images(good, image(0).astype(np.float32)), "float32 and shape"),
        (with_images(good, image(0)[..., 0]), r"uint8 and shape \(20, 24\)"),
        (with_images(good, image(0).transpose(2, 0, 1)), r"shape \(3, 20, 24\)"),
    ):
        with pytest.raises(UserError, match=words):
            run(engine, bad)
    seen = about((other,), temperature=0)  # was in two of those: vLLM must not take it for known
    for request in (seen, good):
        assert exactly(network, request, run(engine, request)[0])


def test_a_model_of_text_refuses_images():
    engine = vllm(network_of())
    with pytest.raises(UserError, match=r"has 1 images, expected none.*model\.path"):
        run(engine, with_images(ask(prompt(5), 5), image(0)))
    assert len(run(engine, ask(prompt(5), 5))[0].content.tokens_S) == 5
    engine.close()
