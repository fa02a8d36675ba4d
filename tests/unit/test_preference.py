"""Objectives of pairs: the numbers of TRL on random ragged batches; the same gradients for any layout of the pairs."""

import asyncio
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gcore.config.preference import Preference
from gcore.content.tokens import tokens_of
from gcore.cost.workload import CostModel
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import best_and_worst, metas_of
from gcore.preparation.step_times import shared_tokens
from gcore.protocols import add_metrics
from gcore.training.logprob_model import LogprobModel, to_tensors
from gcore.training.objective import StepColumns, StepData, StepOutputs, demonstrations, step_columns
from gcore.training.preference import PAIR_LOSSES, preference
from gcore.types import MiniBatch
from tests.unit.test_training import CPU, config_of, gradients_of, network_of, samples_of, trainer_of

pytestmark = pytest.mark.usefixtures("one_rank")
WITH_REFERENCE = ["dpo", "robust_dpo", "ipo", "hinge", "apo_zero", "apo_down"]
METRICS = {
    "preference/accuracy": "rewards/accuracies",
    "preference/margin": "rewards/margins",
    "preference/chosen_reward": "rewards/chosen",
    "preference/rejected_reward": "rewards/rejected",
    "preference/chosen_logp": "logps/chosen",
    "preference/rejected_logp": "logps/rejected",
    "actor/entropy": "entropy",
}


def pairs_of(seed: int, num: int = 5):
    """Chosen answers are sometimes the first, sometimes the second of the siblings."""
    return samples_of(seed, prompts=num, siblings=2)


def lay_out(samples, num_ranks=1, max_tokens=10_000, **options):
    metas = metas_of(samples)
    sizes = {"num_ranks": num_ranks, "max_tokens": max_tokens, "mini_batches": 1, "cost": CostModel(100.0)}
    return make_layout(metas, step=1, together=True, objective="dpo", **sizes, **options)


def ours(network, samples, loss: str, settings: Preference, ref):
    """Loss and metrics of one micro-batch with packed rows. `ref`: by key."""
    (batch,) = lay_out(samples)
    mini = batch.mini_batches[0]
    packed = to_tensors(mini.micro_batches[0], {s.key: s for s in samples}, CPU)
    outputs = StepOutputs(*LogprobModel(network)(packed))
    columns = step_columns(packed, StepData({s.key: s for s in samples}, {"ref_logprobs": ref}), CPU)
    return preference(loss, settings, mini)(outputs, columns)


def trl_batch(samples, ref, ordered=None):
    """Rows of chosen answers, then of rejected ones, padded at the right; or `ordered`."""
    by_prompt = {}
    for s in samples:
        by_prompt.setdefault(s.prompt_id, []).append(s)
    pairs = [sorted(pair, key=lambda s: -s.reward) for pair in by_prompt.values()]
    rows = ordered or [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
    width = max(s.content.size for s in rows)
    ids, attention, completion = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    for i, s in enumerate(rows):
        tokens = tokens_of(s.content)
        ids[i, : tokens.size], attention[i, : tokens.size] = torch.from_numpy(tokens.tokens_T.astype(np.int64)), 1
        completion[i, len(tokens.tokens_P) : tokens.size] = torch.from_numpy(s.mask_S.astype(np.int64))
    sums = torch.stack([(ref[s.key] * torch.from_numpy(s.mask_S)).sum() for s in rows])
    chosen, rejected = sums.chunk(2)
    batch = {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}
    return {**batch, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}


def random_reference(samples, seed):
    rng = np.random.default_rng(seed)
    return {s.key: torch.from_numpy(-rng.exponential(2, s.num_steps).astype(np.float32)) for s in samples}


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory):
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from trl import DPOConfig, DPOTrainer

    from gcore.prompts.tokenizer import load_tokenizer

    config = config_of()
    plain = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "gradient_checkpointing": False}
    args = DPOConfig(output_dir=str(tmp_path_factory.mktemp("trl")), disable_dropout=True, **plain)
    rows = datasets.Dataset.from_list([{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])
    network = network_of(config)
    return DPOTrainer(
        network, network_of(config), args=args, train_dataset=rows, processing_class=load_tokenizer(config.model)
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("loss", WITH_REFERENCE)
def test_trl(trl_trainer, loss, seed):
    """Loss, gradient of every parameter and metrics of DPOTrainer."""
    trainer, network = trl_trainer, trl_trainer.model
    settings = Preference(beta=0.3, label_smoothing=0.2 if loss == "robust_dpo" else 0.0)
    names = {"dpo": "sigmoid", "robust_dpo": "robust"}
    trainer.loss_types, trainer.loss_weights = [names.get(loss, loss)], [1.0]
    trainer.beta, trainer.label_smoothing, trainer.precompute_ref_logps = 0.3, settings.label_smoothing, True
    samples = pairs_of(seed)
    ref = random_reference(samples, seed)
    network.train()
    network.zero_grad()
    trainer._metrics["train"].clear()
    expected = trainer._compute_loss(network, trl_batch(samples, ref), return_outputs=False)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in network.named_parameters()}
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-3

    network.zero_grad()
    found, metrics = ours(network, samples, loss, settings, ref)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-6, rtol=1e-4, msg=name)
    for name, theirs in METRICS.items():
        part = metrics[name]
        assert float(part.total / part.weight) == pytest.approx(trainer._metrics["train"][theirs][-1], abs=2e-6), name


