"""The trainer in a world of one process: packing, global denominators, padding, state, bad gradients, schedule."""

import asyncio
import contextlib
import copy
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from gcore.config.tree import Config
from gcore.content.tokens import Tokens
from gcore.cost.workload import CostModel
from gcore.models.networks import load_model
from gcore.observe.trace import Tracer
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import meta_of
from gcore.prompts.tokenizer import load_tokenizer
from gcore.protocols import Receivers, UpdateStats
from gcore.training import logprob_model as policy_module
from gcore.training import optimizer as optimizer_module
from gcore.training.backend import NewNetwork
from gcore.training.fsdp import FsdpBackend, joined_micros
from gcore.training.logprob_model import LogprobModel, to_tensors
from gcore.training.lora import trainable_parameters
from gcore.training.objective import StepData, step_columns
from gcore.training.optimizer import HostMoments
from gcore.training.rank import TrainerRank
from gcore.training.schedule import learning_rate, learning_rate_of
from gcore.types import MicroBatch, MiniBatch, Sample, TrainBatch, UserError, Written
from gcore.weights.bucket import PACKED, pack_bucket, to_host_memory, unpack_bucket
from tests.e2e.helpers import RECIPE

CPU = torch.device("cpu")
MAX_RESPONSE_LENGTH = 8


pytestmark = pytest.mark.usefixtures("one_rank")


def config_of(**sections) -> Config:
    tree = copy.deepcopy(RECIPE)
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Config.model_validate(tree)


def network_of(config: Config):
    return load_model(config.model, load_tokenizer(config.model), config.run.seed, torch.float32, CPU)


def trainer_of(config: Config) -> TrainerRank:
    backend = partial(FsdpBackend, config, {"policy": NewNetwork(lambda: network_of(config))}, CPU, torch.float32)
    return TrainerRank(config, backend, rank=0, threads=1, tracer=Tracer(None, "trainer-0"))


def samples_of(seed: int = 0, prompts: int = 4, siblings: int = 3) -> list[Sample]:
    """Random tokens, lengths and rewards, which `update` takes as advantages. Some steps are no actions, but
    the last one of a sample always is."""
    rng = np.random.default_rng(seed)
    found = []
    for prompt in range(prompts):
        start = rng.integers(4, 16, rng.integers(2, 10))
        for sibling in range(siblings):
            n = int(rng.integers(1, MAX_RESPONSE_LENGTH + 1))
            mask = rng.random(n) > 0.2
            mask[-1] = True
            tokens = np.concatenate([start, rng.integers(4, 16, n)]).astype(np.int32)
            advantage = float(np.float32(rng.normal()))
            logprobs = -rng.exponential(1, n).astype(np.float32)
            found.append(Sample(prompt, sibling, Tokens.split(tokens, n), mask, logprobs, reward=advantage))
    return found


def batch_of(samples, max_tokens=10_000, mini_batches=1, objective="policy") -> TrainBatch:
    (batch,) = make_layout(
        [meta_of(s) for s in samples],
        step=1,
        num_ranks=1,
        mini_batches=mini_batches,
        max_tokens=max_tokens,
        cost=CostModel(100.0),
        objective=objective,
    )
    return batch


def update(trainer: TrainerRank, samples, batch: TrainBatch) -> UpdateStats:
    batch = dataclasses.replace(batch, advantages=batch.advantages or {s.key: s.reward for s in samples})

    async def run():
        await trainer.push(0, samples)
        await trainer.compute_logprobs(batch)
        return await trainer.update(batch)

    return asyncio.run(run())


def save_state(trainer: TrainerRank, folder: Path | str) -> Written:
    async def run():
        assert await trainer.snapshot() > 0
        return await trainer.write(str(folder))

    written = asyncio.run(run())
    assert not written.error
    return written


