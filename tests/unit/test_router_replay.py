"""Mixtures of experts: the trainer uses the experts that the engine recorded, with weights of its own routers."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from gcore.checkpoint.pending_groups import load_pending_groups, write_pending_groups
from gcore.content.tokens import Tokens
from gcore.generation import embedded
from gcore.generation.embedded import EmbeddedBackend
from gcore.generation.engine_shell import SteppedEngine
from gcore.generation.noise import noise_key
from gcore.modalities.router_replay import REPLAYABLE, replay_warning, replays_experts
from gcore.models.decoders import ExpertRouters, find_expert_routers, implementation
from gcore.models.networks import auto_class, unify_passes
from gcore.training.critic import ValueModel
from gcore.training.logprob_model import LogprobModel, own_experts, to_tensors
from gcore.types import Completion, MicroBatch, Prompt, Request, Rollout, Sample, SamplingParams, Scored, UserError
from tests.contract.test_families import FAMILIES, close
from tests.unit.test_training import config_of

CPU = torch.device("cpu")
MIXTURES = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "granitemoe", "gpt_oss", "qwen3_next", "qwen3_5_moe", "qwen4_exp"),
    *("nemotron_h", "granitemoehybrid", "jamba", "lfm2_moe", "llama4", "gemma4-moe", "kimi_linear", "minimax"),
    *("deepseek_v32", "glm_moe_dsa", "deepseek_v4", "hy_v4", "axk2", "afmoe", "cohere2_moe", "exaone_moe"),
    *("granitemoe_swa", "mimo_v2_flash", "step3p7", "glm5_next"),
)
LENGTHS = [(9, 7), (3, 12), (12, 4), (1, 5)]  # prompt, response
LAYERS, ACTIVE = 4, 2


def network_of(name: str = "qwen3_moe", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = FAMILIES[name]()
    network = auto_class(config).from_config(config, attn_implementation=implementation(config)).eval()
    unify_passes(network)
    with torch.no_grad():
        for key, parameter in network.named_parameters():
            if "linear_attn" in key and parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5 * 0.4)  # as in tests/contract/test_families.py
            elif parameter.dim() > 1:
                parameter.normal_(std=0.4 if "embed" in key or "head" in key else parameter.shape[-1] ** -0.5 * 1.2)
    return network


def ask(content: Tokens, max_tokens: int, key: int, keep: bool = True) -> Request:
    return Request(content, SamplingParams(max_tokens, keep_experts=keep), noise_key(0, key))


def generated(network: Any, requests: list[Request]) -> list[Completion]:
    engine = SteppedEngine(
        EmbeddedBackend(network, max_concurrent=3, max_length=64)
    )  # fewer rows than requests: rows move
    try:
        return asyncio.run(engine.generate(requests))
    finally:
        engine.close()


def samples_of(network: Any) -> list[Sample]:
    rng, requests = np.random.default_rng(0), []
    for key, (prompt, steps) in enumerate(LENGTHS):
        requests.append(ask(Tokens(rng.integers(3, 48, prompt).astype(np.int32)), steps, key))
    found = generated(network, requests)
    contents = [request.content.extended(c.content) for request, c in zip(requests, found, strict=True)]
    return [
        Sample(i, 0, content, np.ones(content.num_steps, bool), c.logprobs_S)
        for i, (content, c) in enumerate(zip(contents, found, strict=True))
    ]


def logprobs(model: LogprobModel, samples: list[Sample], packed_rows: bool, replay: bool = True) -> torch.Tensor:
    keys = tuple(s.key for s in samples)
    rows = (keys[:2], keys[2:]) if packed_rows else tuple((key,) for key in keys)
    packed = to_tensors(MicroBatch(rows, 40), {s.key: s for s in samples}, CPU)
    if not replay:
        packed = dataclasses.replace(packed, experts_RWLK=None)
    found_S: torch.Tensor = model(packed)[0]
    return found_S


def of_engine(samples: list[Sample]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([s.rollout_logprobs_S for s in samples]))


def gate_of(router: Any) -> Any:
    """Its matrix: of the module itself, or of a part."""
    return next(
        g
        for name in ("weight", "router.weight", "proj.weight", "gate.weight")
        if (g := attribute(router, name)) is not None
    )


def attribute(module: Any, name: str) -> Any:
    first, _, rest = name.partition(".")
    found = getattr(module, first, None)
    return attribute(found, rest) if rest and found is not None else found


def moved_routers(network: Any, by: float = 3.0) -> None:
    """The routers choose other experts now."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for router in find_expert_routers(network):
            router.weight.add_(torch.randn(router.weight.shape, generator=generator) * by)


