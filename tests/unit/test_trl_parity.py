"""Parity with TRL's GRPOTrainer: its own code runs on hand-made rewards and a hand-made batch, without a hub."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from gcore.config.algorithm import Algorithm
from gcore.models.networks import load_model
from gcore.preparation.advantages import GROUP_ESTIMATORS, GroupScores
from gcore.prompts.tokenizer import load_tokenizer
from gcore.training.logprob_model import LogprobModel, to_tensors
from gcore.training.objective import POLICY_LOSSES, StepData, Steps, kl_penalty, step_columns, step_weights
from gcore.types import MiniBatch, Sample
from tests.unit.test_training import CPU, MAX_RESPONSE_LENGTH, batch_of, config_of, samples_of

if TYPE_CHECKING:
    from trl import GRPOTrainer

missing = not all(map(importlib.util.find_spec, ("trl", "datasets")))
pytestmark = pytest.mark.skipif(missing, reason="needs trl and datasets")

REWARDS = [0.0, 1.0, 0.25, 1.0, 3.0, -1.0, 0.5, 0.5]  # two groups of four
TEMPERATURE = 0.8


def trl_of(folder, **options) -> GRPOTrainer:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # here, because every test process imports all test files

    config = config_of()
    tokenizer = load_tokenizer(config.model)
    network = load_model(config.model, tokenizer, 3, torch.float32, CPU)
    args = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=MAX_RESPONSE_LENGTH,
        temperature=TEMPERATURE,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
        disable_dropout=True,
        use_bias_correction_kl=False,  # its default weighs the KL by the ratio; ours and verl's do not
        **options,
    )
    rows = Dataset.from_list([{"prompt": "1+1="}, {"prompt": "2+2="}])

    def reward(completions, **columns):
        return REWARDS[: len(completions)]

    return GRPOTrainer(network, reward, args=args, train_dataset=rows, processing_class=tokenizer)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- advantages: TRL generates, calls the reward, and normalises; its epsilon is 1e-4, ours 1e-6, the spread n - 1 both


@pytest.mark.parametrize(("name", "scale"), [("grpo", "group"), ("dr_grpo", "none")])
def test_advantages(tmp_path, name, scale):
    trainer = trl_of(tmp_path, scale_rewards=scale)
    inputs = [{"prompt": p} for p in ("1+1=", "2+2=") for _ in range(4)]
    theirs = trainer._generate_and_score_completions(inputs)["advantages"].numpy().astype(np.float64)
    rewards = np.array(REWARDS).reshape(2, 4)
    if name == "grpo":
        theirs *= (np.repeat(rewards.std(1, ddof=1), 4) + 1e-4) / (np.repeat(rewards.std(1, ddof=1), 4) + 1e-6)
    ours = np.concatenate([GROUP_ESTIMATORS[name](GroupScores(group, np.ones(4))) for group in rewards])
    assert ours == pytest.approx(theirs, abs=1e-6) and np.abs(ours).max() > 1


# --- loss


def padded(values) -> torch.Tensor:
    """[samples, longest]: TRL's right-padded completions."""
    rows = [torch.as_tensor(np.asarray(v)) for v in values]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def trl_batch(samples: list[Sample], old, ref) -> dict[str, torch.Tensor]:
    prompts = [s.content.tokens_T[: len(s.content.tokens_T) - s.num_steps] for s in samples]
    completions = [s.content.tokens_T[len(s.content.tokens_T) - s.num_steps :] for s in samples]
    left = torch.nn.utils.rnn.pad_sequence
    return {
        "prompt_ids": left([torch.tensor(p.astype(np.int64)) for p in prompts], True, 0, "left"),
        "prompt_mask": left([torch.ones(len(p), dtype=torch.int64) for p in prompts], True, 0, "left"),
        "completion_ids": padded([c.astype(np.int64) for c in completions]),
        "completion_mask": padded([np.ones(len(c), np.int64) for c in completions]),
        "tool_mask": padded([s.mask_S.astype(np.int64) for s in samples]),
        "advantages": torch.tensor([s.reward for s in samples]),
        "old_per_token_logps": padded(old),
        "ref_per_token_logps": padded(ref),
        "num_items_in_batch": torch.tensor(float(sum(s.mask_S.sum() for s in samples))),
    }


