"""The critic in a world of one process: its values, its update, where its weights come from, and its checkpoint. Worlds
of several ranks: tests/contract/test_trainer.py and test_resharding.py."""

import asyncio
import copy
import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from gcore.config.base import Model
from gcore.config.placement import CriticPlacement, Placement
from gcore.config.tree import Config
from gcore.content.tokens import tokens_of
from gcore.controller.record import actor_row
from gcore.models.networks import SCORE, load_scorer
from gcore.observe.trace import Tracer
from gcore.prompts.tokenizer import load_tokenizer
from gcore.training.backend import NewNetwork
from gcore.training.critic import networks_of
from gcore.training.fsdp import FsdpBackend
from gcore.training.objective import StepData
from gcore.training.rank import TrainerRank
from gcore.types import MicroBatch, MiniBatch, TrainBatch, UserError
from tests.unit.test_training import (
    CPU,
    batch_of,
    config_of,
    network_of,
    same,
    samples_of,
    save_state,
    update,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("one_rank")
PPO = {"adv_estimator": "gae", "gae_lambda": 0.9, "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}


def ppo_config(critic: dict[str, Any] | None = None, **algorithm) -> Config:
    return config_of(algorithm={**PPO, **algorithm}, critic={"lr": 1e-2, **(critic or {})}, training={"lr": 1e-2})


def trainer_of(config: Config, begin: bool = True) -> TrainerRank:
    networks = networks_of(config, NewNetwork(lambda: network_of(config)), load_tokenizer(config.model), 64)
    backend = partial(FsdpBackend, config, networks, CPU, torch.float32)
    trainer = TrainerRank(config, backend, 0, 1, Tracer(None, "trainer-0"))
    if begin:
        asyncio.run(trainer.end_warm_start())
    return trainer


def critic_weights(trainer: TrainerRank) -> dict[str, np.ndarray]:
    found = trainer.backend.networks["critic"].model.network.named_parameters()
    return {name: p.detach().full_tensor().clone().numpy() for name, p in found}


def values_of(trainer: TrainerRank, samples) -> dict:
    data = StepData({s.key: s for s in samples})
    micros = [m for mini in batch_of(samples, max_tokens=60).mini_batches for m in mini.micro_batches]
    return {key: v.numpy() for key, v in trainer.backend.outputs("critic", micros, data).items()}


def plain_values(network, sample) -> torch.Tensor:
    """Transformers alone: the head on the hidden state before each step."""
    tokens = tokens_of(sample.content)
    hidden = network.model(input_ids=torch.tensor(tokens.tokens_T[None].astype(np.int64))).last_hidden_state[0]
    first = len(tokens.tokens_P)
    return network.score(hidden[first - 1 : first - 1 + sample.num_steps])[:, 0]


def with_head(network, seed: int = 0):
    with torch.no_grad():
        network.score.weight.normal_(generator=torch.Generator().manual_seed(seed))
    return network


def scorer_like(config: Config):
    """A reward model with the body of the policy."""
    scorer = load_scorer(config.model, 0, torch.float32, CPU, tokenizer=load_tokenizer(config.model), new_head=True)
    scorer.model.load_state_dict(network_of(config).model.state_dict())
    return with_head(scorer)


def test_it_starts_as_the_policy_with_values_of_zero():
    trainer, samples = trainer_of(ppo_config()), samples_of()
    found, policy = critic_weights(trainer), weights_of(trainer)
    assert found.pop(SCORE).any() == np.False_
    assert found.keys() == policy.keys() and all(np.array_equal(found[name], policy[name]) for name in found)
    assert not any(values.any() for values in values_of(trainer, samples).values())


@pytest.mark.parametrize("kind", ["reward model", "language model"])
def test_it_starts_from_a_folder(tmp_path, kind):
    config = config_of(run={"seed": 7})
    scorer, samples = scorer_like(config), samples_of()
    (scorer if kind == "reward model" else network_of(config)).save_pretrained(tmp_path)
    trainer = trainer_of(ppo_config(critic={"model": {"path": str(tmp_path)}}))
    found = critic_weights(trainer)
    assert np.array_equal(found["model.norm.weight"], scorer.model.norm.weight.detach().numpy())
    assert not np.array_equal(found["model.embed_tokens.weight"], weights_of(trainer)["model.embed_tokens.weight"])
    values = values_of(trainer, samples)
    for sample in samples:
        expected = plain_values(scorer, sample) if kind == "reward model" else torch.zeros(sample.num_steps)
        assert values[sample.key] == pytest.approx(expected.detach().numpy(), abs=1e-5)


def test_a_folder_of_another_size_is_refused(tmp_path):
    build = {**config_of().model.build.model_dump(), "hidden_size": 16}
    other = network_of(config_of(model={"build": build}))
    other.save_pretrained(tmp_path)
    config = ppo_config(critic={"model": {"path": str(tmp_path)}})
    trainer_of(config)  # another width is fine: the critic is a network of its own
    vocabulary = copy.deepcopy(other)
    vocabulary.resize_token_embeddings(8)
    vocabulary.config.vocab_size = 16
    vocabulary.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"critic\.model\.path=.*embed_tokens\.weight has shape \(8, 16\)"):
        trainer_of(config)


def test_an_update_is_that_of_plain_torch():
    """GAE, the clipped value loss and AdamW, from the definitions."""
    config, samples = ppo_config(critic={"max_grad_norm": 1e9}, kl_coef=0.0), samples_of()
    trainer = trainer_of(config)
    network = scorer_like(config)
    with torch.no_grad():
        network.score.weight.zero_()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, betas=config.training.betas, weight_decay=0.0)
    for _ in range(3):
        stats = update(trainer, samples, batch_of(samples, max_tokens=60))
        old = [plain_values(network, s).detach() for s in samples]
        total, count = torch.zeros(()), sum(int(s.mask_S.sum()) for s in samples)
        for sample, before in zip(samples, old, strict=True):
            at = np.flatnonzero(sample.mask_S)
            advantage, after, returns = 0.0, 0.0, {}
            for t in reversed(at):
                reward = sample.reward if t == at[-1] else 0.0
                advantage = reward + after - float(before[t]) + 0.9 * advantage
                after, returns[t] = float(before[t]), advantage + float(before[t])
            total = total + sum((plain_values(network, sample)[t] - returns[t]) ** 2 / 2 for t in at) / count
        optimizer.zero_grad()
        total.backward()
        assert stats.metrics["critic/loss"].value == pytest.approx(total.item(), abs=1e-5)
        optimizer.step()
    expected = {name: p.detach().numpy() for name, p in network.named_parameters()}
    for name, value in critic_weights(trainer).items():
        assert np.allclose(value, expected[name], atol=5e-4), name
    values = values_of(trainer, samples)
    assert max(np.abs(v).max() for v in values.values()) > 0.05