# --- the engine records


@pytest.mark.parametrize("name", MIXTURES)
def test_the_engine_records_what_its_routers_choose(name):
    """Compared with the plain forward pass of transformers, token by token."""
    network = network_of(name)
    number = len(find_expert_routers(network))
    assert number >= 1 and network.config.get_text_config().model_type in REPLAYABLE
    for sample in samples_of(network):
        experts = sample.content.experts
        assert experts.shape == (sample.content.size - 1, number, ACTIVE) and experts.dtype == np.uint8
        tokens = torch.from_numpy(sample.content.tokens_T.astype(np.int64))[None]
        _, plain = ExpertRouters(network).watch(lambda tokens=tokens: network(tokens, use_cache=False).logits)
        assert np.array_equal(np.sort(experts), np.sort(plain[:-1].numpy()))
    assert len({tuple(row) for row in experts.reshape(-1, ACTIVE)}) > 2  # they choose


def test_a_long_prompt_is_recorded_in_chunks(monkeypatch):
    """As the whole prompt at once; also in a later turn, whose first tokens have experts already."""
    network, prompt = network_of(), Tokens(np.arange(4, 44, dtype=np.int32))
    (whole,) = generated(network, [ask(prompt, 3, 0)])
    monkeypatch.setattr(embedded, "PREFILL_TOKENS", 20)
    monkeypatch.setattr(embedded, "PREFILL_CHUNK", 16)
    (in_chunks,) = generated(network, [ask(prompt, 3, 0)])
    assert np.array_equal(np.sort(in_chunks.content.experts), np.sort(whole.content.experts))
    known = dataclasses.replace(prompt, experts=whole.content.experts[:21])
    (later,) = generated(network, [ask(known, 3, 0)])
    assert np.array_equal(np.sort(later.content.experts), np.sort(whole.content.experts[21:]))


def test_nothing_is_recorded_unless_asked():
    network, prompt = network_of(), np.array([5, 6, 7], np.int32)
    with_experts, without = generated(network, [ask(Tokens(prompt), 4, 0), ask(Tokens(prompt), 4, 1, keep=False)])
    assert with_experts.content.experts.shape == (6, LAYERS, ACTIVE) and without.content.experts is None


def test_a_later_turn_records_the_tokens_since_then():
    """Its engine reads the whole conversation again, perhaps with newer weights: earlier tokens keep their experts."""
    network, prompt = network_of(), Tokens(np.arange(5, 10, dtype=np.int32))
    (first,) = generated(network, [ask(prompt, 4, 0)])
    conversation = prompt.extended(first.content, Tokens.steps(np.array([11, 12], np.int32)))
    assert (len(conversation.experts), conversation.size) == (8, 11)
    newer = network_of(seed=1)
    (second,) = generated(newer, [ask(conversation, 3, 0)])
    whole = conversation.extended(second.content)
    assert (len(second.content.experts), len(whole.experts), whole.size) == (5, 13, 14)
    assert np.array_equal(whole.experts[:8], first.content.experts)
    tokens = torch.from_numpy(whole.tokens_T.astype(np.int64))[None]
    _, plain = ExpertRouters(newer).watch(lambda: newer(tokens, use_cache=False).logits)
    assert np.array_equal(np.sort(whole.experts[8:]), np.sort(plain[8:-1].numpy()))


# --- the trainer replays


@pytest.mark.parametrize("rows", ["packed", "alone"])
@pytest.mark.parametrize("name", MIXTURES)
def test_with_the_same_weights_logprobs_are_those_of_the_engine(name, rows):
    network = network_of(name)
    samples = samples_of(network)
    found = logprobs(LogprobModel(network), samples, rows == "packed")
    assert torch.allclose(found, of_engine(samples), atol=close(name) / 2)


