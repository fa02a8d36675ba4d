"""The contract of protocols.Engine. Every engine that joins is added to ENGINES and passes the same tests.

What only some can promise (the last bits, the noise) is asked of those in EXACT. The emulated engine, which computes
nothing, passes the tests that ask for nothing computed: those marked `also_emulated`. vLLM is tested where it is
installed; what only it does is in test_vllm_engine.py.

With a GPU, vLLM is tested there, against the same float32 networks on the CPU.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from gcore.config.base import BuildModel, Model
from gcore.content.tokens import Tokens
from gcore.cost.replica_speed import ReplicaSpeed
from gcore.emulate.engine import EmulatedEngine, log_normal
from gcore.generation import decoding
from gcore.generation.embedded import EmbeddedBackend
from gcore.generation.engine_shell import Step, SteppedEngine
from gcore.generation.noise import noise_key
from gcore.generation.speculation import Speculation
from gcore.models.networks import load_model
from gcore.prompts.tokenizer import build_char_tokenizer
from gcore.protocols import EngineStats
from gcore.threads import use_threads
from gcore.types import Completion, Request, SamplingParams, UserError
from tests.seeds import seeds

ALPHABET = "0123456789+="
MAX_LENGTH = 64
CUDA = torch.cuda.is_available()
CLOSE = 1e-4 if CUDA else 1e-5  # logprobs are the same if they differ by less
ON_GPU: dict[str, Any] = {"memory_fraction": 0.06, "eager": True} if CUDA else {}  # several engines at a time
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # else its attention multiplies float32 as TF32


def network_of(architecture: str = "qwen3", seed: int = 0, **sizes: int) -> Any:
    """Small, with weights large enough for distributions that are neither flat nor certain."""
    sizes = {"hidden_size": 128, "intermediate_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, **sizes}
    build = BuildModel(architecture=architecture, alphabet=ALPHABET, **{"max_length": MAX_LENGTH, **sizes})
    tokenizer = build_char_tokenizer(ALPHABET)
    network = load_model(Model(build=build), tokenizer, seed, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 2:
                parameter.mul_(45 / sizes["hidden_size"] ** 0.5)
    network.generation_config.eos_token_id = None
    return network


def embedded(network: Any, max_concurrent: int = 32) -> SteppedEngine:
    return SteppedEngine(EmbeddedBackend(network, max_concurrent=max_concurrent, max_length=MAX_LENGTH))


def embedded_by_library(network: Any, max_concurrent: int = 32) -> SteppedEngine:
    """As for models outside the families that decoder.py knows."""
    return SteppedEngine(EmbeddedBackend(network, max_concurrent, MAX_LENGTH, fused=False))


def speculating(network: Any, max_concurrent: int = 32) -> SteppedEngine:
    """Proposes tokens whether or not it pays."""
    backend = EmbeddedBackend(network, max_concurrent, MAX_LENGTH, speculation=Speculation(always=True))
    return SteppedEngine(backend)


def speculating_by_library(network: Any, max_concurrent: int = 32) -> SteppedEngine:
    speculation = Speculation(always=True)
    return SteppedEngine(EmbeddedBackend(network, max_concurrent, MAX_LENGTH, fused=False, speculation=speculation))


VLLM = importlib.util.find_spec("vllm") is not None
lent: dict[str, Any] = {}  # vLLM takes seconds to start: one engine of an architecture, lent to one test after another


class Lent:
    """The engine of an architecture as a test gets it: with the weights of its network; tokens are counted from 0."""

    def __init__(self, network: Any, max_concurrent: int) -> None:
        kind = network.config.model_type
        if kind not in lent:
            lent[kind] = open_vllm(network, max_concurrent=1024)
        else:
            asyncio.run(asyncio.wait_for(lent[kind].load_weights(0, weights_of(network)), 60))
        self._engine, lent[kind].borrower = lent[kind], self
        backend = self._engine.backend
        backend.options = dataclasses.replace(backend.options, max_concurrent=max_concurrent)
        self._before = asyncio.run(self._engine.stats()).generated_tokens

    async def stats(self) -> EngineStats:
        found = await self._engine.stats()
        return dataclasses.replace(found, generated_tokens=found.generated_tokens - self._before)

    def __getattr__(self, name: str) -> Any:
        assert self._engine.borrower is self, "lent to another since"
        return getattr(self._engine, name)

    def close(self) -> None:
        stats = asyncio.run(self._engine.stats())
        assert self._engine.borrower is not self or not (stats.running or stats.waiting)


def open_vllm(network: Any, **options: Any) -> Any:
    from gcore.generation.spec import LibraryOptions
    from gcore.generation.vllm import VllmBackend

    length = network.config.max_position_embeddings
    options = {
        "max_concurrent": 32,
        "max_length": length,
        "dtype": "float32",
        "cpu_cache_gib": 0.25,
        **ON_GPU,
        **options,
    }
    with TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        build_char_tokenizer(ALPHABET).save_pretrained(folder)
        return SteppedEngine(VllmBackend(Path(folder), LibraryOptions(**options)))


def vllm(network: Any, max_concurrent: int = 32) -> Lent:
    return Lent(network, max_concurrent)


def doomed_vllm(network: Any, max_concurrent: int = 32) -> Any:
    """For a test that closes or breaks it: one that was lent before, where there is one, and will not be again."""
    Lent(network, max_concurrent)
    return lent.pop(network.config.model_type)


def emulated(network: Any, max_concurrent: int = 32) -> EmulatedEngine:
    """A millisecond a step. Tokens are those of the networks here; responses that may stop are 8 or so long."""
    free = dict.fromkeys(("per_sequence_s", "prefill_s_per_token", "sleep_s", "wake_s", "weights_s"), 0.0)
    speed = ReplicaSpeed(base_s=0.001, max_concurrent=max_concurrent, **free)
    return EmulatedEngine(speed, max_length=MAX_LENGTH, lengths=log_normal(8, 1.0), tokens=range(4, 16))


ENGINES: dict[str, Callable[..., Any]] = {
    "embedded": embedded,
    "embedded-by-library": embedded_by_library,
    "speculating": speculating,
}
EXACT = list(ENGINES)  # bitwise the same in any company; samples by the noise key
ENGINES["speculating-by-library"] = speculating_by_library
if VLLM:
    ENGINES["vllm"] = vllm
EVERYONE = {**ENGINES, "emulated": emulated}
also_emulated = pytest.mark.parametrize("make", list(EVERYONE), indirect=True)


@pytest.fixture(scope="module")
def networks() -> dict[str, Any]:
    odd = network_of("llama", hidden_size=60, intermediate_size=100, heads=3, kv_heads=1)  # no powers of 2
    return {**{name: network_of(name) for name in ("qwen3", "qwen2", "llama")}, "odd": odd}


@pytest.fixture(params=list(ENGINES))
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    yield from _maker(request.param)


@pytest.fixture(params=EXACT)
def make_exact(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    yield from _maker(request.param)


def _maker(name: str) -> Iterator[Callable[..., Any]]:
    made = []

    def make(*args: Any, **options: Any) -> Any:
        made.append(EVERYONE[name](*args, **options))
        return made[-1]

    make.exact = name in (*EXACT, "emulated")  # type: ignore[attr-defined]
    yield make
    for engine in made:
        if name != "emulated":  # it has no thread, and nothing to close
            engine.close()


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, length)).integers(4, 16, length).astype(np.int32)


def ask(
    tokens: np.ndarray,
    max_tokens: int = 12,
    *,
    key: int = 0,
    position: int = 0,
    stop: tuple[int, ...] = (),
    **params: Any,
) -> Request:
    content = Tokens.split(tokens, position)  # the last `position` tokens are steps of earlier turns
    return Request(content, SamplingParams(max_tokens, stop_tokens=stop, **params), noise_key(0, key, 0))


def run(engine: Any, *requests: Request) -> list[Completion]:
    return asyncio.run(asyncio.wait_for(engine.generate(list(requests)), 60))


def bits(completion: Completion) -> tuple[bytes, bytes, str]:
    return completion.content.tokens_S.tobytes(), completion.logprobs_S.tobytes(), completion.finish


def alike(make: Any, found: list[Completion], expected: list[Completion]) -> bool:
    """To the last bit where that is promised."""
    if make.exact:
        return [bits(c) for c in found] == [bits(c) for c in expected]
    close = [np.allclose(c.logprobs_S, e.logprobs_S, rtol=0, atol=CLOSE) for c, e in zip(found, expected, strict=True)]
    said = [[(c.content.tokens_S.tolist(), c.finish) for c in side] for side in (found, expected)]
    return said[0] == said[1] and all(close)


def greedy(network: Any, tokens: np.ndarray, max_tokens: int) -> list[int]:
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        return network.generate(ids, do_sample=False, max_new_tokens=max_tokens)[0, len(tokens) :].tolist()


def logprobs_of(network: Any, tokens: np.ndarray, answer: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    with torch.no_grad():
        whole = torch.from_numpy(np.concatenate([tokens, answer]).astype(np.int64))
        table = torch.log_softmax(network(whole[None]).logits[0] / temperature, -1)
        return table[len(tokens) - 1 : -1].gather(-1, whole[len(tokens) :, None])[:, 0].numpy()


# --- what is generated


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_greedy_is_that_of_transformers(make, networks, architecture):
    network = networks[architecture]
    prompts = [prompt(n) for n in (1, 2, 5, 9, 17, 31, 32, 33, 34, 44)]
    found = run(make(network), *(ask(p, 20, temperature=0) for p in prompts))
    expected = [greedy(network, p, 20) for p in prompts]
    assert [c.content.tokens_S.tolist() for c in found] == expected
    assert len({tuple(e) for e in expected}) > 5  # the model does not say the same whatever is asked
    for p, completion in zip(prompts, found, strict=True):
        assert np.abs(completion.logprobs_S - logprobs_of(network, p, completion.content.tokens_S)).max() < CLOSE


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_a_full_forward(make, networks, architecture, temperature):
    network = networks[architecture]
    requests = [ask(prompt(n, 1), 16, key=n, temperature=temperature) for n in (1, 3, 8, 30, 48)]
    for request, completion in zip(requests, run(make(network), *requests), strict=True):
        expected = logprobs_of(network, request.content.tokens_T, completion.content.tokens_S, temperature)
        assert np.abs(completion.logprobs_S - expected).max() < CLOSE


@also_emulated
def test_answers_are_typed_and_ordered(make, networks):
    requests = [ask(prompt(5), n, temperature=0) for n in (7, 1, 12, 3)]
    found = run(make(networks["qwen3"]), *requests)
    assert [len(c.content.tokens_S) for c in found] == [7, 1, 12, 3]
    for c in found:
        assert (c.content.tokens_S.dtype, c.logprobs_S.dtype, c.versions_S.dtype) == (np.int32, np.float32, np.int32)
        assert len(c.logprobs_S) == len(c.versions_S) == len(c.content.tokens_S)
        assert set(c.versions_S.tolist()) == {0} and c.finish == "length"


@also_emulated
def test_no_requests_no_answers(make, networks):
    assert run(make(networks["qwen3"])) == []


# --- where it ends


def test_stop_tokens_end_the_answer_and_stay_in_it(make, networks):
    engine, p = make(networks["qwen3"]), prompt(6)
    (free,) = run(engine, ask(p, 16, key=3))
    tokens = free.content.tokens_S.tolist()
    stop = next(t for t in tokens[3:] if t not in tokens[:3])
    end = tokens.index(stop) + 1
    never = next(t for t in range(16) if t not in tokens)
    stopped, both, at_the_end, other = run(
        engine,
        ask(p, 16, key=3, stop=(stop,)),
        ask(p, 16, key=3, stop=(never, stop)),
        ask(p, end, key=3, stop=(stop,)),
        ask(p, 16, key=3, stop=(never,)),
    )
    for c in (stopped, both, at_the_end):
        assert (c.content.tokens_S.tolist(), c.finish) == (tokens[:end], "stop")
        assert np.abs(c.logprobs_S - free.logprobs_S[:end]).max() < CLOSE
    assert (other.content.tokens_S.tolist(), other.finish) == (tokens, "length")


@also_emulated
def test_an_answer_ends_at_its_first_stop_token(make, networks):
    stops = (5, 9)
    found = run(make(networks["qwen3"]), *(ask(prompt(6), 12, key=i, stop=stops) for i in range(60)))
    for c in found:
        *others, last = c.content.tokens_S.tolist()
        assert not {*others} & {*stops}
        assert c.finish == ("stop" if last in stops else "length")
        assert len(c.content.tokens_S) == 12 or c.finish == "stop"
    assert {c.finish for c in found} == {"stop", "length"}


@also_emulated
def test_the_longest_that_fits(make, networks):
    (found,) = run(make(networks["qwen3"]), ask(prompt(MAX_LENGTH - 10), 10, temperature=0))
    assert (len(found.content.tokens_S), found.finish) == (10, "length")


@also_emulated
def test_impossible_requests_are_refused_and_change_no_other(make, networks):
    engine, fine = make(networks["qwen3"]), ask(prompt(4), 5, key=1)
    (expected,) = run(engine, fine)
    for bad, words in (
        (ask(prompt(0), 5), "empty prompt"),
        (ask(prompt(4), 0), "max_tokens 0|asks for 0 tokens"),
        (ask(prompt(MAX_LENGTH - 9), 10), f"= {MAX_LENGTH + 1} exceeds the engine's {MAX_LENGTH}"),
    ):
        with pytest.raises(UserError, match=words):
            run(engine, fine, bad)
    assert alike(make, run(engine, fine), [expected])


# --- company


def crowd(n: int) -> list[Request]:
    """Requests of all kinds: lengths, temperatures, truncations, siblings of one prompt."""
    rng = np.random.default_rng(7)
    found = []
    for i in range(n):
        kind = {0: {"temperature": 0.0}, 1: {"top_k": 3}, 2: {"top_p": 0.8}}.get(i % 5, {"temperature": 0.9})
        found.append(ask(prompt(int(rng.integers(1, 40)), i // 3), int(rng.integers(1, 20)), key=i, **kind))
    return found


@also_emulated
def test_more_requests_than_slots(make, networks):
    requests = crowd(40)
    few, many = (run(make(networks["qwen3"], max_concurrent=n), *requests) for n in (3, 64))
    assert [c.content.tokens_S.tolist() for c in few] == [c.content.tokens_S.tolist() for c in many]
    assert [len(c.content.tokens_S) for c in few] == [r.params.max_tokens for r in requests]


@also_emulated
def test_concurrent_callers(make, networks):
    engine, requests = make(networks["qwen3"], max_concurrent=8), crowd(36)
    expected = run(engine, *requests)

    async def call(start: int) -> list[Completion]:
        await asyncio.sleep(0.003 * (start % 5))
        return await engine.generate(requests[start : start + 3])

    async def all_at_once() -> list[list[Completion]]:
        return await asyncio.gather(*(call(i) for i in range(0, 36, 3)))

    found = [c for part in asyncio.run(all_at_once()) for c in part]
    assert [c.content.tokens_S.tolist() for c in found] == [c.content.tokens_S.tolist() for c in expected]


def test_callers_of_several_event_loops(make, networks):
    engine, requests = make(networks["qwen3"]), crowd(12)
    expected = [c.content.tokens_S.tolist() for c in run(engine, *requests)]
    found: dict[int, list[int]] = {}

    def caller(i: int) -> None:
        found[i] = run(engine, requests[i])[0].content.tokens_S.tolist()

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(12)] == expected


@also_emulated
def test_lower_priority_goes_first_and_equals_in_their_order(make, networks):
    """They gather while the engine sleeps, and there is one slot."""
    engine, order = make(networks["qwen3"], max_concurrent=1), list[str]()

    async def one(name: str, priority: int) -> None:
        await engine.generate([dataclasses.replace(ask(prompt(4), 5), priority=priority)])
        order.append(name)

    async def all_at_once() -> None:
        await engine.sleep(1)
        asked = {"a": 7, "b": 3, "c": 7, "d": 0, "e": 3, "f": -1}
        calls = [asyncio.ensure_future(one(*who)) for who in asked.items()]
        while (await engine.stats()).waiting < len(asked):
            await asyncio.sleep(0.001)
        await engine.wake()
        await asyncio.gather(*calls)

    asyncio.run(asyncio.wait_for(all_at_once(), 60))
    assert order == ["f", "d", "b", "e", "a", "c"]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "odd"])
def test_the_last_bit_does_not_depend_on_company(make_exact, networks, architecture):
    """Each alone; all together; in every slice; backwards; in few slots; one after another into a running batch."""
    engine, requests = make_exact(networks[architecture], max_concurrent=48), crowd(44)
    alone = [bits(run(engine, r)[0]) for r in requests]
    assert [bits(c) for c in run(engine, *requests)] == alone
    assert [bits(c) for c in run(engine, *reversed(requests))] == alone[::-1]
    for size in (2, 7, 8, 9, 17):
        assert [bits(c) for c in run(engine, *requests[:size])] == alone[:size], size
    small = make_exact(networks[architecture], max_concurrent=5)
    assert [bits(c) for c in run(small, *requests)] == alone

    async def trickle() -> list[Completion]:
        async def one(i: int) -> Completion:
            await asyncio.sleep(0.002 * ((i * 7) % 11))
            return (await engine.generate([requests[i]]))[0]

        return await asyncio.gather(*(one(i) for i in range(len(requests))))

    assert [bits(c) for c in asyncio.run(trickle())] == alone


def test_siblings_share_one_prefill(networks):
    engine = embedded(networks["qwen3"])
    widths: list[int] = []

    def look(network: Any, args: Any, inputs: dict[str, torch.Tensor]) -> None:
        if inputs["input_ids"].shape[1] > 1:
            widths.append(inputs["input_ids"].shape[0])

    hook = networks["qwen3"].get_decoder().register_forward_pre_hook(look, with_kwargs=True)
    p, q = prompt(20), prompt(12)
    found = run(engine, *(ask(p, 6, key=i) for i in range(8)), *(ask(q, 6, key=i) for i in range(4)))
    hook.remove()
    assert sum(widths) == 2
    assert len({c.content.tokens_S.tobytes() for c in found[:8]}) == 8
    assert [bits(c) for c in found[:8]] == [bits(run(engine, ask(p, 6, key=i))[0]) for i in range(8)]
    engine.close()


# --- sampling


@also_emulated
def test_the_key_decides_the_sample(make, networks):
    p = prompt(7)
    first = run(make(networks["qwen3"]), *(ask(p, 10, key=i) for i in range(20)))
    again = run(make(networks["qwen3"]), *(ask(p, 10, key=i) for i in range(20)))
    assert alike(make, first, again)
    assert len({c.content.tokens_S.tobytes() for c in first}) == 20


@also_emulated
def test_a_later_turn_has_other_noise(make, networks):
    engine, p = make(networks["qwen3"]), prompt(7)
    turns = run(engine, *(ask(p, 12, key=5, position=n) for n in (0, 1, 3, 6)))
    assert len({c.content.tokens_S.tobytes() for c in turns}) == 4
    assert alike(make, run(engine, *(ask(p, 12, key=5, position=n) for n in (0, 1, 3, 6))), turns)


@pytest.mark.parametrize("make_exact", [*EXACT, "emulated"], indirect=True)
def test_a_later_turn_goes_on_with_the_noise(make_exact, networks):
    """Asked in two turns, the second with `position` = steps so far, a sample is the one asked for at once."""
    engine, p = make_exact(networks["qwen3"]), prompt(7)
    (whole,) = run(engine, ask(p, 12, key=5))
    (head,) = run(engine, ask(p, 5, key=5))
    (tail,) = run(engine, ask(np.concatenate([p, head.content.tokens_S]), 7, key=5, position=5))
    assert [*head.content.tokens_S, *tail.content.tokens_S] == whole.content.tokens_S.tolist()
    (repeated,) = run(engine, ask(np.concatenate([p, head.content.tokens_S]), 7, key=5))
    assert repeated.content.tokens_S.tolist() != tail.content.tokens_S.tolist()


def truncated(probs: np.ndarray, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """The definition: the k likeliest, and of those the fewest that hold at least p of what they hold together."""
    order = np.argsort(-probs, kind="stable")
    kept = order[: top_k or len(probs)]
    inner = probs[kept] / probs[kept].sum()
    kept = kept[: int(np.searchsorted(np.cumsum(inner), top_p - 1e-9)) + 1]
    result = np.zeros_like(probs)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 4},
        {"top_k": 99},
        {"top_p": 0.7},
        {"top_p": 0.01},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.5},
    ],
    ids=str,
)
def test_the_distribution_is_the_one_asked_for(make, networks, params):
    network, p, n = networks["qwen3"], prompt(9, 3), 3000
    found = run(make(network, max_concurrent=1024), *(ask(p, 1, key=i, **params) for i in range(n)))
    counts = np.bincount([int(c.content.tokens_S[0]) for c in found], minlength=16)
    with torch.no_grad():
        logits = network(torch.from_numpy(p.astype(np.int64))[None]).logits[0, -1].double().numpy()
    scaled = np.exp((logits - logits.max()) / params.get("temperature", 1.0))
    probs = scaled / scaled.sum()
    expected = truncated(probs, params.get("top_k", 0), params.get("top_p", 1.0))
    assert counts[expected == 0].sum() == 0
    likely = expected * n >= 5
    statistic = ((counts - expected * n) ** 2 / np.where(likely, expected * n, 1))[likely].sum()
    free = max(int(likely.sum()) - 1, 0)
    assert statistic <= free + 4 * np.sqrt(2 * max(free, 1))  # the noise is keyed: this passes or fails for good
    if free:  # and the check can tell: the untempered, untruncated distribution would not do
        plain = np.exp(logits - logits.max())
        plain /= plain.sum()
        if params != {"temperature": 1.0} and params != {"top_k": 99}:
            assert ((counts - plain * n) ** 2 / np.maximum(plain * n, 1e-9)).sum() > 100
    # logprobs are of the tempered distribution before truncation: what a trainer can compute
    for c in found[:50]:
        assert c.logprobs_S[0] == pytest.approx(np.log(probs[c.content.tokens_S[0]]), abs=CLOSE)


@pytest.mark.parametrize("noise", [0.0, 0.5, 1 - 2.0**-53])
def test_extreme_noise_never_leaves_the_allowed_tokens(monkeypatch, noise):
    monkeypatch.setattr(decoding, "uniforms", lambda keys, positions: np.full(len(keys), noise))
    logits = torch.tensor([[1.0, 5.0, 4.9, 0.5], [-200.0, 1.0, 1.0, -200.0], [0.1, 0.2, 0.3, 0.4]])
    rows = decoding.RowTable(3)
    for i, request in enumerate([ask(prompt(1), top_k=2), ask(prompt(1)), ask(prompt(1))]):
        rows.put(i, request)
    tokens, *_ = decoding.sample(logits, rows)
    low, middle, high = [1, 1, 0], [1, 2, 2], [2, 2, 3]  # an interval holds its lower end
    assert tokens.tolist() == (low if noise == 0 else middle if noise == 0.5 else high)


# --- weights


def weights_of(network: Any) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in network.named_parameters()}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_new_weights_take_effect_and_are_stamped(make, kind):
    old, new = network_of(seed=1), network_of(seed=2)
    engine, p = make(old), prompt(9)
    before, after = greedy(old, p, 10), greedy(new, p, 10)
    assert before != after
    weights: dict[str, Any] = weights_of(new)
    if kind == "torch":
        weights = {k: torch.from_numpy(v) for k, v in weights.items()}
    (first,) = run(engine, ask(p, 10, temperature=0))
    asyncio.run(engine.load_weights(7, weights))
    (second,) = run(engine, ask(p, 10, temperature=0))
    assert (first.content.tokens_S.tolist(), first.versions_S.tolist()) == (before, [0] * 10)
    assert (second.content.tokens_S.tolist(), second.versions_S.tolist()) == (after, [7] * 10)
    # what was given is copied: changing it later changes nothing
    for value in weights.values():
        value[...] = 0
    assert run(engine, ask(p, 10, temperature=0))[0].content.tokens_S.tolist() == after


def test_weights_that_do_not_fit_are_refused_whole(make):
    old, new = network_of(seed=1), network_of(seed=2)
    engine, p = make(old), prompt(9)
    expected = run(engine, ask(p, 10, key=1))[0]
    missing, wrong = weights_of(new), weights_of(new)
    *_, last = missing
    del missing[last]
    wrong[last] = wrong[last][:1]
    for bad in (missing, wrong):
        with pytest.raises(Exception, match=last.replace(".", r"\.")):
            asyncio.run(asyncio.wait_for(engine.load_weights(3, bad), 60))
    found = run(engine, ask(p, 10, key=1))[0]
    assert alike(make, [found], [expected]) and found.versions_S.tolist() == [0] * 10


async def until_generated(engine: Any, tokens: int) -> None:
    while (await engine.stats()).generated_tokens < tokens:
        await asyncio.sleep(0.001)


@also_emulated
def test_weights_may_come_while_decoding(make):
    network = network_of(seed=1)
    engine, weights = make(network, max_concurrent=4), weights_of(network)
    requests = [ask(prompt(4, i), 40, key=i) for i in range(16)]

    async def both() -> list[Completion]:
        answers = asyncio.ensure_future(engine.generate(requests))
        for version in range(1, 6):
            await until_generated(engine, 40 * version)
            await engine.load_weights(version, weights)
        return await answers

    found = asyncio.run(asyncio.wait_for(both(), 60))
    expected = run(make(network), *requests)
    assert alike(make, found, expected)  # the same weights again: nothing changes
    versions = [c.versions_S.tolist() for c in found]
    assert all(v == sorted(v) and len(v) == 40 and v[0] >= 0 and v[-1] <= 5 for v in versions)
    assert versions[0][0] == 0 and versions[-1][-1] == 5
    assert any(len(set(v)) > 1 for v in versions)


def test_every_token_is_stamped_with_the_weights_it_comes_from(make):
    """New weights in mid-sequence: up to the last old stamp the old policy's sample, from there on another one."""
    old, new = network_of(seed=1), network_of(seed=2)
    requests = [ask(prompt(4, i), 50, key=i) for i in range(24)]
    before = run(make(network_of(seed=1)), *requests)
    engine = make(old, max_concurrent=4)

    async def both() -> list[Completion]:
        answers = asyncio.ensure_future(engine.generate(requests))
        await until_generated(engine, 150)
        assert await engine.load_weights(3, weights_of(new)) == 3
        return await answers

    found = asyncio.run(asyncio.wait_for(both(), 60))
    mixed = 0
    for c, whole in zip(found, before, strict=True):
        switch = int((c.versions_S == 0).sum())
        assert c.versions_S.tolist() == [0] * switch + [3] * (50 - switch)
        assert c.content.tokens_S[:switch].tolist() == whole.content.tokens_S[:switch].tolist()
        assert np.abs(c.logprobs_S[:switch] - whole.logprobs_S[:switch]).max(initial=0) < CLOSE
        if switch < 50:
            assert c.logprobs_S[switch:].tolist() != whole.logprobs_S[switch:].tolist()
        mixed += 0 < switch < 50
    assert mixed > 0 and found[0].versions_S[0] == 0 and set(found[-1].versions_S.tolist()) == {3}