CASES = {
    # TRL's "bnpo" is a mean over the tokens of the micro-batch, which here is the whole batch; "dapo" that of the batch
    "token_mean": ({"loss_type": "bnpo"}, {"loss_aggregation": "token_mean"}),
    "dapo": ({"loss_type": "dapo"}, {"loss_aggregation": "token_mean"}),
    "sequence_mean": ({"loss_type": "grpo"}, {"loss_aggregation": "sequence_mean"}),
    "fixed_length": ({"loss_type": "dr_grpo"}, {"loss_aggregation": "fixed_length"}),
    # its two-sided clip bounds the ratio before the minimum: the dual clip, as long as the bound is above the clip
    "dual_clip": ({"loss_type": "bnpo", "delta": 1.5}, {"clip_ratio_dual": 1.5}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_aggregation": "sequence_mean", "policy_loss": "gspo"},
    ),
    # its CISPO bounds the ratio by `epsilon_high` itself, and not from below
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.28},
        {"policy_loss": "cispo", "clip_ratio_low": 1.0},
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_loss_and_gradient(tmp_path, case):
    theirs, ours = CASES[case]
    theirs = {"epsilon": 0.2, "epsilon_high": 0.28, **theirs}
    algorithm = Algorithm(**{"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "kl_coef": 0.07, **ours})
    samples = samples_of(prompts=2, siblings=4)
    trainer = trl_of(tmp_path, **theirs)
    trainer.beta = 0.07  # set here: as an option it would fetch a reference model, whose logprobs are in the batch
    network = trainer.model
    policy = LogprobModel(network)
    packed = to_tensors(batch_of(samples).mini_batches[0].micro_batches[0], {s.key: s for s in samples}, CPU)
    assert packed.mask_R1WW is not None  # packed rows on our side, left and right padding on theirs

    def forward():
        return policy(replace(packed, temperature_S=torch.full_like(packed.temperature_S, TEMPERATURE)))[0]

    with torch.no_grad():
        now = forward()
    rng = np.random.default_rng(2)
    noise = {s.key: rng.normal(0, 0.35, (2, s.num_steps)).astype(np.float32) for s in samples}
    shift = torch.from_numpy(np.concatenate([noise[key] for key in packed.keys], axis=1))
    old_S, ref_S = now + shift[0], now + shift[1]
    of = {key: packed.sample_S == i for i, key in enumerate(packed.keys)}

    batch = trl_batch(samples, [old_S[of[s.key]].numpy() for s in samples], [ref_S[of[s.key]].numpy() for s in samples])
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    network.zero_grad()
    expected = trainer._compute_loss(network, batch)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in network.named_parameters()}

    network.zero_grad()
    logprobs_S = forward()
    given = {s.key: torch.full((s.num_steps,), s.reward) for s in samples}
    columns = step_columns(packed, StepData({s.key: s for s in samples}, {"advantages": given}), CPU)
    steps = Steps(logprobs_S, old_S, columns.advantages_S, columns.mask_S, packed.sample_S, len(samples))
    loss_S, clipped_S = POLICY_LOSSES[algorithm.policy_loss](steps, algorithm)
    mini = MiniBatch((), int(columns.mask_S.sum()), len(samples))
    weights_S = step_weights(steps, mini, algorithm.loss_aggregation, MAX_RESPONSE_LENGTH)
    kl_S = kl_penalty(logprobs_S, ref_S)
    loss = ((loss_S + algorithm.kl_coef * kl_S) * weights_S).sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for name, parameter in network.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], atol=1e-6, rtol=1e-4), name
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-3
    mask_S, metrics = columns.mask_S, trainer._metrics["train"]
    assert (kl_S * mask_S).sum().item() / mask_S.sum().item() == pytest.approx(metrics["kl"][-1], abs=1e-6)
    if case in ("token_mean", "sequence_mean", "fixed_length"):
        clip_frac = (clipped_S * mask_S).sum().item() / mask_S.sum().item()
        assert clip_frac == pytest.approx(metrics["clip_ratio/region_mean"][-1], abs=1e-6) and clip_frac > 0
