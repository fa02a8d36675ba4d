"""On-policy distillation: a teacher's logprobs of given tokens, and what the trainer makes of them."""

import asyncio
import dataclasses
import threading

import numpy as np
import pytest
import torch

from gcore.config.tree import Config
from gcore.content.tokens import Tokens, tokens_of
from gcore.generation.embedded import EmbeddedBackend
from gcore.generation.engine_shell import SteppedEngine
from gcore.generation.noise import noise_key
from gcore.models.networks import load_model
from gcore.preparation.samples import to_sample
from gcore.prompts.tokenizer import build_char_tokenizer, load_tokenizer
from gcore.rewarding.rewarder import WeightedRewarder
from gcore.rewarding.teacher import TeacherSource, check_tokenizers
from gcore.training.step_advantages import GlobalSums, step_targets
from gcore.types import Prompt, Request, Rollout, SamplingParams, UserError
from tests.e2e.helpers import RECIPE
from tests.unit.test_training import CPU, config_of, network_of, samples_of

pytestmark = pytest.mark.usefixtures("one_rank")


def engine_of(network) -> SteppedEngine:
    return SteppedEngine(EmbeddedBackend(network, max_concurrent=8, max_length=24))


def scored(engine, contents, temperature=1.0):
    requests = [Request(c, SamplingParams(0, temperature=temperature), noise_key=0) for c in contents]
    return asyncio.run(engine.generate(requests))


