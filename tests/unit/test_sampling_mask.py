"""generation.keep_sampling_mask: engine and trainer compute logprobs among the tokens that top-k and top-p left."""

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from gcore.checkpoint.pending_groups import load_pending_groups, write_pending_groups
from gcore.config.advice import warnings
from gcore.content.tokens import SamplingMask, Tokens
from gcore.generation.decoding import RowTable, sample
from gcore.generation.embedded import EmbeddedBackend
from gcore.generation.engine_shell import SteppedEngine
from gcore.generation.noise import noise_key
from gcore.preparation.samples import to_sample
from gcore.training import logprob_model as policy_module
from gcore.training.logprob_model import LogprobModel, to_tensors
from gcore.types import Completion, MicroBatch, Prompt, Request, Rollout, SamplingParams, Scored, UserError
from tests.unit.test_presets import config_of
from tests.unit.test_training import CPU, batch_of, network_of, trainer_of, update

pytestmark = pytest.mark.usefixtures("one_rank")
PROMPT = np.array([5, 6, 7], np.int32)


def mask_of(*steps) -> SamplingMask:
    return SamplingMask(
        np.concatenate([np.array(s, np.int32) for s in steps]), np.array([len(s) for s in steps], np.int32)
    )


def plain(mask: SamplingMask | None):
    return None if mask is None else (mask.ids_K.tolist(), mask.counts_S.tolist())


def test_joined_by_hand():
    assert plain(SamplingMask.joined((mask_of([4, 9], [1]), 2), (None, 3), (mask_of([2]), 1))) == (
        [4, 9, 1, 2],
        [2, 1, 0, 0, 0, 1],
    )
    assert SamplingMask.joined((None, 3), (None, 2)) is None


# --- the engine


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.7, "temperature": 0.8}])
def test_sampling_gives_what_was_left_and_logprobs_among_it(limits):
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (6, 20)).astype(np.float32))
    rows = RowTable(8)
    for i in range(6):  # every other row is asked
        params = SamplingParams(1, **limits, keep_mask=i % 2 == 0)
        rows.put(i, Request(Tokens(PROMPT), params, noise_key(i)))
    tokens, logprobs, candidates = sample(logits, rows)
    assert sorted(candidates) == [0, 2, 4]
    full = torch.log_softmax(logits / limits.get("temperature", 1.0), -1).double()
    for i in range(6):
        whole, token = float(full[i, tokens[i]]), tokens[i]
        if i % 2:
            assert logprobs[i] == pytest.approx(whole, abs=1e-6)
            continue
        order = full[i].argsort(descending=True)[: limits.get("top_k", 20)]
        inner = full[i, order].exp() / full[i, order].exp().sum()
        count = int((inner.cumsum(0) - inner < limits.get("top_p", 1.0)).sum())
        assert sorted(candidates[i].tolist()) == sorted(order[:count].tolist()) and token in candidates[i]
        assert logprobs[i] == pytest.approx(whole - float(full[i, order[:count]].exp().sum().log()), abs=1e-5)


@pytest.mark.parametrize("params", [{}, {"top_k": 3, "temperature": 0.0}])
def test_nothing_is_kept_where_nothing_was_left_out_or_nothing_sampled(params):
    rows = RowTable(1)
    rows.put(0, Request(Tokens(PROMPT), SamplingParams(1, **params, keep_mask=True), 1))
    assert sample(torch.randn(1, 20), rows)[2] == {}