def in_parts(network: Any, count: int) -> list[dict[str, np.ndarray]]:
    weights = list(weights_of(network).items())
    size = -(-len(weights) // count)
    return [dict(weights[i : i + size]) for i in range(0, len(weights), size)]


def test_weights_may_come_in_parts(make):
    """Between the first part and the last nothing is decoded; those under way go on with the new weights then."""
    old, new = network_of(seed=1), network_of(seed=2)
    engine, parts, p = make(old, max_concurrent=2), in_parts(new, 4), prompt(9)
    before, after = greedy(old, p, 40), greedy(new, p, 40)

    async def load() -> list[Completion]:
        running = asyncio.ensure_future(engine.generate([ask(p, 40, temperature=0)]))
        await until_generated(engine, 5)
        for i in range(3):
            assert await engine.load_weights(4, parts[i], (i, 4)) == 0
            for value in parts[i].values():  # what was given is copied
                value[...] = 0
        later = asyncio.ensure_future(engine.generate([ask(p, 40, temperature=0)]))
        seen = (await engine.stats()).generated_tokens
        await asyncio.sleep(0.1)
        assert (await engine.stats()).generated_tokens == seen < 40 and not running.done() and not later.done()
        assert await engine.load_weights(4, parts[3], (3, 4)) == 4
        return [*await running, *await later]

    mixed, later = asyncio.run(asyncio.wait_for(load(), 60))
    switch = mixed.versions_S.tolist().index(4)
    assert mixed.versions_S.tolist() == [0] * switch + [4] * (40 - switch)
    assert mixed.content.tokens_S[:switch].tolist() == before[:switch] and mixed.content.tokens_S.tolist() != before
    assert (later.content.tokens_S.tolist(), later.versions_S.tolist()) == (after, [4] * 40)


def test_parts_that_do_not_fit_are_refused_and_may_come_again(make):
    old, new = network_of(seed=1), network_of(seed=2)
    engine, (first, second), p = make(old), in_parts(new, 2), prompt(9)
    name = next(reversed(second))
    wrong, short = {**second, name: second[name][:1]}, {k: v for k, v in second.items() if k != name}

    async def load(*calls: tuple[dict[str, np.ndarray], tuple[int, int]]) -> int:
        for weights, part in calls[:-1]:
            with pytest.raises(Exception, match="version 4"):
                await engine.load_weights(4, weights, part)
        return await engine.load_weights(4, *calls[-1])

    with pytest.raises(Exception, match="version 4"):
        asyncio.run(asyncio.wait_for(engine.load_weights(4, second, (1, 2)), 60))  # the first is not there
    assert run(engine, ask(p, 10, temperature=0))[0].content.tokens_S.tolist() == greedy(old, p, 10)
    assert asyncio.run(asyncio.wait_for(load((first, (0, 2))), 60)) == 0
    assert asyncio.run(asyncio.wait_for(load((wrong, (1, 2)), (short, (1, 2)), (second, (1, 2))), 60)) == 4
    assert run(engine, ask(p, 10, temperature=0))[0].content.tokens_S.tolist() == greedy(new, p, 10)


def test_reset_aborts_all_and_waits_for_whole_weights(make):
    """New controllers take over in the middle of an update: no token comes from a mix of old and new weights."""
    old, new = network_of(seed=1), network_of(seed=2)
    engine, parts, p = make(old, max_concurrent=2), in_parts(new, 2), prompt(9)

    async def take_over() -> tuple[list[Completion], list[Completion]]:
        left = asyncio.ensure_future(engine.generate([ask(p, 40, key=i) for i in range(4)], "one"))
        await until_generated(engine, 5)
        await engine.load_weights(4, parts[0], (0, 2))
        await engine.reset()
        aborted = await left
        again = asyncio.ensure_future(engine.generate([ask(p, 10, temperature=0)]))
        await asyncio.sleep(0.1)
        assert not again.done()
        for i, part in enumerate(in_parts(old, 2)):
            served = await engine.load_weights(2, part, (i, 2))
        assert served == 2  # an older version than that of the forgotten update
        return aborted, await again

    aborted, again = asyncio.run(asyncio.wait_for(take_over(), 60))
    assert [c.finish for c in aborted] == ["abort"] * 4
    assert again[0].content.tokens_S.tolist() == greedy(old, p, 10) and set(again[0].versions_S.tolist()) == {2}


@also_emulated
def test_reset_wakes(make, networks):
    engine, requests = make(networks["qwen3"]), crowd(3)
    expected = run(engine, *requests)

    async def take_over() -> list[Completion]:
        await engine.sleep(1)
        left = asyncio.ensure_future(engine.generate(requests, "left"))
        await asyncio.sleep(0.02)
        await engine.wake("weights")
        await engine.reset()
        assert [c.finish for c in await left] == ["abort"] * 3
        return await engine.generate(requests)

    assert alike(make, asyncio.run(asyncio.wait_for(take_over(), 60)), expected)


# --- sleeping


@also_emulated
def test_asleep_it_waits_and_awake_it_answers_as_before(make, networks):
    engine, requests = make(networks["qwen3"]), crowd(6)
    expected = run(engine, *requests)

    async def nap() -> list[Completion]:
        assert (await engine.sleep(1)).seconds >= 0
        answers = asyncio.ensure_future(engine.generate(requests))
        await asyncio.sleep(0.05)
        await engine.wake("weights")
        await asyncio.sleep(0.05)
        stats = await engine.stats()
        assert (stats.waiting, stats.running, answers.done()) == (6, 0, False)
        assert (await engine.wake()).seconds >= 0
        return await answers

    assert alike(make, asyncio.run(asyncio.wait_for(nap(), 60)), expected)


@also_emulated
def test_it_does_not_fall_asleep_at_work(make, networks):
    engine = make(networks["qwen3"], max_concurrent=2)
    requests = [ask(prompt(4, i), 50, key=i) for i in range(10)]

    async def nap() -> list[Completion]:
        answers = asyncio.ensure_future(engine.generate(requests))
        await until_generated(engine, 20)
        with pytest.raises(Exception, match=r"sleep (called )?with \d+ requests"):
            await engine.sleep(1)
        return await answers

    assert [len(c.content.tokens_S) for c in asyncio.run(asyncio.wait_for(nap(), 60))] == [50] * 10


# --- aborting


@also_emulated
def test_abort_answers_at_once_with_what_there_is(make, networks):
    """Two run, the others wait. All answer; the slots are free; what was said is the beginning of what would be."""
    requests = [ask(prompt(4, i), 50, key=i) for i in range(60)]
    whole = run(make(networks["qwen3"], max_concurrent=64), *requests)
    engine = make(networks["qwen3"], max_concurrent=2)

    async def give_up() -> tuple[list[Completion], dict[str, float]]:
        answers = asyncio.ensure_future(engine.generate(requests, "mine"))
        await until_generated(engine, 110)  # the first two are done, the next are under way
        await engine.abort("mine")
        return await answers, await engine.stats()

    found, stats = asyncio.run(asyncio.wait_for(give_up(), 60))
    lengths = [len(c.content.tokens_S) for c in found]
    assert [c.finish for c in found] == ["length" if n == 50 else "abort" for n in lengths]
    assert lengths[:2] == [50, 50] and lengths[-1] == 0 and any(0 < n < 50 for n in lengths)
    for c, complete in zip(found, whole, strict=True):
        n = len(c.content.tokens_S)
        assert c.content.tokens_S.tolist() == complete.content.tokens_S[:n].tolist()
        assert len(c.logprobs_S) == len(c.versions_S) == n
        assert (c.content.tokens_S.dtype, c.logprobs_S.dtype, c.versions_S.dtype) == (np.int32, np.float32, np.int32)
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.generated_tokens == sum(lengths) < 60 * 50  # decoding stopped
    assert alike(make, run(engine, *requests[:4]), whole[:4])


@also_emulated
def test_abort_knows_the_ticket(make, networks):
    """Another caller's requests, and those without a ticket, go on as if nothing had happened."""
    engine, kept = make(networks["qwen3"], max_concurrent=4), crowd(12)
    expected = run(engine, *kept)
    done = sum(r.params.max_tokens for r in kept)

    async def mixed() -> tuple[list[Completion], list[Completion], list[Completion]]:
        mine = asyncio.ensure_future(engine.generate([ask(prompt(4, i), 50, key=i) for i in range(40)], "mine"))
        theirs = asyncio.ensure_future(engine.generate(kept[:6], "theirs"))
        untagged = asyncio.ensure_future(engine.generate(kept[6:]))
        await until_generated(engine, done + 20)
        await engine.abort("mine")
        return await mine, await theirs, await untagged

    mine, theirs, untagged = asyncio.run(asyncio.wait_for(mixed(), 60))
    assert alike(make, [*theirs, *untagged], expected)
    assert mine[-1].finish == "abort"


@also_emulated
def test_aborting_an_unknown_ticket_changes_nothing(make, networks):
    engine, requests = make(networks["qwen3"], max_concurrent=4), crowd(12)
    expected = run(engine, *requests)

    async def calls() -> list[Completion]:
        await engine.abort("never heard of")  # while idle
        await engine.generate(requests[:2], "done")
        await engine.abort("done")
        answers = asyncio.ensure_future(engine.generate(requests, "mine"))
        for ticket in ("never heard of", "done", "mine too"):
            await engine.abort(ticket)
            await asyncio.sleep(0.001)
        return await answers

    assert alike(make, asyncio.run(asyncio.wait_for(calls(), 60)), expected)


@seeds(3, 12)
def test_the_last_bit_does_not_depend_on_who_is_aborted(make_exact, networks, seed):
    """Rows leave from the middle of the batch at odd moments; those who stay move up, and notice nothing."""
    engine, requests = make_exact(networks["qwen3"], max_concurrent=16), crowd(30)
    alone = [bits(c) for c in run(make_exact(networks["qwen3"]), *requests)]
    rng = np.random.default_rng(seed)

    async def doomed(i: int) -> list[Completion]:
        call = asyncio.ensure_future(engine.generate([ask(prompt(3 + i, 9), 40, key=100 + i)] * 2, f"doomed {i}"))
        await asyncio.sleep(float(rng.random()) * 0.05)
        await engine.abort(f"doomed {i}")
        return await call

    async def all_at_once() -> tuple[list[Completion], list[Completion]]:
        kept, gone = list[Any](), list[Any]()
        for i in range(15):
            kept.append(asyncio.ensure_future(engine.generate(requests[2 * i : 2 * i + 2], f"kept {i}")))
            gone.append(asyncio.ensure_future(doomed(i)))
        stayed, left = await asyncio.gather(*kept), await asyncio.gather(*gone)
        return [c for part in stayed for c in part], [c for part in left for c in part]

    kept, gone = asyncio.run(asyncio.wait_for(all_at_once(), 60))
    assert [bits(c) for c in kept] == alone
    assert any(c.finish == "abort" for c in gone)


@also_emulated
def test_a_caller_that_is_cancelled_frees_its_slots(make, networks):
    """As a pool does it: the call is gone, the ticket is aborted, and nothing is left behind."""
    engine, request = make(networks["qwen3"], max_concurrent=2), ask(prompt(4), 10, key=1)
    (expected,) = run(engine, request)

    async def cancelled() -> Completion:
        call = asyncio.ensure_future(engine.generate([ask(prompt(4, i), 50, key=i) for i in range(60)], "mine"))
        await until_generated(engine, 20)
        call.cancel()
        await engine.abort("mine")
        answer = (await engine.generate([request], "next"))[0]
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (0, 0) and stats.generated_tokens < 60 * 50
        return answer

    assert alike(make, [asyncio.run(asyncio.wait_for(cancelled(), 60))], [expected])


# --- counters


@also_emulated
def test_stats_count_tokens(make, networks):
    engine = make(networks["qwen3"])
    run(engine, ask(prompt(4), 5), ask(prompt(4), 7))
    stats = asyncio.run(engine.stats())
    assert (stats.generated_tokens, stats.running, stats.waiting) == (12, 0, 0)


@also_emulated
def test_stats_grow_while_the_engine_is_busy(make, networks):
    """Placement decides by them; an engine that reports only when idle would look idle under full load."""
    engine = make(networks["qwen3"], max_concurrent=2)

    async def watch() -> list[dict[str, float]]:
        answers = asyncio.ensure_future(engine.generate([ask(prompt(4, i), 50, key=i) for i in range(20)]))
        seen = [await engine.stats()]
        while not answers.done():
            await asyncio.sleep(0.005)
            seen.append(await engine.stats())
        return [stats for stats in seen if stats.running or stats.waiting]

    busy = asyncio.run(asyncio.wait_for(watch(), 60))
    assert max(stats.running for stats in busy) == 2 and max(stats.waiting for stats in busy) >= 16
    for name in ("busy_s", "generated_tokens"):
        values = [getattr(stats, name) for stats in busy]
        assert values == sorted(values) and values[-1] > values[0], name


# --- the end


def waiting_on(engine: Any, network: Any, then: Callable[[], None]) -> list[BaseException]:
    """Callers of all kinds, some running, some queued; `then` happens while they wait. What each gets."""

    async def wait() -> list[Any]:
        calls = [
            asyncio.ensure_future(engine.generate([ask(prompt(4, i), MAX_LENGTH - 4, key=i) for i in range(40)])),
            asyncio.ensure_future(engine.generate([ask(prompt(4), 10)])),
        ]
        await asyncio.sleep(0.02)
        await asyncio.to_thread(then)
        calls.append(asyncio.ensure_future(engine.load_weights(1, weights_of(network))))
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)

    return asyncio.run(wait())