@torch.no_grad()
def direct(network, content, temperature=1.0):
    tokens = tokens_of(content)
    logits = network(torch.from_numpy(tokens.tokens_T.astype(np.int64))[None]).logits[0] / temperature
    steps = torch.from_numpy(tokens.tokens_S.astype(np.int64))
    first = len(tokens.tokens_P)
    return torch.log_softmax(logits, -1)[first - 1 : -1].gather(-1, steps[:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def served():
    network = network_of(config_of())
    engine = engine_of(network)
    yield engine, network
    engine.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_engine_scores_given_tokens(served, temperature):
    engine, network = served
    contents = [s.content for s in samples_of(1, prompts=5)]
    found = scored(engine, contents, temperature)
    for content, completion in zip(contents, found, strict=True):
        assert completion.content.num_steps == 0 and (completion.versions_S == 0).all()
        np.testing.assert_allclose(completion.logprobs_S, direct(network, content, temperature), atol=1e-5)


def test_a_score_does_not_depend_on_the_batch(served):
    """To the last bit, also with requests of other callers."""
    engine, _ = served
    contents = [s.content for s in samples_of(2, prompts=9)]
    alone = [scored(engine, [content])[0].logprobs_S for content in contents]

    async def all_callers():
        params = SamplingParams(0)
        calls = (engine.generate([Request(c, params, noise_key=0)]) for c in contents)
        return [found for (found,) in await asyncio.gather(*calls)]

    for together in (scored(engine, contents), asyncio.run(all_callers())):
        assert all(np.array_equal(a, b.logprobs_S) for a, b in zip(alone, together, strict=True))


def test_scoring_beside_decoding(served):
    """Samples are the same, and their logprobs are those that the engine scores."""
    engine, _ = served
    params = SamplingParams(8, stop_tokens=(2,))
    requests = [Request(Tokens(np.array([1, 5, 9], np.int32)), params, noise_key(0, i, 0)) for i in range(6)]
    expected = asyncio.run(engine.generate(requests))

    before = threading.active_count()

    async def both():
        sampling = asyncio.ensure_future(engine.generate(requests))
        for sample in samples_of(3):
            await engine.generate([Request(sample.content, SamplingParams(0), noise_key=0)])
        return await sampling

    found = asyncio.run(both())
    for request, a, b in zip(requests, expected, found, strict=True):
        assert np.array_equal(a.content.tokens_S, b.content.tokens_S)
        again = scored(engine, [request.content.extended(a.content)])[0]
        np.testing.assert_allclose(again.logprobs_S, a.logprobs_S, atol=1e-5)
    assert threading.active_count() < before + 20  # not one more for each request


def test_requests_that_cannot_be_scored(served):
    engine, _ = served
    with pytest.raises(UserError, match="max_tokens 0"):  # no steps
        scored(engine, [Tokens(np.array([1, 5], np.int32))])


# ---- rewards of the steps -------------------------------------------------------------------------------------------


def rollout_of(sample, sibling) -> Rollout:
    prompt = Prompt(sample.prompt_id, 0, (), "", Tokens(tokens_of(sample.content).tokens_P))
    return Rollout(
        prompt,
        sibling,
        sample.content,
        sample.rollout_logprobs_S,
        sample.mask_S,
        "",
        np.zeros(sample.num_steps, np.int32),
        "stop",
    )


def test_rewards_of_steps_and_advantages(served):
    engine, network = served
    samples = samples_of(4, prompts=1, siblings=3)
    group = [rollout_of(s, i) for i, s in enumerate(samples)]

    async def ask(requests, prompt):
        return await engine.generate(requests)

    rewarder = WeightedRewarder([TeacherSource("teacher", 0.5, ask)])
    found = asyncio.run(rewarder.reward(group))
    advantages = {s.key: a for s, a in zip(samples, (1.0, 0.0, -1.0), strict=True)}
    algorithm = config_of().algorithm
    kept = {s.key: to_sample(f) for s, f in zip(samples, found, strict=True)}
    steps = step_targets(kept, advantages, algorithm, GlobalSums()).advantages
    for sample, result in zip(samples, found, strict=True):
        ratio_S = direct(network, sample.content) - sample.rollout_logprobs_S
        assert result.reward == 0.0
        np.testing.assert_allclose(result.step_rewards_S, np.where(sample.mask_S, 0.5 * ratio_S, 0), atol=1e-5)
        mean = -ratio_S[sample.mask_S].mean()
        assert result.parts == {"teacher/reverse_kl": pytest.approx(mean, abs=1e-5)}
        np.testing.assert_allclose(steps[sample.key], advantages[sample.key] + result.step_rewards_S, atol=1e-6)


def test_the_gradient_is_that_of_the_reverse_kl():
    """Over all answers of one token, the expected policy gradient of the log ratios is the gradient of the KL."""
    torch.manual_seed(0)
    student, teacher = torch.randn(7, requires_grad=True), torch.randn(7)
    p, q = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    kl = (p.exp() * (p - q)).sum()
    (expected,) = torch.autograd.grad(kl, student, retain_graph=True)
    (found,) = torch.autograd.grad(-(p.detach().exp() * (q - p).detach() * p).sum(), student)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_other_vocabularies_are_refused():
    policy, other = build_char_tokenizer("0123"), build_char_tokenizer("0132")
    check_tokenizers(policy, build_char_tokenizer("0123"), "rewards.judges.0.model")
    with pytest.raises(UserError, match=r"rewards\.judges\.0\.model: the vocabulary"):
        check_tokenizers(policy, other, "rewards.judges.0.model")


def test_a_teacher_needs_no_template_and_a_judge_does():
    judge = {"name": "teacher", "model": {"path": "x"}}
    tree = {**RECIPE, "rewards": {"judges": [{**judge, "mode": "teacher"}]}}
    config = Config.model_validate({**tree, "sampling": {"samples_per_prompt": 1}})
    assert not config.rewards.compares and config.rewards.engine_judges
    for wrong, words in (
        (
            {"name": "teacher", "url": "http://x/v1", "mode": "teacher"},
            "needs a model on engine=embedded, vllm or sglang",
        ),
        (judge, "template: not set"),
    ):
        with pytest.raises(ValueError, match=words):
            Config.model_validate({**RECIPE, "rewards": {"judges": [wrong]}})
    with pytest.raises(ValueError, match="compares siblings"):
        Config.model_validate({**RECIPE, "sampling": {"samples_per_prompt": 1}})


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_teacher_on_another_engine_reads_at_temperature_1(engine):
    rewards = {"judges": [{"name": "big", "model": {"path": "x"}, "mode": "teacher", "engine": engine}]}
    Config.model_validate({**RECIPE, "rewards": rewards})
    generation = {**RECIPE["generation"], "temperature": 0.7}
    with pytest.raises(ValueError, match=r"generation.temperature=0.7: the teacher 'big' is on engine=" + engine):
        Config.model_validate({**RECIPE, "rewards": rewards, "generation": generation})


def test_the_teacher_of_a_recipe_is_the_network_of_its_folder(tmp_path):
    """As a run builds it."""
    from gcore.launch.build import build_judge
    from gcore.launch.machines import Machine
    from gcore.launch.plan import make_plan
    from gcore.protocols import Rendezvous

    base = config_of()
    tokenizer = load_tokenizer(base.model)
    network = load_model(base.model, tokenizer, 5, torch.float32, CPU)
    network.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    teacher = {"name": "teacher", "mode": "teacher", "model": {"path": str(tmp_path)}}
    config = Config.model_validate({**RECIPE, "rewards": {"judges": [teacher]}, "runtime": "local"})
    engine = build_judge(config, make_plan(config, Machine(2, 0)), "teacher", Rendezvous(0, 1, None))
    content = dataclasses.replace(samples_of(5)[0].content)
    np.testing.assert_allclose(scored(engine, [content])[0].logprobs_S, direct(network, content), atol=1e-5)
    engine.close()