def test_the_critic_learns_the_returns():
    trainer, samples = trainer_of(ppo_config(critic={"value_clip": None}, kl_coef=0.0)), samples_of(prompts=2)
    batch = batch_of(samples)
    variance = [update(trainer, samples, batch).metrics["critic/explained_variance"].value for _ in range(30)]
    assert variance[0] == pytest.approx(0.0, abs=1e-6) and variance[-1] > 0.7


def test_critic_warmup_leaves_the_policy_as_it_is():
    trainer, samples = trainer_of(ppo_config(critic={"warmup_steps": 1})), samples_of()
    policy, critic, batch = weights_of(trainer), critic_weights(trainer), batch_of(samples)
    stats = update(trainer, samples, batch)
    assert stats.updates == trainer.trained["policy"].updates == 0 and trainer.trained["critic"].updates == 1
    assert same(weights_of(trainer), policy) and not same(critic_weights(trainer), critic)
    assert update(trainer, samples, dataclasses.replace(batch, step=2)).updates == 1
    assert not same(weights_of(trainer), policy)


def test_epochs_and_early_stop():
    samples, batch = samples_of(), batch_of(samples_of(), mini_batches=2)
    full = trainer_of(ppo_config(epochs=3, mini_batches=2))
    assert update(full, samples, batch).updates == full.trained["policy"].updates == full.trained["critic"].updates == 6
    config = ppo_config(epochs=3, mini_batches=2, early_stop_kl=1e-4)
    stopped = trainer_of(config)
    stats = update(stopped, samples, batch)
    # the first mini-batch has the policy of before; the next one sees that it has changed
    assert (stats.updates, stopped.trained["policy"].updates, stopped.trained["critic"].updates) == (1, 1, 6)
    assert stats.metrics["actor/stopped_early"].value == 1.0
    assert all(p.grad is None for p in stopped.backend.networks["policy"].model.network.parameters())
    once = trainer_of(config)
    first = dataclasses.replace(batch, mini_batches=batch.mini_batches[:1])
    given = [s for s in samples if s.key in first.keys]
    loose = dataclasses.replace(first, advantages={s.key: s.reward for s in given})
    assert update(once, given, loose).updates == 1  # of two further epochs over the same mini-batch, none