def test_engine_and_trainer_agree():
    """Sampled with top-p by one, scored by the other among the same tokens: the ratio is 1."""
    config = config_of()
    network = network_of(config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # neither flat nor certain
    engine = SteppedEngine(EmbeddedBackend(network, max_concurrent=4, max_length=24))
    params = SamplingParams(6, top_p=0.7, keep_mask=True)
    completions = asyncio.run(engine.generate([Request(Tokens(PROMPT), params, noise_key(i)) for i in range(5)]))
    engine.close()
    samples = {}
    for i, c in enumerate(completions):
        assert (
            len(c.content.sampling_mask.counts_S) == 6
            and c.content.sampling_mask.counts_S.min() >= 1
            and len(c.content.sampling_mask.ids_K) == c.content.sampling_mask.counts_S.sum()
        )
        prompt = Prompt(0, 0, (), "", Tokens(PROMPT))
        rollout = Rollout(
            prompt, i, prompt.content.extended(c.content), c.logprobs_S, np.ones(6, bool), "", c.versions_S, "length"
        )
        samples[0, i] = to_sample(Scored(rollout, 1.0))
    assert max(c.content.sampling_mask.counts_S.max() for c in completions) > 1
    packed = to_tensors(MicroBatch((((0, 0), (0, 1)), ((0, 2), (0, 3)), ((0, 4),)), 18), samples, CPU)
    with torch.no_grad():
        logprobs_S, entropy_S = LogprobModel(network)(packed)
        full_S, _ = LogprobModel(network)(dataclasses.replace(packed, sampling_mask=None))
    sampled_S = np.concatenate([samples[key].rollout_logprobs_S for key in packed.keys])
    assert torch.allclose(logprobs_S, torch.from_numpy(sampled_S), atol=1e-5)
    assert torch.isfinite(entropy_S).all() and (entropy_S >= -1e-6).all()
    assert (logprobs_S - full_S).min() > -1e-6 and (logprobs_S - full_S).max() > 0.05


# --- the trainer


def sample_of(target: int, mask: SamplingMask | None, sibling: int = 0):
    prompt = Prompt(0, 0, (), "", Tokens(PROMPT))
    one = np.array([target], np.int32)
    content = Tokens(PROMPT, one, mask)
    floats = np.zeros(1, np.float32)
    return to_sample(Scored(Rollout(prompt, sibling, content, floats, one >= 0, "", one, "stop"), 1.0))


@pytest.mark.parametrize("corrected", [True, False])
def test_the_gradient_of_the_sampled_policy_has_mean_zero(corrected):
    """With one reward for all, nothing is to be learned: the mean gradient over what is sampled, each candidate as
    often as it comes, must be 0. Without the mask it pushes the policy towards the candidates."""
    network = network_of(config_of())
    policy, ids = LogprobModel(network), [4, 7, 9, 12]
    mask = mask_of(ids)
    samples = {(0, i): sample_of(target, mask, i) for i, target in enumerate(ids)}
    packed = to_tensors(MicroBatch(tuple(((0, i),) for i in range(4)), 8), samples, CPU)
    sampled_S = policy(packed)[0].exp().detach()
    assert float(sampled_S.sum()) == pytest.approx(1, abs=1e-6)
    if not corrected:
        packed = dataclasses.replace(packed, sampling_mask=None)
    (sampled_S * policy(packed)[0]).sum().backward()
    norm = float(torch.cat([p.grad.flatten() for p in network.parameters()]).norm())
    assert norm < 1e-6 if corrected else norm > 0.1


def test_logits_in_chunks_and_steps_without_limits(monkeypatch):
    network = network_of(config_of())
    steps = [[4, 5], [], [6, 7, 8], [9]]
    samples = {(0, i): sample_of(ids[0] if ids else 11, mask_of(ids), i) for i, ids in enumerate(steps)}
    samples[0, 4] = sample_of(5, None, 4)
    packed = to_tensors(MicroBatch(tuple(((0, i),) for i in range(5)), 8), samples, CPU)
    policy = LogprobModel(network)

    def run():
        policy.zero_grad()
        logprobs_S, entropy_S = policy(packed)
        (logprobs_S.sum() + entropy_S.sum()).backward()
        return logprobs_S.detach(), torch.cat([p.grad.flatten() for p in network.parameters()])

    whole, gradient = run()
    full = torch.log_softmax(network(torch.from_numpy(PROMPT.astype(np.int64))[None]).logits[0, -1].float(), -1)
    full = full.detach().double()
    expected = [full[ids[0]] - full[ids].exp().sum().log() if ids else full[11] for ids in steps] + [full[5]]
    assert whole.tolist() == pytest.approx([float(x) for x in expected], abs=1e-5)
    assert torch.isfinite(gradient).all()
    monkeypatch.setattr(policy_module, "LOGITS_AT_ONCE", 2 * 16)  # two steps at a time
    parts, part_gradient = run()
    assert torch.allclose(parts, whole, atol=1e-6) and torch.allclose(part_gradient, gradient, atol=1e-5)


def test_an_update_with_kept_tokens():
    config = config_of(algorithm={"mini_batches": 1, "kl_coef": 0.1})
    trainer = trainer_of(config)
    asyncio.run(trainer.end_warm_start())
    samples = [sample_of(t, mask_of([4, 7, 9]), i) for i, t in enumerate((4, 7, 9))]
    stats = update(trainer, samples, batch_of(samples))
    assert (
        stats.skipped == 0.0 and stats.metrics["actor/kl"].total == pytest.approx(0, abs=1e-5) and stats.grad_norm > 0
    )


# --- on the way


def test_pieces_and_checkpoints_keep_it(tmp_path):
    columns = [(np.array(n, np.float32), np.array(n, np.int32)) for n in ([1, 2], [5])]
    start = Completion(Tokens.steps(columns[0][1], mask_of([1, 3], [2])), *columns[0], "abort")
    end = Completion(Tokens.steps(columns[1][1], mask_of([5, 6])), *columns[1], "stop")
    whole = start.joined(end)
    assert plain(whole.content.sampling_mask) == ([1, 3, 2, 5, 6], [2, 1, 2])
    prompt, bare = Prompt(0, 0, (), "", Tokens(PROMPT)), dataclasses.replace(start, content=Tokens.steps(columns[0][1]))
    rollouts = [
        Rollout(prompt, i, prompt.content.extended(c.content), c.logprobs_S, c.versions_S > 0, "", c.versions_S, "stop")
        for i, c in enumerate((whole, bare, end))
    ]
    write_pending_groups(tmp_path, 0, [[Scored(r, 1.0) for r in rollouts]])
    (found,) = load_pending_groups(tmp_path, lambda n: Prompt(n, n, (), "", Tokens(PROMPT)))
    assert [plain(s.rollout.content.sampling_mask) for s in found] == [plain(r.content.sampling_mask) for r in rollouts]


# --- configuration


def test_other_engines_are_refused_and_the_warning_goes():
    truncated = {"top_p": 0.9, "keep_sampling_mask": True}
    assert warnings(config_of(generation=truncated)) == []
    with pytest.raises(UserError, match=r"keep_sampling_mask=true needs engine=embedded: engine=vllm does not return"):
        config_of(generation={**truncated, "engine": "vllm"})