def weights_of(trainer: TrainerRank) -> dict[str, np.ndarray]:
    return {k: v.numpy() for k, v in unpack_bucket(asyncio.run(trainer.weight_bucket(0, Receivers(())))).items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """To the last bit."""
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def alone(network, sample: Sample, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies of a sample's steps by the library's plain forward pass."""
    tokens = torch.from_numpy(sample.content.tokens_T.astype(np.int64))
    logprobs = torch.log_softmax(network(tokens[None]).logits[0].float() / temperature, -1)
    first = len(tokens) - sample.num_steps
    wanted = logprobs[first - 1 : len(tokens) - 1]
    return wanted.gather(-1, tokens[first:, None])[:, 0], -(wanted.exp() * wanted).sum(-1)


# --- packing


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("max_tokens", [10_000, 40])
@pytest.mark.parametrize("in_one_row", [False, True], ids=["masked", "varlen"])
def test_packed_logprobs_are_those_of_each_sample_alone(architecture, max_tokens, in_one_row):
    config = config_of(model={"build": {**RECIPE["model"]["build"], "architecture": architecture}})
    network = network_of(config)
    samples = [dataclasses.replace(s, temperature=(0.7, 1.0, 1.3)[s.sibling % 3]) for s in samples_of(prompts=6)]
    by_key = {s.key: s for s in samples}
    policy, reference = LogprobModel(network), copy.deepcopy(network)
    micros = batch_of(samples, max_tokens).mini_batches[0].micro_batches
    assert any(len(row) > 1 for micro in micros for row in micro.rows)
    assert (len(micros) > 1) == (max_tokens == 40)
    seen = []
    with torch.no_grad():
        for micro in micros:
            packed = to_tensors(micro, by_key, CPU, in_one_row)
            logprobs, entropies = policy(packed)
            for i, key in enumerate(packed.keys):
                expected, entropy = alone(reference, by_key[key], by_key[key].temperature)
                assert torch.allclose(logprobs[packed.sample_S == i], expected, atol=1e-5, rtol=0), key
                assert torch.allclose(entropies[packed.sample_S == i], entropy, atol=1e-5, rtol=0), key
                seen.append(key)
    assert sorted(seen) == sorted(by_key)


def test_packed_by_hand():
    def sample(key, tokens, n, mask, logprobs):
        content = Tokens.split(np.array(tokens, np.int32), n)
        return Sample(*key, content, np.array(mask) > 0, np.array(logprobs, np.float32))

    samples = {
        (0, 0): sample((0, 0), [5, 6, 7], 2, [1, 1], [0, 0]),
        (0, 1): sample((0, 1), [5, 8], 1, [0], [-0.25]),
        (1, 0): sample((1, 0), [9, 9, 4], 1, [1], [0]),
    }
    packed = to_tensors(MicroBatch((((0, 0), (0, 1)), ((1, 0),)), 6), samples, CPU)
    assert packed.tokens_RW.tolist() == [[5, 6, 7, 5, 8, 0], [9, 9, 4, 0, 0, 0]]
    assert packed.positions_RW.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 0, 0, 0]]
    assert packed.select_S.tolist() == [0, 1, 3, 7]
    assert packed.targets_S.tolist() == [6, 7, 8, 4]
    assert packed.sample_S.tolist() == [0, 0, 1, 2]
    advantages = {(1, 0): [2.0], (0, 1): [-0.5], (0, 0): [0.5, 0.5]}
    data = StepData(samples, {"advantages": {key: torch.tensor(values) for key, values in advantages.items()}})
    columns = step_columns(packed, data, CPU)
    assert columns.mask_S.tolist() == [1, 1, 0, 1]
    assert columns.advantages_S.tolist() == [0.5, 0.5, -0.5, 2.0]
    assert columns.rollout_logprobs_S.tolist() == [0, 0, -0.25, 0]
    assert columns.old_logprobs_S is None and columns.ref_logprobs_S is None
    assert packed.keys == ((0, 0), (0, 1), (1, 0))
    assert packed.mask_R1WW[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert to_tensors(MicroBatch((((0, 0),), ((1, 0),)), 6), samples, CPU).mask_R1WW is None


@pytest.mark.parametrize("biased", [False, True])
def test_logits_in_chunks_are_the_same(monkeypatch, biased):
    config, samples = config_of(), samples_of()
    network = network_of(config)
    if biased:
        network.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, len(network.lm_head.weight)))
    policy = LogprobModel(network)
    packed = to_tensors(batch_of(samples).mini_batches[0].micro_batches[0], {s.key: s for s in samples}, CPU)

    def run():
        policy.zero_grad()
        logprobs, entropies = policy(packed)
        (logprobs.sum() + entropies.square().sum()).backward()
        return logprobs.detach(), entropies.detach(), [p.grad.clone() for p in policy.parameters()]

    whole = run()
    monkeypatch.setattr(policy_module, "LOGITS_AT_ONCE", 16 * 7)  # 7 steps at a time
    parts = run()
    for a, b in zip([*whole[:2], *whole[2]], [*parts[:2], *parts[2]], strict=True):
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-5)


# --- global denominators


def gradients_of(trainer: TrainerRank, samples, batch: TrainBatch) -> tuple[dict[str, torch.Tensor], UpdateStats]:
    """What reaches the optimizer."""
    found: dict[str, torch.Tensor] = {}

    def look(lr, network="policy"):
        for name, parameter in trainer.backend.networks["policy"].model.network.named_parameters():
            found[name] = parameter.grad.full_tensor().clone()
            parameter.grad = None
        return 0.0

    trainer.backend.step = look
    stats = update(trainer, samples, batch)
    del trainer.backend.step
    return found, stats


@torch.no_grad()
def off_policy(trainer: TrainerRank, samples) -> dict[tuple[int, int], torch.Tensor]:
    """Old logprobs other than the policy's own, so that ratios and clips matter."""
    rng = np.random.default_rng(5)
    network = trainer_network(trainer)
    for s in samples:
        noise = torch.from_numpy(rng.normal(0, 0.3, s.num_steps).astype(np.float32))
        trainer._data.columns.setdefault("old_logprobs", {})[s.key] = alone(network, s)[0] + noise
    return dict(trainer._data.columns["old_logprobs"])


def trainer_network(trainer: TrainerRank):
    network = network_of(trainer._config)
    network.load_state_dict({k: torch.from_numpy(v) for k, v in weights_of(trainer).items()}, strict=False)
    return network


AGGREGATIONS = ("token_mean", "sequence_mean", "fixed_length")


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_does_not_depend_on_the_split(aggregation, loss):
    algorithm = {"loss_aggregation": aggregation, "policy_loss": loss, "kl_coef": 0.1, "entropy_coef": 0.01}
    trainer, samples = trainer_of(config_of(algorithm=algorithm)), samples_of()
    asyncio.run(trainer.end_warm_start())
    update(trainer, samples, batch_of(samples))  # away from the reference
    one, many = batch_of(samples), batch_of(samples, 20)
    assert len(one.mini_batches[0].micro_batches) == 1 and len(many.mini_batches[0].micro_batches) > 5
    old = off_policy(trainer, samples)
    whole, stats = gradients_of(trainer, samples, one)
    trainer._data.columns["old_logprobs"] = old
    split, split_stats = gradients_of(trainer, samples, many)
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-3
    assert stats.metrics["actor/clip_frac"].total > 0 and stats.metrics["actor/kl"].total > 0
    for name, gradient in whole.items():
        assert torch.allclose(split[name], gradient, atol=1e-6, rtol=1e-5), name
    for name, metric in stats.metrics.items():
        assert split_stats.metrics[name].value == pytest.approx(metric.value, abs=1e-5), name
        if metric.reducer == "mean":
            assert split_stats.metrics[name].weight == pytest.approx(metric.weight, abs=1e-9), name


@pytest.mark.parametrize("importance", ["none", "token", "sequence", "geometric"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_is_that_of_the_formula(aggregation, importance):
    """On policy: sum of -A w logp over the steps that count, each sample alone, divided as the paper says; w is how
    much likelier the trainer finds a token than the engine said it was, at most 2."""
    trainer = trainer_of(config_of(algorithm={"loss_aggregation": aggregation, "importance": {"level": importance}}))
    samples = samples_of()
    found, stats = gradients_of(trainer, samples, batch_of(samples, 40))
    network, losses, ratios = network_of(trainer._config), [], []
    for s in samples:
        mask, advantage = torch.from_numpy(s.mask_S), s.reward
        logprobs = alone(network, s)[0][mask]
        log_ratio = logprobs.detach() - torch.from_numpy(s.rollout_logprobs_S)[mask]
        if importance in ("sequence", "geometric"):
            whole = log_ratio.sum() if importance == "sequence" else log_ratio.mean()
            log_ratio = whole.expand_as(log_ratio)
        ratios.append(log_ratio.exp())
        weights = 1 if importance == "none" else ratios[-1].clamp(max=2)
        losses.append((-advantage * weights * logprobs).sum() / (mask.sum() if "seq" in aggregation else 1))
    num_actions = sum(int(s.mask_S.sum()) for s in samples)
    divisor = {"token_mean": num_actions, "sequence_mean": 12, "fixed_length": 12 * MAX_RESPONSE_LENGTH}[aggregation]
    (sum(losses) / divisor).backward()
    for name, parameter in network.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-6, rtol=1e-4), name
    assert stats.metrics["actor/entropy"].weight == num_actions
    ratios_A = torch.cat(ratios)
    assert stats.metrics["rollout/importance_mean"].total == pytest.approx(float(ratios_A.clamp(max=2).sum()), rel=1e-4)
    assert stats.metrics["rollout/importance_capped_frac"].total == int((ratios_A > 2).sum())
    if importance == "token":
        assert 0 < stats.metrics["rollout/importance_capped_frac"].total < num_actions


def test_imitation_is_the_mean_negative_logprob():
    trainer, samples = trainer_of(config_of(algorithm={"loss_aggregation": "fixed_length"})), samples_of()
    _, stats = gradients_of(trainer, samples, batch_of(samples, 40, objective="warm_start"))
    with torch.no_grad():
        network = network_of(trainer._config)
        wanted = torch.cat([alone(network, s)[0][torch.from_numpy(s.mask_S)] for s in samples])
    (metric,) = stats.metrics.values()
    assert list(stats.metrics) == ["warm_start/loss"]
    assert metric.value == pytest.approx(-wanted.mean().item(), abs=1e-5)


def test_padding_contributes_exactly_nothing():
    """A rank without work of its own keeps the others company: same bits, same sums."""
    algorithm = {"kl_coef": 0.1, "entropy_coef": 0.01}
    samples = samples_of()
    real = batch_of(samples, 40).mini_batches[0]
    empty = MicroBatch((), 8)
    results = []
    for micros in (
        real.micro_batches,
        (*real.micro_batches, empty, empty),
        (empty, real.micro_batches[0], empty, *real.micro_batches[1:]),
    ):
        trainer = trainer_of(config_of(algorithm=algorithm))
        asyncio.run(trainer.end_warm_start())
        update(trainer, samples, batch_of(samples))
        batch = TrainBatch(2, (MiniBatch(micros, real.num_actions, real.num_samples),))
        off_policy(trainer, samples)
        gradients, stats = gradients_of(trainer, samples, batch)
        results.append(({name: g.numpy() for name, g in gradients.items()}, stats))
    for gradients, stats in results[1:]:
        assert same(gradients, results[0][0]) and stats == results[0][1]


def test_nothing_but_padding_gives_zero():
    trainer = trainer_of(config_of(algorithm={"kl_coef": 0.1, "entropy_coef": 0.01}))
    asyncio.run(trainer.end_warm_start())
    gradients, stats = gradients_of(trainer, [], TrainBatch(1, (MiniBatch((MicroBatch((), 8),), 5, 2),)))
    assert all(not g.any() for g in gradients.values()) and {m.total for m in stats.metrics.values()} == {0.0}


# --- updates


def test_an_update_is_one_clipped_adamw_step():
    training = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.05}
    trainer, samples = trainer_of(config_of(training=training)), samples_of()
    network = network_of(trainer._config)
    gradients, _ = gradients_of(trainer, samples, batch_of(samples))
    stats = update(trainer, samples, batch_of(samples))
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5) and norm > 0.05
    assert (stats.lr, stats.updates, stats.skipped) == (1e-2, 1.0, 0.0)
    norms = [p for p in network.parameters() if p.ndim < 2]
    groups = [{"params": [p for p in network.parameters() if p.ndim >= 2]}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for name, parameter in network.named_parameters():
        parameter.grad = gradients[name] * 0.05 / (norm + 1e-6)
    optimizer.step()
    for name, value in weights_of(trainer).items():
        expected = network.get_parameter(name).detach().numpy()
        assert np.allclose(value, expected, atol=1e-5, rtol=0), name


@pytest.mark.parametrize("asked", [False, True])
def test_norms_and_biases_decay_only_if_asked(asked):
    """No gradient and a decay of lr x weight_decay = 0.1: each parameter is 0.9 of what it was, or what it was."""
    model = {"build": {**RECIPE["model"]["build"], "architecture": "qwen2"}}  # has biases
    training = {"lr": 0.2, "weight_decay": 0.5, "weight_decay_norms": asked}
    trainer, samples = trainer_of(config_of(model=model, training=training)), samples_of()
    with torch.no_grad():
        for parameter in trainer.backend.networks["policy"].model.network.parameters():
            if parameter.ndim < 2:
                parameter.fill_(0.5)
    before = weights_of(trainer)
    silent = [dataclasses.replace(s, reward=0.0) for s in samples]
    update(trainer, silent, batch_of(silent))
    kinds = {"norm.weight": 0, ".bias": 0, "proj.weight": 0, "embed_tokens.weight": 0}
    for name, value in weights_of(trainer).items():
        factor = 0.9 if value.ndim > 1 or asked else 1.0
        assert np.allclose(value, before[name] * np.float32(factor), atol=1e-7, rtol=0), name
        for kind in kinds:
            kinds[kind] += name.endswith(kind)
    assert all(kinds.values())


def test_weights_are_a_copy_under_the_library_s_names():
    trainer, samples = trainer_of(config_of()), samples_of()
    before = weights_of(trainer)
    network = network_of(trainer._config)
    assert same(before, {k: v.detach().numpy() for k, v in network.named_parameters()})
    kept = {k: v.copy() for k, v in before.items()}
    update(trainer, samples, batch_of(samples))
    assert same(before, kept) and not same(before, weights_of(trainer))


def test_a_sample_is_pushed_once_and_trained_once():
    trainer, samples = trainer_of(config_of()), samples_of()
    update(trainer, samples, batch_of(samples))
    assert trainer._data.samples == {}
    update(trainer, samples, batch_of(samples))
    asyncio.run(trainer.push(0, samples[:1]))
    with pytest.raises(AssertionError, match=r"\(0, 0\) pushed twice \(now by controller 1\)"):
        asyncio.run(trainer.push(1, samples[:1]))


def test_later_mini_batches_are_compared_with_the_policy_before_the_step():
    trainer, samples = trainer_of(config_of(algorithm={"mini_batches": 2})), samples_of()
    logprobs = {s.key: alone(network_of(trainer._config), s)[0].detach() for s in samples}
    batch = dataclasses.replace(batch_of(samples, mini_batches=2), advantages={s.key: s.reward for s in samples})
    asyncio.run(trainer.push(0, samples))
    asyncio.run(trainer.compute_logprobs(batch))
    trainer._fill_targets(batch)
    for key, expected in logprobs.items():
        assert torch.allclose(trainer._data.columns["old_logprobs"][key], expected, atol=1e-5, rtol=0)
    parts = (dataclasses.replace(batch, mini_batches=(mini,)) for mini in batch.mini_batches)
    first, second = (trainer._train("policy", part) for part in parts)
    assert abs(first.metrics["actor/approx_kl"].total) < 1e-4 < abs(second.metrics["actor/approx_kl"].total)
    mask = np.concatenate([s.mask_S for s in samples[:6]])
    off = np.concatenate([logprobs[s.key].numpy() - s.rollout_logprobs_S for s in samples[:6]])
    assert first.metrics["rollout/logprob_diff_mean"].total == pytest.approx(float(np.abs(off)[mask].sum()), abs=1e-4)


# --- bad gradients


def poisoned(samples) -> list[Sample]:
    first, *rest = samples
    return [dataclasses.replace(first, reward=math.nan), *rest]


def test_nan_gradients_are_skipped_counted_and_end_the_run_in_a_row(tmp_path):
    run = {"dir": str(tmp_path)}
    trainer, samples = trainer_of(config_of(run=run, training={"max_bad_updates": 2})), samples_of()
    update(trainer, samples, batch_of(samples))
    before = weights_of(trainer)
    moments = [v["exp_avg"].full_tensor().clone() for v in trainer.backend.networks["policy"].optimizer.state.values()]
    bad = update(trainer, poisoned(samples), batch_of(samples))
    assert (bad.skipped, bad.grad_norm, bad.updates, bad.bad_in_a_row) == (1.0, 0.0, 1.0, 1)
    parameters = list(trainer.backend.networks["policy"].model.network.parameters())
    assert all(isinstance(p, DTensor) for p in parameters)  # sharded again after the dump, so a checkpoint is exact
    assert same(weights_of(trainer), before)
    after = [v["exp_avg"].full_tensor() for v in trainer.backend.networks["policy"].optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    good = update(trainer, samples, batch_of(samples))  # breaks the row
    assert good.skipped == 0.0 and not same(weights_of(trainer), before)
    assert trainer.trained["policy"].updates == 2
    update(trainer, poisoned(samples), batch_of(samples))
    with pytest.raises(UserError, match=r"2 updates in a row .*training\.max_bad_updates"):
        update(trainer, poisoned(samples), batch_of(samples))


def test_the_samples_of_a_bad_update_are_written_down(tmp_path):
    config = config_of(
        run={"dir": str(tmp_path), "name": "sick"}, algorithm={"mini_batches": 2, "kl_coef": 0.1}, training=PATIENT
    )
    trainer = trainer_of(config)
    asyncio.run(trainer.end_warm_start())
    samples = [dataclasses.replace(s, reward=0.5 + s.sibling) for s in samples_of()]
    sick = [*samples[:6], *poisoned(samples[6:])]  # the second half of the prompts is the second mini-batch
    expected = {s.key: alone(network_of(config), s)[0].detach().numpy() for s in samples}
    stats = update(trainer, sick, batch_of(samples, mini_batches=2))
    assert (stats.skipped, stats.updates, trainer.trained["policy"].updates) == (1.0, 2.0, 1)
    (file,) = (tmp_path / "sick" / "bad_batches").iterdir()
    assert file.name == "step_1_update_2_rank_0.json"
    rows = {(row["prompt_id"], row["sibling"]): row for row in json.loads(file.read_text())}
    assert sorted(rows) == [s.key for s in samples[6:]]
    for s in sick[6:]:
        row = rows[s.key]
        assert row["tokens"] == s.content.tokens_T.tolist() and row["mask"] == s.mask_S.tolist()
        assert (row["reward"] == s.reward or math.isnan(s.reward)) and row["temperature"] == 1.0
        assert np.array_equal(row["advantages"], np.full(s.num_steps, s.reward, np.float32), equal_nan=True)
        assert np.array_equal(row["rollout_logprobs"], s.rollout_logprobs_S)
        assert np.allclose(row["old_logprobs"], expected[s.key], atol=1e-5)
        assert np.allclose(row["ref_logprobs"], expected[s.key], atol=1e-5)
        assert len(row["logprobs"]) == s.num_steps and row["logprobs"] != row["old_logprobs"]  # one update later
    assert math.isnan(rows[samples[6].key]["advantages"][0])


PATIENT = {"max_bad_updates": 100}


@pytest.mark.parametrize("objective", ["policy", "warm_start"])
def test_weights_that_became_nan_end_the_run_at_once(objective):
    """AdamW multiplies the weights by 1 - lr x decay, more than float32 holds. The norm of the gradients is finite."""
    rates = {"lr": 1e20, "weight_decay": 1e20, "warm_start": {"steps": 2, "lr": 1e20}}
    trainer = trainer_of(config_of(training={**rates, **PATIENT}))
    batch = dataclasses.replace(batch_of(samples_of()), objective=objective)
    key = r"training.lr=1e\+20" if objective == "policy" else "training.warm_start.lr="
    with pytest.raises(UserError, match=rf"the weights of the policy became NaN or .* of step 1 \({key}"):
        update(trainer, samples_of(), batch)


def test_weights_that_are_nan_at_the_start_are_no_fault_of_the_learning_rate():
    config = config_of()
    network = network_of(config)
    with torch.no_grad():
        next(network.parameters())[0, 0] = math.nan
    backend = partial(FsdpBackend, config, {"policy": NewNetwork(lambda: network)}, CPU, torch.float32)
    with pytest.raises(UserError, match=r"weights of the policy are NaN or infinite before the first .*model\.path"):
        TrainerRank(config, backend, rank=0, threads=1, tracer=Tracer(None, "trainer-0"))


def test_the_number_of_files_is_bounded(tmp_path):
    config = config_of(run={"dir": str(tmp_path), "name": "sick"}, training=PATIENT)
    trainer, samples = trainer_of(config), samples_of(prompts=1)
    for step in range(1, 12):
        update(trainer, poisoned(samples), dataclasses.replace(batch_of(samples), step=step))
    names = sorted(file.name for file in (tmp_path / "sick" / "bad_batches").iterdir())
    assert names == sorted(f"step_{step}_update_1_rank_0.json" for step in range(1, 9))


# --- KL in the reward


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_kl_in_the_reward_is_charged_to_the_sample_or_to_each_step(estimator, per_step):
    algorithm = {"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": estimator, "importance": {"level": "none"}}
    algorithm["adv_estimator"] = "reinforce_pp" if per_step else "grpo"
    trainer, samples = trainer_of(config_of(algorithm=algorithm)), samples_of()
    reference = network_of(trainer._config)
    asyncio.run(trainer.end_warm_start())
    with torch.no_grad():
        for parameter in trainer.backend.networks["policy"].model.network.parameters():
            parameter.mul_(1.05)  # away from the reference
    policy = trainer_network(trainer)
    batch = batch_of(samples, 40)
    asyncio.run(trainer.push(0, samples))
    found = asyncio.run(trainer.compute_logprobs(batch))
    assert sorted(found) == ([] if per_step else sorted(s.key for s in samples))
    given = {s.key: 0.1 * (i - 5) for i, s in enumerate(samples)}
    logprobs, advantages, total = [], [], 0.0
    for s in samples:
        own, other = alone(policy, s)[0], alone(reference, s)[0].detach()
        d = (own - other).detach().numpy().astype(np.float64)
        kl = (d if estimator == "k1" else np.exp(-d) + d - 1) * s.mask_S
        total += kl.sum()
        if not per_step:
            assert found[s.key] == pytest.approx(0.5 * kl.sum(), abs=1e-4)
        to_come = np.array([kl[i:].sum() for i in range(len(kl))])
        advantages.append((given[s.key] - per_step * 0.5 * to_come)[s.mask_S])
        logprobs.append(own[torch.from_numpy(s.mask_S)])
    values = np.concatenate(advantages)
    if per_step:
        values = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    (-(torch.from_numpy(values) * torch.cat(logprobs)).sum() / len(values)).backward()
    trainer._data.samples.clear()
    gradients, stats = gradients_of(trainer, samples, dataclasses.replace(batch, advantages=given))
    for name, parameter in policy.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=2e-5, rtol=1e-3), name
    assert stats.metrics["actor/loss"] == stats.metrics["actor/pg_loss"]
    assert stats.metrics["actor/kl"].total == pytest.approx(total, rel=1e-4)


def test_prepare_gives_nothing_where_the_kl_is_in_the_loss():
    trainer, samples = trainer_of(config_of(algorithm={"kl_coef": 0.5})), samples_of()
    asyncio.run(trainer.end_warm_start())
    asyncio.run(trainer.push(0, samples))
    assert asyncio.run(trainer.compute_logprobs(batch_of(samples))) == {}


def test_passes_without_gradients_join_micro_batches_that_are_packed_once(monkeypatch):
    """With rows of any length, as on a GPU. Policy and reference read the same batches."""
    algorithm = {"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1"}
    trainer, samples = trainer_of(config_of(algorithm=algorithm)), samples_of()
    asyncio.run(trainer.end_warm_start())
    passes, packs, pack = dict[str, int](), list[MicroBatch](), policy_module.to_tensors
    for name, network in trainer.backend.networks.items():
        network.model.varlen = True
        network.model.register_forward_hook(lambda *_, name=name: passes.update({name: passes.get(name, 0) + 1}))
    monkeypatch.setattr(policy_module, "to_tensors", lambda micro, *rest: packs.append(micro) or pack(micro, *rest))
    batch, policy = batch_of(samples, 24), trainer_network(trainer)
    micros = batch.mini_batches[0].micro_batches
    assert len(micros) == 10
    asyncio.run(trainer.push(0, samples))
    asyncio.run(trainer.compute_logprobs(batch))
    assert passes == {"policy": 3, "reference": 3} and len(packs) == 3
    for s in samples:
        for column in ("old_logprobs", "ref_logprobs"):
            assert torch.allclose(trainer._data.columns[column][s.key], alone(policy, s)[0], atol=1e-5, rtol=0)
    asyncio.run(trainer.update(dataclasses.replace(batch, advantages={s.key: s.reward for s in samples})))
    assert passes["policy"] == 3 + 10 and len(packs) == 3 + 10 and not trainer._data.packed


def test_joined_micro_batches_are_not_shared_by_ranks():
    first, *rest = [MicroBatch((((i, 0),),), 10 + i, 2 if i == 3 else 1) for i in range(5)]
    found = joined_micros([first, *rest], 2)
    assert [(micro.rows, micro.width, micro.context) for micro in found] == [
        ((((0, 0),), ((1, 0),)), 21, 1),
        ((((2, 0),),), 12, 1),
        ((((3, 0),),), 13, 2),
        ((((4, 0),),), 14, 1),
    ]


# --- reference


def test_the_reference_stays_frozen():
    config = config_of(algorithm={"kl_coef": 0.5}, training={"weight_decay": 0.1})
    trainer, samples = trainer_of(config), samples_of()
    update(trainer, samples, batch_of(samples, objective="warm_start"))  # the reference is the policy at `begin`
    asyncio.run(trainer.end_warm_start())
    assert trainer.trained["policy"].updates == 0 and not trainer.backend.networks["policy"].optimizer.state
    start = weights_of(trainer)
    reference = trainer.backend.networks["reference"]
    kl = [update(trainer, samples, batch_of(samples)).metrics["actor/kl"].total for _ in range(3)]
    assert kl[0] == pytest.approx(0, abs=1e-5) and 1e-4 < kl[1] < kl[2]
    assert trainer.backend.networks["reference"] is reference
    assert reference.optimizer is None and all(p.grad is None for p in reference.model.parameters())
    frozen = {
        name: p.detach().full_tensor().numpy() for name, p in trainable_parameters(reference.model.network).items()
    }
    assert same(frozen, start) and not same(weights_of(trainer), start)


def test_no_reference_without_kl():
    trainer = trainer_of(config_of())
    asyncio.run(trainer.end_warm_start())
    assert "reference" not in trainer.backend.networks


# --- state


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_state_round_trip_is_exact(tmp_path, kl_coef):
    config = config_of(algorithm={"kl_coef": kl_coef}, training={"schedule": "linear"})
    trainer, samples = trainer_of(config), samples_of()
    asyncio.run(trainer.end_warm_start())
    for seed in range(3):
        update(trainer, samples_of(seed), batch_of(samples_of(seed)))
    save_state(trainer, tmp_path)
    names = {"trainer.json", "weights", "optimizer"} | ({"reference"} if kl_coef else set())
    assert {path.name for path in tmp_path.iterdir()} == names

    other = trainer_of(config_of(run={"seed": 99}, algorithm={"kl_coef": kl_coef}, training={"schedule": "linear"}))
    assert not same(weights_of(other), weights_of(trainer))
    asyncio.run(other.load(str(tmp_path)))
    assert other.trained["policy"].updates == trainer.trained["policy"].updates == 3
    assert same(weights_of(other), weights_of(trainer))
    assert same(state_of(other), state_of(trainer))
    fourth = dataclasses.replace(batch_of(samples), step=4)
    a, b = update(trainer, samples, fourth), update(other, samples, fourth)
    assert a == b and a.lr < config.training.lr
    assert same(weights_of(other), weights_of(trainer)) and same(state_of(other), state_of(trainer))


def state_of(trainer: TrainerRank) -> dict[str, np.ndarray]:
    found = {}
    for name, parameter in trainer.backend.networks["policy"].model.network.named_parameters():
        entry = trainer.backend.networks["policy"].optimizer.state[parameter]
        found[f"{name}/step"] = entry["step"].numpy()
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{moment}"] = entry[moment].full_tensor().numpy().copy()
    return found


@pytest.mark.parametrize(("offload", "part"), [("optimizer", 1), ("all", 1), ("optimizer", 2000)])
def test_off_load_changes_no_number(tmp_path, monkeypatch, offload, part):
    """The optimizer works part by part. Here each parameter is a part; or small ones share a part, and parts a slot."""
    monkeypatch.setattr(optimizer_module, "PART_BYTES", part)
    monkeypatch.setattr(optimizer_module, "BLOCK_BYTES", 40_000)
    algorithm, samples = {"kl_coef": 0.1, "mini_batches": 2}, samples_of()
    plain, moved = (
        trainer_of(config_of(algorithm=algorithm, training={"offload": chosen})) for chosen in ("none", offload)
    )
    parts = [len(trainer.backend.networks["policy"].optimizer._parts) for trainer in (plain, moved)]
    assert parts[0] == 1 and parts[1] > 10
    host = moved.backend.networks["policy"].optimizer._host
    assert len(host._sized) > 2 and len([size for size in host._sizes if size <= part // 4]) > (3 if part > 1 else -1)
    for trainer in (plain, moved):
        asyncio.run(trainer.end_warm_start())
        for seed in range(2):
            update(trainer, samples_of(seed), batch_of(samples_of(seed), mini_batches=2))
            weights_of(trainer)
    assert same(weights_of(plain), weights_of(moved)) and same(state_of(plain), state_of(moved))
    save_state(moved, tmp_path)
    other = trainer_of(moved._config)
    asyncio.run(other.load(str(tmp_path)))
    for trainer in (plain, other):
        update(trainer, samples, batch_of(samples, mini_batches=2))
    assert same(weights_of(plain), weights_of(other)) and same(state_of(plain), state_of(other))


def test_off_loaded_parts_are_full_and_not_larger():
    sizes = [3, 3, 3, 20, 4, 4, 1, 7]
    parameters = [torch.empty(size) for size in sizes]
    parts = [[len(p) for p in part] for part in optimizer_module._parts(parameters, 8 * 8)]
    assert parts == [[3, 3], [3], [20], [4, 4], [1, 7]]
    assert [len(part) for part in optimizer_module._parts(parameters, None)] == [8]


class LazyStream:
    """A stream of a GPU that copies as late as it may: when another stream or the host waits for it."""

    current: "LazyStream | None" = None

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []

    def run(self, count: int | None = None) -> None:
        while self.done < (len(self.queue) if count is None else count):
            self.done += 1
            self.queue[self.done - 1]()

    done = 0
    synchronize = run

    def record_event(self) -> Callable[[], object]:
        return partial(self.run, len(self.queue))

    def wait_event(self, event: Callable[[], object]) -> None:
        self.queue.append(event)

    def wait_stream(self, other: "LazyStream") -> None:
        other.run()


@contextlib.contextmanager
def on_stream(stream: LazyStream) -> Iterator[None]:
    LazyStream.current = stream
    yield
    LazyStream.current = None


@pytest.mark.parametrize("part", [1, 2000])
def test_off_loaded_moments_are_not_read_before_they_arrive(monkeypatch, part):
    """Nor is their memory used again before they have left. Copies happen as late as streams and events allow."""
    monkeypatch.setattr(optimizer_module, "PART_BYTES", part)
    made: list[LazyStream] = []

    def streams(device):
        made.extend(LazyStream() for _ in range(3))
        return made[-3:]

    real, late = torch.Tensor.copy_, list[int]()

    def copy(tensor, source, non_blocking=False):
        if LazyStream.current is None:
            return real(tensor, source, non_blocking)
        late.append(len(LazyStream.current.queue))
        LazyStream.current.queue.append(partial(real, tensor, source))
        return tensor

    plain, moved = (trainer_of(config_of(training={"offload": chosen})) for chosen in ("none", "optimizer"))
    for seed in range(3):
        update(plain, samples_of(seed), batch_of(samples_of(seed)))
    monkeypatch.setattr(optimizer_module, "_streams", streams)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    for seed in range(3):
        update(moved, samples_of(seed), batch_of(samples_of(seed)))
    assert len(made) == 9 and len(late) > 50
    assert same(weights_of(plain), weights_of(moved)) and same(state_of(plain), state_of(moved))


def test_some_moments_stay_on_the_device(tmp_path, monkeypatch):
    """They are saved and loaded as the others, but checkpoints copy them."""
    monkeypatch.setattr(optimizer_module, "PART_BYTES", 2000)
    plain, moved = (
        trainer_of(config_of(training={"offload": chosen, "offload_keep_gb": 1e-4})) for chosen in ("none", "optimizer")
    )
    optimizer = moved.backend.networks["policy"].optimizer
    kept = [p for p in moved.backend.weights().values() if p not in optimizer.holds]
    assert 0.5e5 < sum(8 * p.numel() for p in kept) <= 1e5 and 0 < optimizer._host.num_parts < len(optimizer._parts)
    for trainer in (plain, moved):
        for seed in range(2):
            update(trainer, samples_of(seed), batch_of(samples_of(seed)))
    save_state(moved, tmp_path)
    other = trainer_of(moved._config)
    asyncio.run(other.load(str(tmp_path)))
    for trainer in (plain, other):
        update(trainer, samples_of(5), batch_of(samples_of(5)))
    assert same(weights_of(plain), weights_of(other)) and same(state_of(plain), state_of(other))


def test_off_loaded_moments_fill_blocks(monkeypatch):
    """Pinned memory is a power of 2: the last block alone may be half empty. No two moments share an element."""
    monkeypatch.setattr(optimizer_module, "BLOCK_BYTES", 4 * 64)
    monkeypatch.setattr(optimizer_module, "ALIGN", 1)
    parameters = [torch.empty(size) for size in (30, 3, 30, 100, 9, 20, 1)]
    host = HostMoments([parameters[:3], parameters[3:]], CPU)
    assert host._sized == [64, 64, 100, 100, 58]
    for number, parameter in enumerate(parameters):
        for moment in host.of(parameter).values():
            moment.fill_(number)
    for number, parameter in enumerate(parameters):
        for moment in host.of(parameter).values():
            assert moment.shape == parameter.shape and (moment == number).all()


# --- schedule


def test_warm_up():
    found = [learning_rate(u, peak=1.0, total=100, warmup=4) for u in range(6)]
    assert found == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(0, peak=3.0, total=0) == 3.0


def test_linear():
    found = [
        learning_rate(u, peak=8.0, total=10, warmup=2, schedule="linear", min_ratio=0.5) for u in (1, 2, 6, 10, 99)
    ]
    assert found == [8.0, 8.0, 6.0, 4.0, 4.0]


def test_cosine():
    found = [learning_rate(u, peak=2.0, total=12, schedule="cosine", min_ratio=0.1) for u in (0, 4, 6, 8, 12, 50)]
    # 2 (0.1 + 0.9 (1 + cos(pi u / 12)) / 2)
    assert found == pytest.approx([2.0, 1.55, 1.1, 0.65, 0.2, 0.2], abs=1e-12)


def test_warm_up_counts_updates_and_the_rest_goes_by_progress():
    """Warm-up of 2 updates; position 4 of 10 after a single update: the rate is still rising, and already falling."""
    given = {"peak": 8.0, "total": 10, "warmup": 2, "schedule": "linear"}
    assert learning_rate(0, position=4, **given) == 4.0 * 0.75
    assert learning_rate(1, position=4, **given) == 8.0 * 0.75
    assert learning_rate(9, position=9.5, **given) == 8.0 * 0.0625
    assert learning_rate(3, position=3, **given) == learning_rate(3, **given)


def test_schedule_ends_with_the_run_whatever_the_steps_have_in_updates():
    """10 steps of 4 mini-batches as planned; some have fewer, some none: each takes the rate of its place."""
    config = config_of(
        run={"steps": 10},
        algorithm={"mini_batches": 4},
        training={"lr": 4.0, "schedule": "linear", "warm_start": {"steps": 30, "lr": 0.5}},
    )
    trainer = trainer_of(config)

    def rates(step: int, updates: int) -> list[float]:
        batch = TrainBatch(step, (MiniBatch((), 1, 1),) * updates)
        return [
            learning_rate_of(config, batch, number, "policy", trainer.trained["policy"].updates)
            for number in range(updates)
        ]

    assert rates(1, 4) == [4.0, 3.9, 3.8, 3.7]
    trainer.trained["policy"].updates = 4  # nothing was trained on in steps 2 to 5
    assert rates(6, 4) == pytest.approx([2.0, 1.9, 1.8, 1.7], abs=1e-12)
    assert rates(6, 2) == pytest.approx([2.0, 1.8], abs=1e-12)
    assert rates(10, 1) == pytest.approx([0.4], abs=1e-12)
    rates_of_warm_start = {1: 0.5 / 3, 4: 0.5, 13: 0.5 * 18 / 27, 31: 0.0}
    for step, rate in rates_of_warm_start.items():
        warm = TrainBatch(step, (MiniBatch((), 1, 1),), "warm_start")
        assert learning_rate_of(config, warm, 0, "policy", step - 1) == pytest.approx(rate, abs=1e-12)


def test_weights_arrive_as_they_were_sent():
    sent = {"a": torch.randn(5, 3), "odd": torch.randn(7).to(torch.bfloat16), "one": torch.tensor(2.5)}
    sent["big"] = torch.randn(3, 2**17)  # several rows of the checksum
    packed = pack_bucket(sent, to_host_memory)
    assert list(packed) == [PACKED] and isinstance(packed[PACKED].payload, np.ndarray)
    found = unpack_bucket(packed)
    assert list(found) == list(sent) and all(found[k].dtype == sent[k].dtype for k in sent)
    assert all(torch.equal(found[k], sent[k]) for k in sent)
    assert all(torch.equal(unpack_bucket(sent)[k], sent[k]) for k in sent)  # tensors that were not packed


@pytest.mark.parametrize("where", [0, 4, 70, -9, 2**19 + 8])
def test_weights_that_were_damaged_are_refused(where):
    packed = pack_bucket({"a": torch.randn(5, 3), "b": torch.randn(3, 2**17)}, to_host_memory)
    packed[PACKED].payload[where] ^= 1
    with pytest.raises(ValueError, match=r"weights were damaged in transit \(2 tensors, the first is a\)"):
        unpack_bucket(packed)


def test_rows_that_change_places_are_noticed():
    packed = pack_bucket({"b": torch.arange(2**19, dtype=torch.float32)}, to_host_memory)
    rows = packed[PACKED].payload.reshape(-1, 2**19)
    rows[[0, 1]] = rows[[1, 0]]
    with pytest.raises(ValueError, match="damaged"):
        unpack_bucket(packed)


@pytest.mark.release
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_layers_train_as_eager_ones():
    """Two updates, so that the second one uses weights that the first one has changed."""
    eager, compiled = (trainer_of(config_of(training={"compile": value})) for value in (False, True))
    for seed in (0, 1):
        samples = samples_of(seed)
        batch = batch_of(samples, max_tokens=60)
        assert len(batch.mini_batches[0].micro_batches) > 1
        a, b = update(eager, samples, batch), update(compiled, samples, batch)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
        loss = [stats.metrics["actor/loss"] for stats in (a, b)]
        assert loss[1].total == pytest.approx(loss[0].total, abs=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # something was compiled
    expected = weights_of(eager)
    for name, found in weights_of(compiled).items():
        np.testing.assert_allclose(found, expected[name], atol=1e-5, err_msg=name)  # Adam amplifies small gradients