def test_a_rank_without_samples_joins_the_updates():
    """A step may have fewer samples than there are ranks."""
    trainer = trainer_of(ppo_config(mini_batches=2))
    before = critic_weights(trainer)
    mini = MiniBatch((MicroBatch((), 8),), num_actions=3, num_samples=1)
    batch = TrainBatch(1, (mini, mini))
    asyncio.run(trainer.compute_logprobs(batch))
    stats = asyncio.run(trainer.update(batch))
    assert stats.updates == 2 and stats.skipped == 0 and stats.metrics["critic/loss"].total == 0.0
    assert same(before, critic_weights(trainer))  # the gradients of the others are missing here


def test_bad_updates_of_policy_and_critic_are_counted_apart(monkeypatch):
    """A finite update of the critic between two bad ones of the policy does not start a new count."""
    trainer, samples = trainer_of(ppo_config()), samples_of()
    real = trainer.backend.step
    bad = {"policy"}

    def step(lr, network="policy"):
        return float("nan") if network in bad else real(lr, network)

    monkeypatch.setattr(trainer.backend, "step", step)
    monkeypatch.setattr(trainer, "_dump", lambda *_: None)
    for _ in range(2):
        assert update(trainer, samples, batch_of(samples)).skipped == 1
    with pytest.raises(UserError, match="3 updates in a row"):
        update(trainer, samples, batch_of(samples))
    trainer = trainer_of(ppo_config())
    real, bad = trainer.backend.step, {"critic"}
    monkeypatch.setattr(trainer.backend, "step", step)
    stats = [update(trainer, samples, batch_of(samples)) for _ in range(2)]
    assert [s.metrics["critic/skipped_updates"].value for s in stats] == [1.0, 1.0]
    assert trainer.trained["critic"].updates == 0
    with pytest.raises(UserError, match="3 updates in a row"):
        update(trainer, samples, batch_of(samples))


def test_a_critic_whose_weights_are_infinite_ends_the_run(monkeypatch):
    trainer, samples = trainer_of(ppo_config()), samples_of()
    real = trainer.backend.step

    def step(lr, network="policy"):
        norm = real(lr, network)
        if network == "critic":
            next(trainer.backend.networks["critic"].model.network.parameters()).data.fill_(math.inf)
        return norm

    monkeypatch.setattr(trainer.backend, "step", step)
    with pytest.raises(UserError, match=r"the weights of the critic became NaN or infinite in the update of step 1"):
        update(trainer, samples, batch_of(samples))


def test_skipped_updates_of_the_critic_are_a_count(monkeypatch):
    """Of a training step; not the mean over its updates or ranks."""
    trainer, samples = trainer_of(ppo_config(epochs=2, mini_batches=2)), samples_of()
    real, norms = trainer.backend.step, iter([math.nan, 1.0, math.inf, 1.0])

    def step(lr, network="policy"):
        return next(norms) if network == "critic" else real(lr, network)

    monkeypatch.setattr(trainer.backend, "step", step)
    monkeypatch.setattr(trainer, "_dump", lambda *_: None)
    stats = update(trainer, samples, batch_of(samples, mini_batches=2))
    assert actor_row([stats, stats])["critic/skipped_updates"] == 2.0