@pytest.mark.parametrize("rows", ["packed", "alone"])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_near_tie(name, rows):
    """Three of four experts have almost the same logits. The least change of a router reverses the engine's choice:
    without replay the logprobs are others, with it they stay."""
    network, least = network_of(name), torch.tensor([1e-6, 2e-6, 3e-6])
    with torch.no_grad():
        for router in find_expert_routers(network):
            gate = gate_of(router)
            gate[1:] = gate[1]
            gate[1:, 0] += least
            if getattr(router, "bias", None) is not None:
                router.bias[1:] = router.bias[1]
    samples = samples_of(network)
    model = LogprobModel(network).requires_grad_(False)
    for router in find_expert_routers(network):
        gate_of(router)[1:, 0] -= 2 * least
    assert torch.allclose(logprobs(model, samples, rows == "packed"), of_engine(samples), atol=1e-4)
    free = logprobs(model, samples, rows == "packed", replay=False)
    assert float((free - of_engine(samples)).abs().max()) > 0.05


def test_gates_are_those_of_the_trainers_routers_and_learn():
    """Other routers, the same experts: equal to a network that chooses only among them. ExpertRouters get gradients."""
    network = network_of()
    samples = samples_of(network)
    moved_routers(network)
    model = LogprobModel(network)
    replayed, free = (logprobs(model, samples, True, replay) for replay in (True, False))
    difference, moved = (replayed.detach() - other.detach() for other in (free, of_engine(samples)))
    assert (
        float(difference.abs().max()) > 0.05 and float(moved.abs().max()) > 0.05
    )  # the weights of the gates are new ones
    replayed.sum().backward()
    assert all(float(router.weight.grad.abs().max()) > 1e-4 for router in find_expert_routers(network))
    recomputed = recompute_by_hand(network, samples[0])
    first = logprobs(model, samples[:1], False)
    assert torch.allclose(first, recomputed, atol=1e-5)


def test_siblings_that_share_their_prompt():
    """Its experts are replayed once. The router's gradient is the sum of both."""
    network = network_of()
    prompt = Tokens(np.random.default_rng(0).integers(3, 48, 12).astype(np.int32))
    found = generated(network, [ask(prompt, 6, key) for key in range(4)])
    samples = [
        Sample(0, i, prompt.extended(c.content), np.ones(c.content.num_steps, bool), c.logprobs_S)
        for i, c in enumerate(found)
    ]
    moved_routers(network)
    model, results, keys = LogprobModel(network), [], tuple(sample.key for sample in samples)
    for shares in (False, True):
        network.zero_grad()
        packed = to_tensors(MicroBatch((keys,), 80, shares=shares), {s.key: s for s in samples}, CPU)
        assert len({int(path[0]) for path in packed.paths}) == (1 if shares else 4)
        values = model(packed)[0]
        (values * torch.linspace(-1, 1, len(values))).sum().backward()
        gates = [router.weight.grad.clone() for router in find_expert_routers(network)]
        results.append((values.detach(), torch.stack(gates)))
    (whole, of_whole), (shared, of_shared) = results
    assert torch.allclose(whole, shared, atol=1e-5) and float((whole - of_engine(samples)).abs().max()) > 0.05
    assert float((of_whole - of_shared).abs().max()) <= 1e-5 * float(of_whole.abs().max())


def recompute_by_hand(network: Any, sample: Sample) -> torch.Tensor:
    """The plain forward pass of transformers, whose routers see minus infinity for experts that were not recorded."""
    experts = torch.from_numpy(sample.content.experts.astype(np.int64))
    handles = []
    for number, router in enumerate(find_expert_routers(network)):

        def hook(router: Any, inputs: Any, outputs: Any, number: int = number) -> Any:
            allowed = torch.zeros_like(outputs[0], dtype=torch.bool)
            allowed[:-1] = allowed[:-1].scatter(-1, experts[:, number], True)
            allowed[-1] = True
            values, chosen = outputs[0].masked_fill(~allowed, -torch.inf).softmax(-1).topk(ACTIVE)
            if router.norm_topk_prob:
                return outputs[0], values / values.sum(-1, keepdim=True), chosen
            values = outputs[0].softmax(-1).gather(-1, chosen)
            return outputs[0], values, chosen

        handles.append(router.register_forward_hook(hook))
    tokens = torch.from_numpy(sample.content.tokens_T.astype(np.int64))
    found = torch.log_softmax(network(tokens[None], use_cache=False).logits[0].float(), -1)
    for handle in handles:
        handle.remove()
    return found[:-1].gather(-1, tokens[1:, None])[-sample.num_steps :, 0]