@pytest.mark.parametrize("name", list(ENGINES))
def test_closing_ends_waiters(networks, name):
    maker = doomed_vllm if name == "vllm" else ENGINES[name]
    engine = maker(networks["qwen3"], max_concurrent=2)
    found = waiting_on(engine, networks["qwen3"], engine.close)
    assert [type(e) for e in found] == [RuntimeError] * 3
    with pytest.raises(RuntimeError, match="stopped"):
        run(engine, ask(prompt(4)))
    engine.close()  # twice is fine


def test_closing_ends_those_who_bring_weights(networks):
    """The command comes while the engine is busy with one step, and closing overtakes it."""
    engine, hold, held = embedded(networks["qwen3"]), threading.Event(), threading.Event()
    step = engine.backend.step

    def slow() -> Step:
        held.set()
        hold.wait(60)
        return step()

    engine.backend.step = slow

    async def wait() -> list[Any]:
        answer = asyncio.ensure_future(engine.generate([ask(prompt(1), 20)]))
        await asyncio.to_thread(held.wait, 20)
        command = asyncio.ensure_future(engine.load_weights(1, weights_of(networks["qwen3"])))
        await asyncio.sleep(0.01)
        closing = asyncio.ensure_future(asyncio.to_thread(engine.close))
        await asyncio.sleep(0.01)
        hold.set()
        await closing
        return await asyncio.wait_for(asyncio.gather(answer, command, return_exceptions=True), 60)

    assert [type(e) for e in asyncio.run(wait())] == [RuntimeError] * 2