def test_a_trainer_rank_without_samples_beside_critic_ranks():
    """More ranks than samples: it gets no values, and still meets the others in collectives."""
    config = ppo_config().model_copy(update={"placement": Placement(critic=CriticPlacement(ranks=1))})
    trainer, batch = trainer_of(config), batch_of(samples_of())
    assert "critic" not in trainer.trained
    padding = [dataclasses.replace(micro, rows=()) for micro in batch.mini_batches[0].micro_batches]
    mini = dataclasses.replace(batch.mini_batches[0], micro_batches=tuple(padding))
    assert update(trainer, [], dataclasses.replace(batch, mini_batches=(mini,))).updates == 1


@pytest.mark.parametrize(
    "algorithm", [{}, {"adaptive_kl": {"target": 0.01, "horizon": 20}, "adaptive_entropy": {"target": 9.0}}]
)
def test_a_checkpoint_continues_to_the_last_bit(tmp_path, algorithm):
    config = ppo_config(epochs=2, **algorithm)
    trainer = trainer_of(config)
    for seed in range(2):
        update(trainer, samples_of(seed), batch_of(samples_of(seed)))
    save_state(trainer, tmp_path)
    assert (tmp_path / "critic").is_dir() and (tmp_path / "critic_optimizer").is_dir()
    other = trainer_of(config.model_copy(update={"run": config.run.model_copy(update={"seed": 99})}), begin=False)
    asyncio.run(other.load(str(tmp_path)))
    assert other.coefficients == trainer.coefficients
    assert other.trained["critic"].updates == trainer.trained["critic"].updates == 4
    assert bool(algorithm) == (trainer.coefficients.kl != 0.1)
    samples = samples_of(5)
    assert update(other, samples, batch_of(samples)) == update(trainer, samples, batch_of(samples))
    assert same(critic_weights(other), critic_weights(trainer)) and same(weights_of(other), weights_of(trainer))


def test_a_checkpoint_without_a_critic_is_refused(tmp_path):
    config = config_of(algorithm={"kl_coef": 0.1})
    plain = trainer_of(config)
    assert "critic" not in plain.backend.networks
    save_state(plain, tmp_path)
    assert not (tmp_path / "critic").exists()
    with pytest.raises(UserError, match=r"has no critic: it was saved with another algorithm\.adv_estimator"):
        asyncio.run(trainer_of(ppo_config(), begin=False).load(str(tmp_path)))


def test_with_adapters_the_critic_trains_whole(tmp_path):
    """The policy is frozen but for its adapters. The critic starts from the same weights, has no adapters, and its
    checkpoint continues to the last bit."""
    algorithm, lora = {**PPO, "mini_batches": 2}, {"rank": 2}
    config = config_of(
        model={"lora": lora}, algorithm=algorithm, critic={"lr": 1e-2}, training={"lr": 1e-2}, run={"seed": 3}
    )
    trainer = trainer_of(config)
    start, base = critic_weights(trainer), dict(network_of(config).named_parameters())
    assert not start[SCORE].any() and not any("lora" in name for name in start)
    assert all(np.array_equal(value, base[name].detach().numpy()) for name, value in start.items() if name != SCORE)
    policy = trainer.backend.networks["policy"].model.network
    frozen = policy.get_parameter("model.embed_tokens.weight").full_tensor().clone()
    for seed in range(2):
        update(trainer, samples_of(seed), batch_of(samples_of(seed)))
    trained = critic_weights(trainer)
    assert all(not np.array_equal(start[name], value) for name, value in trained.items())
    after = policy.get_parameter("model.embed_tokens.weight").full_tensor()
    assert torch.equal(frozen, after)
    save_state(trainer, tmp_path)
    other = trainer_of(config, begin=False)
    asyncio.run(other.load(str(tmp_path)))
    samples = samples_of(5)
    assert update(other, samples, batch_of(samples)) == update(trainer, samples, batch_of(samples))
    assert same(critic_weights(other), critic_weights(trainer))


def test_a_critic_is_not_built():
    with pytest.raises(
        ValueError, match=r"(?s)critic\.model\.build.*random weights cannot score; expected path instead"
    ):
        ppo_config(critic={"model": Model(build=config_of().model.build).model_dump()})
