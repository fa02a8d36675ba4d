"""Training of vision-language models in a world of one process: tokens that are never said, the tower's learning rate,
and a rank without images."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from gcore.checkpoint.pending_groups import load_pending_groups, write_pending_groups
from gcore.config.base import Model
from gcore.config.data import Data, Dataset
from gcore.config.tree import Config
from gcore.content.media import png_url, store
from gcore.content.text import TextModality
from gcore.content.tokens import Tokens
from gcore.cost.shapes import model_shape, shape_of
from gcore.cost.workload import CostModel
from gcore.generation.embedded import EmbeddedBackend
from gcore.generation.engine_shell import SteppedEngine
from gcore.media.images import _encode_grids
from gcore.models.networks import load_model
from gcore.models.towers import encode, tower_parameters
from gcore.observe.trace import Tracer
from gcore.planner.inputs import Workload
from gcore.preparation.samples import meta_of
from gcore.prompts.processor import load_processor
from gcore.prompts.source import Templater
from gcore.prompts.tokenizer import load_tokenizer
from gcore.training import attention, logprob_model, objective
from gcore.training.backend import NewNetwork, by_sample
from gcore.training.critic import networks_of
from gcore.training.fsdp import FsdpBackend
from gcore.training.media_model import MediaLogprobModel
from gcore.training.objective import StepData, step_columns
from gcore.training.rank import TrainerRank
from gcore.training.step_model import Compute
from gcore.types import MicroBatch, MiniBatch, Prompt, Request, Sample, SamplingParams, Scored, TrainBatch, UserError
from gcore.workflows.context import SampleContext, SharedContext
from gcore.workflows.dialects import chat
from tests.e2e.test_vision import SMALL
from tests.unit.test_training import batch_of, config_of
from tests.unit.test_training import update as train
from tests.vision_families import picture, save, sound

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")


def config_with(**training: Any) -> Config:
    return config_of(model=SMALL["model"], data=SMALL["data"], training=training)


def network_of(config: Config) -> Any:
    return load_model(config.model, load_tokenizer(config.model), config.run.seed, torch.float32, CPU)


def contents(config: Config, folder: Path, images: list[list[int]]) -> list[Tokens]:
    """Prompts with pictures of these seeds, or with sounds, for a model that hears."""
    tokenizer = load_tokenizer(config.model)
    data = Data(train=config.data.train)
    templater = Templater(tokenizer, data, processor=load_processor(config.model, tokenizer, folder))
    made = {"images": picture}
    if config.model.build.audio is not None:
        made = {"audios": lambda seed: {"array": sound(seed, 3_000 + 400 * seed), "sampling_rate": 16_000}}
    rows = [
        {"prompt": f"{i}+1=", **{column: [make(seed) for seed in seeds] for column, make in made.items()}}
        for i, seeds in enumerate(images)
    ]
    return [templater.content(row)[2] for row in rows]


def samples_of(prompts: list[Tokens], siblings: int = 2) -> list[Sample]:
    rng, found = np.random.default_rng(0), []
    for number, prompt in enumerate(prompts):
        for sibling in range(siblings):
            answer = Tokens.steps(rng.integers(4, 14, 3).astype(np.int32))
            ones = np.ones(3, np.float32)
            found.append(Sample(number, sibling, prompt.extended(answer), ones > 0, -ones, reward=(-1.0) ** sibling))
    return found


def trainer_of(config: Config) -> TrainerRank:
    policy = NewNetwork(lambda: network_of(config), MediaLogprobModel)
    networks = networks_of(config, policy, load_tokenizer(config.model), 48)
    backend = partial(FsdpBackend, config, networks, CPU, torch.float32)
    return TrainerRank(config, backend, rank=0, threads=1, tracer=Tracer(None, "trainer-0"))


def update(trainer: TrainerRank, samples: list[Sample]) -> None:
    async def run() -> None:
        await trainer.end_warm_start()
        await trainer.push(0, samples)
        batch: TrainBatch = batch_of(samples)
        await trainer.update(replace(batch, advantages={s.key: s.reward for s in samples}))

    asyncio.run(run())


@pytest.mark.parametrize("vision_lr", [None, 0.0, 3e-4])
def test_the_tower_has_its_own_learning_rate(vision_lr, tmp_path):
    config = config_with(lr=3e-3, vision_lr=vision_lr, schedule="constant", warm_start=None)
    trainer, before = trainer_of(config), {n: p.detach().clone() for n, p in network_of(config).named_parameters()}
    update(trainer, samples_of(contents(config, tmp_path, [[0, 1], [2]])))
    network = trainer.backend.networks["policy"].model.network
    tower = set(tower_parameters(network))
    assert "model.visual.blocks.0.attn.qkv.weight" in tower and len(tower) < len(before)
    moved = {n: float((p.detach().to_local() - before[n]).abs().max()) for n, p in network.named_parameters()}
    most = {part: max(moved[n] for n in before if (n in tower) == part) for part in (True, False)}
    assert most[False] == pytest.approx(3e-3, rel=0.01)  # the first step of AdamW: the learning rate
    assert most[True] == pytest.approx(3e-3 if vision_lr is None else vision_lr, rel=0.01, abs=1e-12)


def test_a_rank_without_images_has_gradients_of_the_tower(tmp_path):
    """Of zero: other ranks reduce them together with this one."""
    config = config_with()
    trainer = trainer_of(config)
    model = trainer.backend.networks["policy"].model
    samples = {s.key: s for s in samples_of(contents(config, tmp_path, [[]]))}
    micro = MicroBatch((tuple(samples),), sum(s.content.size for s in samples.values()))
    packed = model.pack(micro, samples, trainer.backend._context_groups.of(1))
    logprobs, _ = model(packed)
    logprobs.sum().backward()
    gradients = [p.grad for p in tower_parameters(model.network).values()]
    assert all(g is not None and not g.to_local().any() for g in gradients) and model.encoded == 0


@pytest.mark.parametrize("divided", [True, False], ids=["by image", "undivided"])
def test_features_for_layers_are_those_of_each_image(divided):
    """Of Qwen3-VL: transformers 5.17 divides only the features for the embedding."""
    sizes, whole = [4, 1], [torch.arange(5.0)[:, None] + 10 * layer for layer in range(3)]

    def get_image_features(pixels: torch.Tensor, grid: torch.Tensor, **rest: Any) -> Any:
        layers = [layer.split(sizes) if divided else layer for layer in whole[1:]]
        return SimpleNamespace(pooler_output=whole[0].split(sizes), deepstack_features=layers)

    given = [{"pixel_values": np.zeros((4 * n, 2)), "image_grid_thw": np.array([[1, 2, 2 * n]])} for n in sizes]
    model = SimpleNamespace(get_image_features=get_image_features, visual=SimpleNamespace(spatial_merge_size=2))
    found = _encode_grids(model, given, CPU)
    assert [[part[:, 0].tolist() for part in features] for features in found] == [
        [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]],
        [[4], [14], [24]],
    ]


def grid_world(family: str, folder: Path) -> tuple[Any, dict[tuple[int, int], Sample], list[Tokens]]:
    """A model with grids, samples of prompts with pictures of several sizes, and the prompts."""
    model = Model(path=str(save(family, folder)))
    tokenizer = load_tokenizer(model)
    network = load_model(model, tokenizer, 0, torch.float32, CPU, max_length=256)
    templater = Templater(
        tokenizer, Data(train=Dataset(path="x")), processor=load_processor(model, tokenizer, folder / "media")
    )
    sizes = [[(16, 32), (24, 16)], [], [(40, 16)]]
    pictures = [[picture(10 * i + j, *size) for j, size in enumerate(own)] for i, own in enumerate(sizes)]
    prompts = [templater.content({"prompt": f"{i}+7", "images": own})[2] for i, own in enumerate(pictures)]
    return network, {s.key: s for s in samples_of(prompts)}, prompts


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_one_call_of_attention_for_all_images_and_windows(family, tmp_path):
    """As on a GPU: the same features and gradients as one call per image or window."""
    network, _, prompts = grid_world(family, tmp_path)
    attention.register()
    media, found = [medium for prompt in prompts for medium in prompt.media], dict[str, list[torch.Tensor]]()
    for name in ("sdpa", attention.OF_TOWERS):
        network.model.visual.config._attn_implementation = name
        features = torch.cat([part.flatten() for each in encode(network, media) for part in each])
        (features * torch.linspace(-1, 1, len(features))).sum().backward()
        found[name] = [features.detach(), *(p.grad for p in tower_parameters(network).values())]
        network.zero_grad()
    plain, packed = found.values()
    assert len(plain) > 20 and plain[0].std() > 0.01
    for each, other in zip(plain, packed, strict=True):
        torch.testing.assert_close(each, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_the_host_waits_for_no_value_of_the_device(family, tmp_path, monkeypatch):
    """Tensors without values instead of a GPU: to read one is an error."""
    network, samples, _ = grid_world(family, tmp_path)
    nowhere = torch.device("meta")
    model = MediaLogprobModel(network.to(nowhere), Compute(nowhere, torch.float32))
    model.varlen, network.model.visual.config._attn_implementation = True, attention.OF_TOWERS
    attend = MagicMock(side_effect=lambda query, key, value, *_: query + 0 * value.sum())
    monkeypatch.setattr(attention, "attend_row", attend)
    data = StepData(samples)
    packed = model.pack(MicroBatch((tuple(samples),), 999), samples, SimpleNamespace(size=1))
    outputs, columns = packed.joined(*model(packed)), step_columns(packed, data, nowhere)
    goal = objective.policy(config_of().algorithm, MiniBatch((), 18, 6), 3)
    loss, _ = goal(outputs, columns)
    loss.backward()
    assert {key: part.shape for key, part in by_sample(packed, outputs[0], data).items()} == dict.fromkeys(
        samples, (3,)
    )
    assert network.model.visual.blocks[0].attn.qkv.weight.grad is not None and model.encoded == 3
    assert attend.call_count == 2 + 2  # blocks of the tower, layers of the decoder


def test_a_critic_learns_what_only_the_images_tell(tmp_path):
    """One text and one answer, and a reward for each picture."""
    algorithm, critic = {"adv_estimator": "gae", "gae_lambda": 1.0}, {"lr": 3e-3, "value_clip": None}
    config = config_of(model=SMALL["model"], data=SMALL["data"], algorithm=algorithm, critic=critic)
    trainer = trainer_of(config)
    texts = [contents(config, tmp_path, [[seed]])[0] for seed in range(4)]
    samples = [replace(s, reward=float(s.prompt_id % 2)) for s in samples_of(texts, siblings=1)]
    answer = samples[0].content.tokens_S
    samples = [replace(s, content=text.extended(Tokens.steps(answer))) for s, text in zip(samples, texts, strict=True)]
    assert len({s.content.tokens_T.tobytes() for s in samples}) == 1
    asyncio.run(trainer.end_warm_start())
    found = [train(trainer, samples, batch_of(samples)).metrics["critic/explained_variance"].value for _ in range(30)]
    assert found[0] == pytest.approx(0.0, abs=1e-6) and found[-1] > 0.9


def test_tokens_of_features_are_never_said(tmp_path, monkeypatch):
    """Also by a model that wants to; engine and trainer normalize over the same tokens."""
    config = config_with()
    network = network_of(config)
    image, video = network.config.image_token_id, network.config.video_token_id
    head = network.get_output_embeddings().weight
    with torch.no_grad():
        other = head[7].clone()
        head[[image, video]] = 40 * other  # tied: the embedding too, which features replace
        head[7] = 2 * other
    (prompt,) = contents(config, tmp_path, [[0]])
    engine = SteppedEngine(EmbeddedBackend(network, max_concurrent=64, max_length=48))
    requests = [Request(prompt, SamplingParams(6), key) for key in range(64)]
    found = asyncio.run(asyncio.wait_for(engine.generate(requests), 60))
    engine.close()
    said = {int(token) for c in found for token in c.content.tokens_S}
    assert not said & {image, video} and len(said) > 5
    samples = {
        (i, 0): Sample(i, 0, prompt.extended(c.content), np.ones(6, bool), c.logprobs_S) for i, c in enumerate(found)
    }
    model = MediaLogprobModel(network)
    micro = MicroBatch(tuple((key,) for key in samples), prompt.size + 6)
    packed = model.pack(micro, samples, type("One", (), {"size": 1}))
    expected = np.concatenate([c.logprobs_S for c in found])
    whole = model(packed)
    assert np.abs(whole[0].detach().numpy() - expected).max() < 1e-5
    sum(whole).sum().backward()
    gradient = head.grad.clone()
    head.grad = None
    monkeypatch.setattr(logprob_model, "LOGITS_AT_ONCE", 64)  # the head in pieces, with its own backward pass
    pieces = model(packed)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, pieces, strict=True))
    sum(pieces).sum().backward()
    assert torch.allclose(head.grad, gradient, atol=1e-3, rtol=1e-4)


def test_images_cost_what_the_tower_computes(tmp_path):
    config = config_with()
    (prompt,) = contents(config, tmp_path, [[0, 1]])
    (sample, _) = samples_of([prompt])
    meta, cost = meta_of(sample), model_shape(config.model, "model").cost
    assert meta.work.media == (("image", 256), ("image", 256)) and cost.towers
    seen = cost.of_sample(meta) - cost.of_sample(replace(meta, work=replace(meta.work, media=())))
    tower = cost.tower("image")
    assert seen == pytest.approx(2 * tower.of(16) * tower.flops / cost.flops) and seen > 1
    assert isinstance(tower, CostModel)
    with pytest.raises(UserError, match=r"--images 1: shape of Qwen2.5-3B has no vision tower"):
        Workload(images=1).tower_tokens(shape_of("3B"))
    assert Workload().tower_tokens(shape_of("3B")) == 0


def test_decoded_pixels_are_counted_and_references_are_not(tmp_path):
    config = config_with()
    vision = load_processor(config.model, load_tokenizer(config.model), tmp_path)
    text = "<|vision_start|><|image_pad|><|vision_end|>="
    decoded = vision.content(text, [("image", picture(0))])
    assert vision.take_bytes() == picture(0).nbytes == 768 and vision.take_bytes() == 0
    referred = vision.content(text, [("image", store(picture(0), tmp_path))])
    assert vision.take_bytes() == 0 and referred.context_bytes() == decoded.context_bytes()


def test_images_by_http(tmp_path):
    """An agent sends pictures as data URLs, in its first message and before a turn that is streamed. The trainer
    computes the logprobs that the engine recorded, also of a trajectory that was saved with a checkpoint."""
    config = config_with()
    tokenizer = load_tokenizer(config.model)
    generation = config.generation.model_copy(update={"max_response_length": 40})
    vision = load_processor(config.model, tokenizer, tmp_path)
    modality = TextModality(generation, tokenizer, (2,), 60, processor=vision)
    network = network_of(config)
    engine = SteppedEngine(EmbeddedBackend(network, max_concurrent=8, max_length=100))
    pool = SimpleNamespace(generate=lambda requests, **_: engine.generate(requests))
    context = SampleContext(SharedContext(config, pool, SimpleNamespace(), modality))  # type: ignore[arg-type]
    (start,) = contents(config, tmp_path, [[]])
    given = Prompt(7, 7, (), "", start)

    def seen(seed: int) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": png_url(picture(seed))}}
        return {"role": "user", "content": [image, {"type": "text", "text": "1+1="}]}

    async def agent() -> Any:
        async with context.serve(given, 1) as (session,):
            first = await session.turn(chat.read_chat({"messages": [seen(0)], "max_tokens": 4}))
            pieces = []

            async def so_far(turn: Any) -> None:
                pieces.append(turn.content)

            body = {"messages": [seen(0), first.message, seen(1)], "max_tokens": 20}
            await session.turn(chat.read_chat(body), so_far)
            with pytest.raises(UserError, match="base64"):
                await session.turn(chat.read_chat({"messages": [seen(0) | {"content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}]}]}))  # fmt: skip
            return session.rollout, pieces

    rollout, pieces = asyncio.run(agent())
    engine.close()
    content = rollout.content
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    places = np.concatenate([medium.places for medium in content.media])
    assert len(content.media) == 2 and content.own_context and len(content.step_media) == 1
    assert np.array_equal(np.flatnonzero(content.tokens_T == image), places) and rollout.segments == ()
    assert [np.array_equal(m.array.read(), picture(i)) for i, m in enumerate(content.media)] == [True, True]
    assert pieces or rollout.mask_S.sum() <= 4 + 16  # it is said piece by piece if it is long enough
    write_pending_groups(tmp_path, 0, [[Scored(rollout, 1.0)]])
    (((again),),) = load_pending_groups(tmp_path, lambda _: given)
    for whole in (content, again.rollout.content):
        assert whole.context_bytes() == content.context_bytes() and whole.digest() == content.digest()
        sample = Sample(7, 0, whole, rollout.mask_S, rollout.logprobs_S)
        model = MediaLogprobModel(network)
        packed = model.pack(MicroBatch((((7, 0),),), whole.size), {(7, 0): sample}, type("One", (), {"size": 1}))
        found = model(packed)[0].detach().numpy()
        assert np.abs(found - rollout.logprobs_S)[rollout.mask_S].max() < 1e-5


def test_images_of_tools_in_later_turns(tmp_path):
    """Their places move with the steps before them, a saved group has them by reference, and the engine sees them."""
    config = config_with()
    tokenizer = load_tokenizer(config.model)
    vision = load_processor(config.model, tokenizer, tmp_path)
    modality = TextModality(config.generation, tokenizer, (2,), processor=vision)
    (prompt,) = contents(config, tmp_path, [[0]])
    said = prompt.extended(Tokens.steps(np.array([5, 6, 2], np.int32)))
    tool = [{"role": "tool", "content": [{"type": "image", "image": picture(9)}, {"type": "text", "text": "="}]}]
    whole = said.extended(modality.between_turns(said, tool), Tokens.steps(np.array([7], np.int32)))
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    places = np.concatenate([medium.places for medium in whole.media])
    assert np.array_equal(np.flatnonzero(whole.tokens_T == image), places) and len(places) == 8
    assert whole.step_media == whole.media[1:] and whole.digest() != replace(whole, media=prompt.media).digest()
    saved = {name: np.array(array) for name, array in whole.step_arrays().items()}
    again = prompt.with_steps(saved)
    assert np.array_equal(again.tokens_T, whole.tokens_T) and again.digest() == whole.digest()
    assert np.array_equal(again.media[1].array.read(), picture(9)) and np.array_equal(again.media[1].places, places[4:])
    network = network_of(config)
    engine = SteppedEngine(EmbeddedBackend(network, max_concurrent=8, max_length=48))
    (found,) = asyncio.run(engine.generate([Request(whole, SamplingParams(4), 1)]))
    engine.close()
    sample = Sample(0, 0, whole.extended(found.content), np.ones(whole.num_steps + 4, bool), found.logprobs_S)
    model = MediaLogprobModel(network)
    packed = model.pack(MicroBatch((((0, 0),),), sample.content.size), {(0, 0): sample}, type("One", (), {"size": 1}))
    assert np.abs(model(packed)[0].detach().numpy()[-4:] - found.logprobs_S).max() < 1e-5
    with pytest.raises(UserError, match="an image for a model that takes none"):
        TextModality(config.generation, tokenizer, (2,)).between_turns(said, tool)