def test_a_failure_reaches_everyone_who_waits(networks):
    engine = embedded(networks["qwen3"], max_concurrent=2)

    def fail() -> Step:
        raise ValueError("no more memory")

    def inject() -> None:
        engine.backend.step = fail
        engine._thread.join(20)

    found = waiting_on(engine, networks["qwen3"], inject)
    assert [str(e) for e in found[:2]] == ["the engine failed: ValueError: no more memory"] * 2
    assert str(found[2]) == "the engine has stopped" and isinstance(found[2].__cause__, ValueError)
    with pytest.raises(RuntimeError, match="stopped") as error:
        run(engine, ask(prompt(4)))
    assert str(error.value.__cause__) == "no more memory"
    engine.close()


def test_roles_of_one_process_keep_their_own_numbers_of_threads():
    """With runtime=local the trainer has other threads than the engine, which was there before it."""
    seen = []

    class Watched(EmbeddedBackend):
        def step(self) -> Step:
            made = super().step()
            seen.append(torch.get_num_threads())
            return made

    before = torch.get_num_threads()
    engine = SteppedEngine(Watched(network_of(), 32, MAX_LENGTH))
    trainer = threading.Thread(target=use_threads, args=(3,))
    trainer.start()
    trainer.join()
    try:
        asyncio.run(engine.generate([Request(Tokens(np.array([1, 5], np.int32)), SamplingParams(max_tokens=4), 0)]))
    finally:
        engine.close()
        torch.set_num_threads(before)
    assert set(seen) == {1}
