"""Training with images, or audio clips, on two ranks, as copies and in shards, gives the losses and the weights of one
rank; adapters on either part of the model; gradients against transformers' own joint forward pass."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gcore.config.base import Lora
from gcore.config.tree import Config
from gcore.cost.workload import CostModel
from gcore.generation.embedded import EmbeddedBackend
from gcore.generation.engine_shell import SteppedEngine
from gcore.models.networks import LORA_A, LORA_B, SCORE, adapters_of
from gcore.models.towers import tower_of, tower_parameters
from gcore.observe.trace import Tracer
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import metas_of
from gcore.preparation.step_times import shared_tokens
from gcore.prompts.tokenizer import load_tokenizer
from gcore.protocols import Receivers, Rendezvous, add_metrics
from gcore.runtime.gloo import join
from gcore.training.backend import NewNetwork
from gcore.training.critic import networks_of
from gcore.training.fsdp import FsdpBackend
from gcore.training.media_model import MediaLogprobModel
from gcore.training.rank import TrainerRank
from gcore.types import MicroBatch, Request, Sample, SamplingParams, UserError
from gcore.weights.bucket import unpack_bucket
from tests.e2e.test_audio import BUILD as HEARING
from tests.e2e.test_vision import SMALL
from tests.ranks import finish_ranks, free_address, start_ranks
from tests.unit.test_training import config_of
from tests.unit.test_vision_training import CPU, contents, network_of, samples_of

pytestmark = pytest.mark.usefixtures("one_rank")
IMAGES = [[0, 1], [], [2], [3, 4, 5], [], [0]]  # seeds of the pictures of each prompt
DELTA = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
DELTA |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
QWEN3_5 = {"architecture": "qwen3_5_text", "config": {**DELTA, "layer_types": ["linear_attention", "full_attention"]}}
DELTA_RULE = {"build": {**SMALL["model"]["build"], **QWEN3_5}}
CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapters": {"lora": {"rank": 4, "parts": ["text", "vision"]}},
    "critic": {},
    "audio": {"build": HEARING},
    "delta rule": DELTA_RULE,
}


def config_for(case: str) -> Config:
    """`eps`: biases of keys have no gradient but rounding, which AdamW would scale up to the learning rate."""
    training = {"lr": 3e-3, "vision_lr": 1e-3, "eps": 1e-5, "max_grad_norm": 0.05, "schedule": "constant"}
    algorithm = {"kl_coef": 0.1, "mini_batches": 2}
    if case == "critic":
        algorithm |= {"adv_estimator": "gae", "gae_lambda": 0.9}
    critic = {"lr": 3e-3, "max_grad_norm": 0.05}
    model = {**SMALL["model"], **CASES[case]}
    return config_of(model=model, data=SMALL["data"], training=training, algorithm=algorithm, critic=critic)


def rank_of(config: Config, rank: int, shard: int) -> TrainerRank:
    policy = NewNetwork(lambda: network_of(config), MediaLogprobModel)
    networks = networks_of(config, policy, load_tokenizer(config.model), 48)
    make = partial(FsdpBackend, config, networks, CPU, torch.float32, shard)
    return TrainerRank(config, make, rank, 1, Tracer(None, f"trainer-{rank}"))


def train_as(rank: int, size: int, shard: int, case: str, folder: Path) -> None:
    """Two steps. Micro-batches are small: some have images, some have none. In two shards, siblings share prompts."""
    trainer, name = rank_of(config_for(case), rank, shard), f"{case}-{size}-{shard}-{rank}"

    async def run() -> tuple[list[Any], dict[str, Any]]:
        await trainer.end_warm_start()
        rows = []
        for step in (1, 2):
            samples = samples_of(contents(config_for(case), folder / f"media-{name}", IMAGES))
            options = {"step": step, "mini_batches": 2, "max_tokens": 60, "cost": CostModel(100.0)}
            layout = make_layout(metas_of(samples), num_ranks=size, shares=shard == 2, **options)
            assert (shared_tokens(layout, metas_of(samples)) > 0.05) == (shard == 2)
            batch = layout[rank]
            own = {s.key: s for s in samples if s.key in batch.keys}
            await trainer.push(0, list(own.values()))
            batch = replace(batch, advantages={key: s.reward for key, s in own.items()})
            await trainer.compute_logprobs(batch)
            stats = await trainer.update(batch)
            rows.append((stats.grad_norm, stats.metrics))
        plan = await trainer.weight_plan()
        weights: dict[str, Any] = {}
        for index in range(plan.num_buckets):
            weights |= unpack_bucket(await trainer.weight_bucket(index, Receivers(())))
        if (critic := trainer.backend.networks.get("critic")) is not None:
            found = critic.model.network.named_parameters()
            weights |= {f"critic/{name}": p.full_tensor().detach().clone() for name, p in found}
        return rows, weights

    found = asyncio.run(run())
    torch.save((*found, trainer.backend.networks["policy"].model.encoded), folder / f"{name}.pt")


def member(rank: int, address: str, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    join(Rendezvous(rank, 2, address), "gloo", timeout_s=120)
    for case in CASES:
        for shard in (1, 2):
            train_as(rank, 2, shard, case, Path(folder))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, one_rank: None) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    ranks = start_ranks(2, member, free_address(), str(folder))
    for case in CASES:
        train_as(0, 1, 1, case, folder)
    finish_ranks(ranks)
    return folder


@pytest.mark.parametrize("shard", [pytest.param(1, marks=pytest.mark.release), 2])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one(trained: Path, case: str, shard: int):
    def read(size: int, shard: int) -> list[Any]:
        return [torch.load(trained / f"{case}-{size}-{shard}-{r}.pt", weights_only=False) for r in range(size)]

    (alone,), pair = read(1, 1), read(2, shard)
    for step in range(2):
        expected = {name: metric.value for name, metric in alone[0][step][1].items()}
        found = add_metrics(*(rank[0][step][1] for rank in pair))
        assert {name: metric.value for name, metric in found.items()} == pytest.approx(expected, abs=1e-5, rel=1e-5)
        assert abs(expected["actor/loss"]) > 1e-3
        assert pair[0][0][step][0] == pair[1][0][step][0] == pytest.approx(alone[0][step][0], rel=1e-4)
    assert pair[0][1].keys() == alone[1].keys() and min(rank[2] for rank in pair) > 0
    for name, value in alone[1].items():
        assert torch.allclose(pair[0][1][name], value, atol=1e-5, rtol=0), name
    network = network_of(config_for(case))
    start = dict(network.named_parameters())
    moved = [n for n in alone[1] if n.endswith(LORA_B) or (n in start and not torch.equal(alone[1][n], start[n]))]
    towers = tuple(tower_of(network))
    assert any(name.startswith(towers) for name in moved) and any("language_model" in name for name in moved)
    assert not any("embed_positions" in name for name in moved)  # of an audio encoder: they are frozen
    if case == "critic":
        assert all(row[1]["critic/loss"].value > 1e-2 for row in alone[0])
        values = {n.removeprefix("critic/"): v for n, v in alone[1].items() if n.startswith("critic/")}
        assert values.pop(SCORE).any() and values.keys() == start.keys()
        assert not any(
            torch.equal(values[name], start[name]) for name in tower_parameters(network_of(config_for(case)))
        )


# --- adapters


@pytest.mark.parametrize("parts", [["text"], ["vision"], ["text", "vision"]])
def test_adapters_sit_on_the_parts_that_are_asked_for(parts: list[str], tmp_path: Path):
    """They learn, nothing else does, and an engine with the merged weights agrees with the trainer."""
    lora = {"rank": 4, "parts": parts}
    config = config_of(
        model={**SMALL["model"], "lora": lora}, data=SMALL["data"], training={"lr": 3e-2, "warm_start": None}
    )
    trainer, network = rank_of(config, 0, 1), network_of(config)
    adapters = adapters_of(network, Lora(**lora))
    towers = {layer.startswith("model.visual.") for layer in adapters.layers}
    assert towers == {part == "vision" for part in parts}
    assert ("model.visual.merger.linear_fc1" in adapters.layers) == ("vision" in parts)
    prompts = contents(config, tmp_path, [[0, 1], [2]])
    engine = SteppedEngine(EmbeddedBackend(network, max_concurrent=8, max_length=48, adapters=adapters))

    async def run() -> list[Any]:
        await trainer.end_warm_start()
        samples = samples_of(prompts)
        await trainer.push(0, samples)
        (batch,) = make_layout(
            metas_of(samples), num_ranks=1, step=1, mini_batches=1, max_tokens=999, cost=CostModel(100.0)
        )
        await trainer.update(replace(batch, advantages={s.key: s.reward for s in samples}))
        await engine.load_weights(1, await trainer.weight_bucket(0, Receivers(())))
        return await engine.generate([Request(p, SamplingParams(6), i) for i, p in enumerate(prompts)])

    found = asyncio.run(asyncio.wait_for(run(), 60))
    engine.close()
    model = trainer.backend.networks["policy"].model
    learned = {name for name, p in model.network.named_parameters() if p.requires_grad}
    assert learned == {layer + end for layer in adapters.layers for end in (LORA_A, LORA_B)}
    samples = {
        (i, 0): Sample(i, 0, p.extended(c.content), np.ones(c.content.num_steps, bool), c.logprobs_S)
        for i, (p, c) in enumerate(zip(prompts, found, strict=True))
    }
    packed = model.pack(
        MicroBatch((tuple(samples),), sum(s.content.size for s in samples.values())),
        samples,
        trainer.backend._context_groups.of(1),
    )
    with torch.no_grad():
        logprobs = model(packed)[0].numpy()
    assert np.abs(logprobs - np.concatenate([c.logprobs_S for c in found])).max() < 1e-5
    base = MediaLogprobModel(network_of(config))
    with torch.no_grad():
        before = base(packed)[0].numpy()
    assert np.abs(logprobs - before).max() > 1e-3


def test_a_model_of_text_has_no_tower_to_adapt():
    network = network_of(config_of())
    with pytest.raises(UserError, match=r"model\.lora\.parts: the model has no vision tower; expected \[text\]"):
        adapters_of(network, Lora(parts=["vision"]))


# --- gradients


@pytest.mark.parametrize(
    ("build", "shares"),
    [(SMALL["model"], False), (SMALL["model"], True), (DELTA_RULE, False), (DELTA_RULE, True)],
    ids=["qwen3_vl", "shared prefixes", "qwen3_5", "qwen3_5 and shared prefixes"],
)
def test_gradients_are_those_of_the_joint_forward_pass(tmp_path: Path, build: dict[str, Any], shares: bool):
    """Packed rows, images that siblings share, and features that enter the decoder twice: the gradient of every
    parameter is that of transformers' own forward pass over one sample at a time."""
    config = config_of(model=build, data=SMALL["data"])
    network, reference = network_of(config), network_of(config)
    samples = {s.key: s for s in samples_of(contents(config, tmp_path, [[0, 1], [2], [1]]))}
    model = MediaLogprobModel(network)
    rows = tuple(samples)[:3], tuple(samples)[3:]
    width = max(sum(samples[key].content.size for key in row) for row in rows)
    packed = model.pack(MicroBatch(rows, width, shares=shares), samples, type("One", (), {"size": 1}))
    assert shares == (len(packed.media) < sum(len(s.content.media) for s in samples.values()))
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=len(packed.targets_S)).astype(np.float32))
    (model(packed)[0] * weights).sum().backward()
    for i, key in enumerate(packed.keys):
        content, own = samples[key].content, weights[packed.sample_S == i]
        inputs = [medium.tensors() for medium in content.media]
        tokens = torch.from_numpy(content.tokens_T.astype(np.int64))
        is_image = (tokens == reference.config.image_token_id).long()[None]
        logits = reference(
            input_ids=tokens[None],
            attention_mask=torch.ones_like(tokens)[None],
            mm_token_type_ids=is_image,
            pixel_values=torch.cat([torch.from_numpy(np.array(each["pixel_values"])) for each in inputs]),
            image_grid_thw=torch.cat([torch.from_numpy(np.array(each["image_grid_thw"])) for each in inputs]),
        ).logits[0]
        wanted = model.traits.scaled(logits[len(content.tokens_P) - 1 : -1].float()).log_softmax(-1)
        (wanted.gather(-1, tokens[len(content.tokens_P) :, None])[:, 0] * own).sum().backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    found = {name: p.grad for name, p in network.named_parameters()}
    assert all(torch.allclose(found[name], expected[name], atol=1e-5, rtol=1e-4) for name in expected)
    assert all(expected[name].abs().max() > 0 for name in tower_parameters(reference))