def sums_of(samples, logprobs):
    """Of the chosen and the rejected answers: sums and lengths, in the order of the prompts."""
    both = []
    for prompt in sorted({s.prompt_id for s in samples}):
        pair = sorted((s for s in samples if s.prompt_id == prompt), key=lambda s: -s.reward)
        both.append([(logprobs[s.key] * torch.from_numpy(s.mask_S)).sum() / s.mask_S.sum() for s in pair])
    return [torch.stack(side) for side in zip(*both, strict=True)]


def on_given(loss, samples, logprobs, settings, mini=None):
    """The objective of given logprobs, samples in the order of the list."""
    ordered = sorted(samples, key=lambda s: s.key)
    flat = torch.cat([logprobs[s.key] for s in ordered])
    columns = StepColumns(
        mask_S=torch.cat([torch.from_numpy(s.mask_S.astype(np.float32)) for s in ordered]),
        sample_S=torch.cat([torch.full((s.num_steps,), i) for i, s in enumerate(ordered)]),
        num_samples=len(ordered),
        rollout_logprobs_S=torch.zeros_like(flat),
        advantages_S=torch.zeros_like(flat),
        rewards_B=torch.tensor([s.reward for s in ordered]),
    )
    mini = mini or MiniBatch((), int(columns.mask_S.sum()), len(ordered))
    return preference(loss, settings, mini)(StepOutputs(flat, torch.zeros_like(flat)), columns)


def leaves(samples, seed):
    return {key: value.requires_grad_() for key, value in random_reference(samples, seed).items()}


@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_trl_without_a_reference(loss):
    samples = pairs_of(4)
    a, b = leaves(samples, 7), leaves(samples, 7)
    settings = Preference(beta=0.4, margin=0.3)
    found, _ = on_given(loss, samples, a, settings)
    chosen, rejected = sums_of(samples, b)
    if loss == "orpo":
        module = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
        trainer = SimpleNamespace(beta=0.4, accelerator=SimpleNamespace(device=CPU))
        ratio, *_ = module.ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)
        expected = (-chosen - ratio).mean()
    else:
        module = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
        trainer = SimpleNamespace(
            beta=0.4,
            simpo_gamma=0.3,
            loss_type="simpo",
            label_smoothing=0.0,
            alpha=0.0,
            accelerator=SimpleNamespace(device=CPU),
        )
        losses, *_ = module.CPOTrainer.cpo_loss(trainer, chosen, rejected)
        expected = losses.mean()
    found.backward()
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    for key in a:
        torch.testing.assert_close(a[key].grad, b[key].grad, atol=1e-6, rtol=1e-5)


def test_the_supervised_term_is_the_mean_over_the_tokens_of_each_chosen_answer():
    samples = pairs_of(5)
    logprobs = random_reference(samples, 1)
    plain, _ = on_given("dpo", samples, logprobs, Preference())
    more, _ = on_given("dpo", samples, logprobs, Preference(sft_coef=0.7))
    chosen, _ = sums_of(samples, logprobs)
    assert (more - plain).item() == pytest.approx(-0.7 * chosen.mean().item(), abs=1e-6)


@pytest.mark.parametrize("loss", list(PAIR_LOSSES))
def test_gradients_do_not_depend_on_the_layout(loss):
    """The ranks are played one after another; their gradients and metrics are added as the collectives do. Some of the
    ranks have no pair."""
    config = config_of(preference={"beta": 0.3}).model_copy(update={"objective": loss})
    samples, trainer, results = pairs_of(3, num=6), None, {}
    for name, options in {
        "one": {},
        "many": {"num_ranks": 4, "max_tokens": 60},
        "more ranks than pairs": {"num_ranks": 8, "max_tokens": 60},
        "one row": {"num_ranks": 4, "max_tokens": 60, "sharded": True, "padded": False},
        "shared prompts": {"num_ranks": 4, "max_tokens": 60, "shares": True},
        "shared prompts, one row": {"num_ranks": 2, "max_tokens": 60, "shares": True, "padded": False},
    }.items():
        trainer = trainer_of(config)
        asyncio.run(trainer.end_warm_start())
        with torch.no_grad():  # so that the reference differs
            for parameter in trainer.backend.networks["policy"].model.parameters():
                parameter.mul_(1.2)
        sums, metrics = {}, {}
        batches = lay_out(samples, **options)
        assert (shared_tokens(batches, metas_of(samples)) > 0.1) == ("shares" in options)
        assert sorted(key for batch in batches for key in batch.keys) == sorted(s.key for s in samples)
        for batch in batches:
            own = [s for s in samples if s.key in batch.keys]
            for micro in batch.mini_batches[0].micro_batches:
                for row in micro.rows:
                    assert [a[0] for a in row[::2]] == [b[0] for b in row[1::2]]  # pairs are neighbours
            batch = type(batch)(batch.step, batch.mini_batches, loss)
            gradients, stats = gradients_of(trainer, own, batch)
            sums = {key: sums.get(key, 0) + value for key, value in gradients.items()}
            metrics = add_metrics(metrics, stats.metrics)
        results[name] = sums, {key: metric.value for key, metric in metrics.items()}
    expected, values = results.pop("one")
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3
    for name, (gradients, found) in results.items():
        assert found == pytest.approx(values, abs=1e-5), name
        for key, gradient in gradients.items():
            close = 1e-6 * max(1.0, float(expected[key].abs().max()))
            torch.testing.assert_close(gradient, expected[key], rtol=0, atol=close, msg=f"{name}: {key}")