def test_recomputed_layers_replay_too():
    """With activation checkpointing, layers run again in the backward pass: gradients are the same."""
    gradients = []
    for checkpointing in (False, True):
        network = network_of()
        samples = samples_of(network)
        moved_routers(network)
        model = LogprobModel(network).train()
        if checkpointing:
            model.checkpoint_activations()
        logprobs(model, samples, True).sum().backward()
        gradients.append([p.grad.clone() for p in network.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))


def test_the_reference_and_the_critic_choose_themselves():
    network = network_of()
    samples = samples_of(network)
    moved_routers(network)
    model = LogprobModel(network)
    free = logprobs(model, samples, True, replay=False)
    with own_experts(model):
        assert torch.equal(logprobs(model, samples, True), free)
    assert not torch.allclose(logprobs(model, samples, True), free, atol=1e-2)
    assert ValueModel.replays is False


def test_samples_without_experts_are_free():
    """Of several samples in a row, only those with recorded experts follow them."""
    network = network_of()
    samples = samples_of(network)
    moved_routers(network)
    samples[1] = dataclasses.replace(samples[1], content=dataclasses.replace(samples[1].content, experts=None))
    model = LogprobModel(network)
    mixed, free = logprobs(model, samples, True), logprobs(model, samples, True, replay=False)
    first, second = LENGTHS[0][1], LENGTHS[0][1] + LENGTHS[1][1]
    assert torch.allclose(mixed[first:second], free[first:second], atol=1e-6)
    assert not torch.allclose(mixed[:first], free[:first], atol=1e-2)


# --- on the way


def test_pieces_and_checkpoints_keep_them(tmp_path):
    network = network_of()
    prompt = Prompt(0, 0, (), "", Tokens(np.arange(3, 7, dtype=np.int32)))
    completions = generated(network, [ask(prompt.content, n, n) for n in (3, 5)])
    bare = dataclasses.replace(completions[0], content=Tokens.steps(completions[0].content.tokens_S))
    rollouts = [
        Rollout(prompt, i, prompt.content.extended(c.content), c.logprobs_S, c.versions_S > 0, "", c.versions_S, "stop")
        for i, c in enumerate((*completions, bare))
    ]
    assert rollouts[0].content.nbytes == rollouts[2].content.nbytes + 6 * LAYERS * ACTIVE
    write_pending_groups(tmp_path, 0, [[Scored(r, 1.0) for r in rollouts]])
    (found,) = load_pending_groups(tmp_path, lambda n: prompt)
    for scored, rollout in zip(found, rollouts, strict=True):
        saved, given = scored.rollout.content.experts, rollout.content.experts
        assert (saved is None) == (given is None) and (saved is None or np.array_equal(saved, given))


# --- configuration

MOE = {"build": {"architecture": "qwen3_moe", "hidden_size": 32, "heads": 2, "kv_heads": 1, "experts": 4}}


def test_which_runs_replay():
    assert replays_experts(config_of(model=MOE))
    assert not replays_experts(config_of())
    assert not replays_experts(config_of(model=MOE, training={"router_replay": False}))
    assert replay_warning(config_of(model=MOE)) == [] == replay_warning(config_of())
    served = config_of(model=MOE, generation={"engine": "vllm"})
    assert not replays_experts(served)
    assert replay_warning(served) == [
        "training.router_replay: the trainer chooses the experts of each token itself: generation.engine=vllm does not "
        "record experts, only embedded does"
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generation": {"engine": "vllm"}}, "generation.engine=vllm does not record experts, only embedded does"),
        ({"training": {"backend": "megatron"}}, "training.backend=megatron does not replay experts, only fsdp does"),
        ({"model": {"build": {"hidden_size": 32, "heads": 2, "kv_heads": 1}}}, "the model is of type qwen3; docs"),
    ],
)
def test_what_cannot_replay_is_refused(changes, message):
    tree = {"model": MOE, **changes, "training": {"router_replay": True, **changes.get("training", {})}}
    with pytest.raises(UserError, match=r"training.router_replay=true: .*") as error:
        replays_experts(config_of(**tree))
    assert message in str(error.value) and str(error.value).endswith("expected auto or false")


def test_pairs_are_not_replayed():
    """Their loss does not use the logprobs of the engine."""
    config = config_of(model=MOE).model_copy(update={"objective": "dpo"})
    assert not replays_experts(config) and replay_warning(config) == []