def test_the_loss_of_demonstrations_is_a_mean_over_tokens():
    samples = samples_of(1)
    flat = torch.cat([torch.from_numpy(s.rollout_logprobs_S) for s in samples])
    mask = torch.cat([torch.from_numpy(s.mask_S.astype(np.float32)) for s in samples])
    ids = torch.cat([torch.full((s.num_steps,), i) for i, s in enumerate(samples)])
    columns = StepColumns(mask, ids, len(samples), flat, torch.zeros_like(flat))
    mini = MiniBatch((), 2 * int(mask.sum()), 2 * len(samples))  # half of the mini-batch is elsewhere
    loss, metrics = demonstrations(mini)(StepOutputs(flat, torch.zeros_like(flat)), columns)
    expected = -float(flat[mask > 0].double().mean())
    assert float(loss) == pytest.approx(expected / 2, abs=1e-6)
    part = metrics["sft/loss"]
    assert float(part.total / part.weight) == pytest.approx(expected, abs=1e-6)


def test_best_and_worst():
    def group(*rewards):
        return [SimpleNamespace(reward=r, rollout=SimpleNamespace(sibling=i)) for i, r in enumerate(rewards)]

    assert [s.rollout.sibling for s in best_and_worst(group(0.5, 1.0, 0.0, 1.0, 0.0))] == [1, 2]
    assert best_and_worst(group(1.0, 1.0)) == []


# ---- KTO ------------------------------------------------------------------------------------------------------------


def labelled(seed: int):
    """Of each prompt, an answer with a label and one of another row, for the KL."""
    return [
        dataclasses.replace(s, reward=-1.0 if s.sibling else float(s.prompt_id % 3 != 0)) for s in pairs_of(seed, num=6)
    ]


@pytest.mark.parametrize("shift", [0.4, -0.4])
def test_kto_of_trl(tmp_path, shift):
    """Loss, gradients and metrics of KTOTrainer. `shift` of the reference: the KL is positive, or cut at 0."""
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from trl import KTOConfig, KTOTrainer

    from gcore.prompts.tokenizer import load_tokenizer

    config = config_of(preference={"beta": 0.3, "undesirable_weight": 1.5}).model_copy(update={"objective": "kto"})
    plain = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "gradient_checkpointing": False}
    args = KTOConfig(output_dir=str(tmp_path), beta=0.3, undesirable_weight=1.5, disable_dropout=True, **plain)
    rows = datasets.Dataset.from_list([{"prompt": "1+1=", "completion": c, "label": c == "2"} for c in "2345"])
    network = network_of(config)
    theirs = KTOTrainer(
        network, network_of(config), args=args, train_dataset=rows, processing_class=load_tokenizer(config.model)
    )
    samples, trainer = labelled(3), trainer_of(config)
    asyncio.run(trainer.end_warm_start())
    reference = trainer.backend.networks["reference"].model.network
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.0 + shift)
        for mine, other in zip(theirs.ref_model.parameters(), network.parameters(), strict=True):
            mine.copy_(other * (1.0 + shift))
    actual, others = ([s for s in samples if bool(s.sibling) == kl] for kl in (False, True))
    zeros = {s.key: torch.zeros(s.num_steps) for s in samples}
    batch = {}
    for prefix, part in (("", actual), ("KL_", others)):
        made = trl_batch(part, zeros, ordered=part)
        batch |= {f"{prefix}{name}": made[name] for name in ("input_ids", "attention_mask", "completion_mask")}
    batch["label"] = torch.tensor([s.reward > 0.5 for s in actual])
    theirs.precompute_ref_logps = False
    network.train()
    network.zero_grad()
    losses = theirs._compute_loss(network, batch, return_outputs=False)
    losses.backward()
    whole = lay_out(samples, max_tokens=60)
    (batch,) = [type(b)(b.step, b.mini_batches, "kto") for b in whole]
    gradients, stats = gradients_of(trainer, samples, batch)
    found = {name: metric.value for name, metric in stats.metrics.items()}
    assert found["preference/loss"] == pytest.approx(losses.item(), abs=1e-6)
    logged = theirs._metrics["train"]
    assert found["preference/kl"] == pytest.approx(logged["kl"][-1], abs=1e-5)
    for name in ("chosen", "rejected"):
        assert found[f"preference/{name}_reward"] == pytest.approx(logged[f"rewards/{name}"][-1], abs=1e-5)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)
