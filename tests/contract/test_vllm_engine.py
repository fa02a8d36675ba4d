"""What vLLM does besides the contract: prefixes, batches computed ahead, sleep, and several engines in one process."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gcore.content.tokens import Tokens
from gcore.generation.engine_shell import SteppedEngine
from gcore.generation.spec import LibraryOptions
from gcore.generation.vllm_core import open_core, skip_block_accounting
from gcore.protocols import MemoryChange
from gcore.types import Completion, Request, SamplingParams, UserError
from tests.contract.test_engine import (
    CLOSE,
    CUDA,
    VLLM,
    ask,
    doomed_vllm,
    greedy,
    in_parts,
    logprobs_of,
    network_of,
    open_vllm,
    prompt,
    run,
    until_generated,
    waiting_on,
    weights_of,
)

pytestmark = pytest.mark.skipif(not VLLM, reason="vllm is not installed")

on_cpu = pytest.mark.skipif(CUDA, reason="about the CPU build")

LONG = 512  # of sequences here: prefixes are shared in blocks of 128 tokens
BLOCK = 2 * 2 * 2 * 32 * 128 * 4  # bytes: keys and values, layers, heads, their size, tokens, float32


@pytest.fixture(scope="module")
def network() -> Any:
    return network_of(max_length=LONG)


@pytest.fixture(scope="module")
def opened(network: Any) -> Iterator[Any]:
    engine = open_vllm(network)
    yield engine
    engine.close()


@pytest.fixture
def engine(opened: Any, network: Any) -> Any:
    """With the weights of `network` as version 0, and nothing cached."""
    asyncio.run(asyncio.wait_for(opened.load_weights(0, weights_of(network)), 60))
    return opened


def exactly(network: Any, tokens: np.ndarray, completion: Completion) -> bool:
    return bool(np.abs(completion.logprobs_S - logprobs_of(network, tokens, completion.content.tokens_S)).max() < CLOSE)


# --- prefixes


def cached_prompts(engine: Any, call: Callable[[], Any]) -> list[int]:
    """How many tokens of each prompt came from the cache, in the order of their first tokens."""
    client, found = engine.backend.core.engine_core, list[int]()
    get_output = client.get_output

    def look() -> Any:
        outputs = get_output()
        found.extend(o.prefill_stats.num_cached_tokens for o in outputs.outputs if o.prefill_stats is not None)
        return outputs

    client.get_output = look
    try:
        call()
    finally:
        client.get_output = get_output
    return found


def test_siblings_share_their_prefix(engine, network):
    p, answers = prompt(300), list[Completion]()
    first, *others = cached_prompts(engine, lambda: answers.extend(run(engine, *(ask(p, 5, key=i) for i in range(4)))))
    assert first == 0 and len(others) == 3 and min(others) >= 256
    assert len({c.content.tokens_S.tobytes() for c in answers}) == 4 and all(exactly(network, p, c) for c in answers)


@pytest.mark.parametrize("version", [7, 0])
def test_a_prefix_dies_with_its_weights(engine, network, version):
    """Whatever the new weights are called."""
    new, p = network_of(seed=2, max_length=LONG), prompt(300)
    assert cached_prompts(engine, lambda: run(engine, ask(p, 5), ask(p, 5, key=1)))[1] >= 256
    asyncio.run(asyncio.wait_for(engine.load_weights(version, weights_of(new)), 60))
    answers: list[Completion] = []
    assert cached_prompts(engine, lambda: answers.extend(run(engine, ask(p, 5)))) == [0]
    assert exactly(new, p, answers[0]) and not exactly(network, p, answers[0])


@on_cpu
def test_requests_that_wait_within_vllm_start_with_the_new_weights(network):
    """The KV cache has four blocks. The second request shares two with the first and has no room for two more: it is
    with vLLM, and has no token yet, when the weights come."""
    engine, new = open_vllm(network, cpu_cache_gib=5 * BLOCK / 2**30), network_of(seed=2, max_length=LONG)
    p = prompt(300)
    q = np.concatenate([p[:256], prompt(200)])

    async def both() -> tuple[Completion, Completion]:
        first, second = (asyncio.ensure_future(engine.generate([r])) for r in (ask(p, 80), ask(q, 20)))
        await until_generated(engine, 10)
        assert (await engine.stats()).running == 2 and not second.done()
        await engine.load_weights(3, weights_of(new))
        return (await first)[0], (await second)[0]

    first, second = asyncio.run(asyncio.wait_for(both(), 60))
    assert first.versions_S[0] == 0 and first.versions_S[-1] == 3
    assert set(second.versions_S.tolist()) == {3} and exactly(new, q, second)
    engine.close()


@on_cpu
def test_skipped_block_accounting_would_have_done_nothing(network, monkeypatch):
    """Four sequences in a cache of six blocks: one is preempted and starts again. Each call is repeated in full: it
    gives no block and caches none."""
    engine = open_vllm(network, cpu_cache_gib=7 * BLOCK / 2**30)
    blocks = engine.backend.core.engine_core.engine_core.scheduler.kv_cache_manager
    (kind,), shortcut, whole = (
        blocks.coordinator.single_type_managers,
        blocks.allocate_slots,
        type(blocks).allocate_slots,
    )
    calls, count, resumed = Counter[str](), kind.cache_blocks, set[str]()
    monkeypatch.setattr(kind, "cache_blocks", lambda *args, **rest: (calls.update(["whole"]), count(*args, **rest))[1])

    def state(request: Any) -> tuple[int, int, int]:
        name = request.request_id
        return (
            len(kind.req_to_blocks[name]),
            kind.num_cached_block.get(name, 0),
            blocks.block_pool.get_num_free_blocks(),
        )

    def repeated(request: Any, tokens: int, **options: Any) -> Any:
        found = shortcut(request, tokens, **options)
        resumed.update([request.request_id] if request.num_preemptions else [])
        if found is not None and set(options) == {"num_lookahead_tokens"}:
            calls["all"] += 1
            before, counted = state(request), calls["whole"]
            assert whole(blocks, request, tokens, **options) is blocks.empty_kv_cache_blocks
            assert state(request) == before
            calls["whole"] = counted
        return found

    monkeypatch.setattr(blocks, "allocate_slots", repeated)
    prompts = [prompt(100 + 9 * i, seed=i) for i in range(4)]
    answers = run(engine, *(ask(p, 200, key=i) for i, p in enumerate(prompts)))
    assert all(len(c.content.tokens_S) == 200 and exactly(network, p, c) for p, c in zip(prompts, answers, strict=True))
    assert resumed and calls["whole"] < 0.1 * calls["all"]
    engine.close()


def test_an_unknown_scheduler_is_left_as_it_is(caplog):
    def allocate(request: Any, tokens: int) -> None: ...

    kinds = [type("FullAttentionManager", (), {"block_size": 16})()]
    blocks = SimpleNamespace(
        allocate_slots=allocate, empty_kv_cache_blocks=(), coordinator=SimpleNamespace(single_type_managers=kinds)
    )
    for scheduler in (SimpleNamespace(kv_cache_manager=blocks), SimpleNamespace()):
        caplog.clear()
        assert not skip_block_accounting(scheduler) and blocks.allocate_slots is allocate
        assert "unknown version of vLLM's scheduler" in caplog.text


@pytest.mark.parametrize(("width", "backend"), [(1, None), (4, "mp")])
def test_tensor_parallel_engines_start_processes_not_ray_actors(tmp_path, monkeypatch, width, backend):
    def look(**arguments: Any) -> None:
        found = arguments["tensor_parallel_size"], arguments.get("distributed_executor_backend")
        raise AssertionError(found)

    monkeypatch.setattr("vllm.engine.arg_utils.EngineArgs", look)
    with pytest.raises(AssertionError) as raised:
        open_core(tmp_path, LibraryOptions(8, 64, tensor_parallel=width))
    assert raised.value.args[0] == (width, backend)


# --- requests


def test_a_token_outside_the_vocabulary_is_refused_and_changes_no_other(engine, network):
    fine, bad = ask(prompt(5), 5, temperature=0), ask(np.array([4, 10**6], np.int32), 5)
    with pytest.raises(UserError, match="vocabulary"):
        run(engine, fine, bad)
    assert run(engine, fine)[0].content.tokens_S.tolist() == greedy(network, prompt(5), 5)


def test_a_sampler_that_is_not_known_truncates_nothing(engine, monkeypatch):
    from gcore.generation.vllm_core import keep_logprobs_untruncated

    stranger = SimpleNamespace(model_runner=SimpleNamespace(sampler=SimpleNamespace(sample=None)))
    monkeypatch.setattr(engine.backend, "can_truncate", keep_logprobs_untruncated(stranger))
    for params in ({"top_k": 3}, {"top_p": 0.5}):
        with pytest.raises(UserError, match=r"set generation\.top_p to 1"):
            run(engine, ask(prompt(5), 5, **params))
    assert len(run(engine, ask(prompt(5), 5))[0].content.tokens_S) == 5


class Second:
    """The other of vLLM's samplers, which runs on GPUs alone: it cuts off in the logits it was given."""

    def __init__(self, limits: tuple[Any, Any]) -> None:
        self.sampling_states = SimpleNamespace(get_top_k_top_p=lambda rows, names: limits)

    def apply_sampling_params(self, logits: torch.Tensor, *, skip_top_k_top_p: bool) -> torch.Tensor:
        return logits.float() / 2

    def sample(self, logits: torch.Tensor, return_logprobs: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        tempered = self.apply_sampling_params(logits, skip_top_k_top_p=True)
        top_k, _ = self.sampling_states.get_top_k_top_p([0], [0])
        if top_k is not None:
            tempered[tempered < tempered.topk(top_k).values[:, -1:]] = -torch.inf
        return tempered.argmax(-1), tempered


@pytest.mark.parametrize("limits", [(None, None), (2, None)])
def test_the_second_sampler_keeps_its_logits_too(limits):
    from gcore.generation.vllm_core import keep_logprobs_untruncated

    sampler, logits = Second(limits), torch.tensor([[1.0, 4.0, 2.0, 8.0]])
    assert keep_logprobs_untruncated(SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler)))
    tokens, kept = sampler.sample(logits, return_logprobs=True)
    assert (tokens.tolist(), kept.tolist()) == ([3], [[0.5, 2.0, 1.0, 4.0]])


def test_without_seeds_samples_do_not_repeat(engine):
    options = engine.backend.options
    engine.backend.options = replace(options, seeds=False)
    found = run(engine, *[ask(prompt(5), 20)] * 5)
    engine.backend.options = options
    assert len({c.content.tokens_S.tobytes() for c in found}) == 5
    assert len({c.content.tokens_S.tobytes() for c in run(engine, *[ask(prompt(5), 20)] * 5)}) == 1


def test_it_scores_given_tokens(engine, network):
    """As a teacher does: logprobs of the steps that a request has, also after it has generated and with new weights."""
    contents = [Tokens.split(prompt(size, seed=size), steps) for size, steps in ((9, 4), (40, 39), (200, 60))]
    requests = [Request(content, SamplingParams(0), noise_key=0) for content in contents]

    def matches(expected: Any) -> bool:
        found = run(engine, *requests)
        wanted = [logprobs_of(expected, content.tokens_P, content.tokens_S) for content in contents]
        assert all(completion.content.num_steps == 0 for completion in found)
        return all(np.abs(c.logprobs_S - w).max() < CLOSE for c, w in zip(found, wanted, strict=True))

    assert matches(network)
    assert exactly(network, prompt(9), run(engine, ask(prompt(9), 5))[0])
    assert matches(network)
    other = network_of(seed=5, max_length=LONG)
    asyncio.run(asyncio.wait_for(engine.load_weights(1, weights_of(other)), 60))
    assert matches(other) and not matches(network)


def test_what_it_cannot_score_is_refused(engine):
    content = Tokens.split(prompt(9), 4)
    with pytest.raises(UserError, match=r"at temperature 1 and without images, got temperature 0.7"):
        run(engine, Request(content, SamplingParams(0, temperature=0.7), noise_key=0))
    with pytest.raises(UserError, match=r"vLLM needs room for one more token to score 512 tokens"):
        run(engine, Request(Tokens.split(prompt(LONG), 4), SamplingParams(0), noise_key=0))


def test_freed_places_are_given_away_several_at_a_time(engine, monkeypatch):
    """While more jobs wait than fit. The last few jobs do not wait for a full group."""
    room, log = engine.backend.room, list[tuple[int, int, bool]]()  # running before, and after; did more wait than fit?

    def watched(waiting: int) -> int:
        before, num_new = len(engine.backend.jobs), room(waiting)
        log.append((before, before + num_new, waiting > 32 - before))
        return num_new

    monkeypatch.setattr(engine.backend, "room", watched)
    lengths = np.random.default_rng(0).integers(1, 40, 100)
    found = run(engine, *(ask(prompt(4, i), int(n)) for i, n in enumerate(lengths)))
    assert [len(c.content.tokens_S) for c in found] == lengths.tolist()
    taken = [step for step, (before, after, _) in enumerate(log) if after > before]
    for last, step in pairwise(taken):
        before, after, waited = log[step]
        assert not waited or after - before >= 4 or step - last >= 16
    assert max(after for _, after, _ in log) == 32 and len(taken) < 100 / 4


def test_what_is_aborted_leaves_vllm(engine):
    scheduler = engine.backend.core.engine_core.engine_core.scheduler

    async def give_up() -> list[Completion]:
        answers = asyncio.ensure_future(engine.generate([ask(prompt(4, i), 400) for i in range(3)], "mine"))
        await until_generated(engine, int((await engine.stats()).generated_tokens) + 20)
        assert scheduler.get_num_unfinished_requests() == 3
        await engine.abort("mine")
        assert scheduler.get_num_unfinished_requests() == 0
        return await answers

    assert [c.finish for c in asyncio.run(asyncio.wait_for(give_up(), 60))] == ["abort"] * 3


# --- weights


def test_parts_come_in_order(engine, network):
    new, p = network_of(seed=2, max_length=LONG), prompt(9)
    first, second, third = in_parts(new, 3)

    async def load() -> int:
        await engine.load_weights(4, first, (0, 3))
        for part in ((2, 3), (1, 2)):
            with pytest.raises(Exception, match="bucket 1 of 3 of version 4"):
                await engine.load_weights(4, third, part)
        with pytest.raises(Exception, match="bucket 1 of 3 of version 4"):
            await engine.load_weights(5, second, (1, 3))
        await engine.load_weights(4, second, (1, 3))
        return await engine.load_weights(4, third, (2, 3))

    assert asyncio.run(asyncio.wait_for(load(), 60)) == 4
    assert run(engine, ask(p, 10, temperature=0))[0].content.tokens_S.tolist() == greedy(new, p, 10)


def test_half_loaded_it_waits_for_whole_weights(engine, network, monkeypatch):
    """vLLM fails in the middle of loading: the state of the model is unknown then, so the engine stops answering."""
    p = prompt(9)

    def fail(*args: Any, **options: Any) -> None:
        raise MemoryError("no room")

    async def load() -> list[Completion]:
        with monkeypatch.context() as broken:
            broken.setattr(engine.backend.core, "collective_rpc", fail)
            with pytest.raises(MemoryError, match="no room"):
                await engine.load_weights(5, weights_of(network))
        answer = asyncio.ensure_future(engine.generate([ask(p, 10, temperature=0)]))
        await asyncio.sleep(0.05)
        assert not answer.done()
        await engine.load_weights(6, weights_of(network))
        return await answer

    (found,) = asyncio.run(asyncio.wait_for(load(), 60))
    assert (found.content.tokens_S.tolist(), set(found.versions_S.tolist())) == (greedy(network, p, 10), {6})


def test_a_head_of_its_own_is_updated_too():
    old, new = (network_of(seed=seed) for seed in (1, 2))
    for network in (old, new):
        network.config.tie_word_embeddings = False
        network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight.detach().flip(0).clone())
    engine, p = open_vllm(old), prompt(9)
    assert run(engine, ask(p, 10, temperature=0))[0].content.tokens_S.tolist() == greedy(old, p, 10)
    assert "lm_head.weight" in weights_of(new)
    asyncio.run(asyncio.wait_for(engine.load_weights(1, weights_of(new)), 60))
    (found,) = run(engine, ask(p, 10, temperature=0))
    assert found.content.tokens_S.tolist() == greedy(new, p, 10) and exactly(new, p, found)
    engine.close()


# --- sleep


def test_sleep_and_weights(engine, network):
    async def calls() -> None:
        await engine.sleep(1)
        with pytest.raises(RuntimeError, match="wake 'weights' first"):
            await engine.load_weights(1, weights_of(network))
        assert await engine.sleep(1) == MemoryChange(0, 0)  # it does already
        with pytest.raises(ValueError, match="expected some of"):
            await engine.wake("everything")
        await engine.wake("weights")
        assert await engine.load_weights(1, weights_of(network)) == 1
        with pytest.raises(RuntimeError, match="partly awake"):
            await engine.sleep(1)
        await engine.wake("kv_cache")
        await engine.load_weights(2, in_parts(network, 2)[0], (0, 2))
        with pytest.raises(RuntimeError, match="during a weight update"):
            await engine.sleep(1)

    asyncio.run(asyncio.wait_for(calls(), 60))


# --- a process


def test_engines_of_one_process_decode_at_once(engine, network):
    """And when one closes, it frees what it held, and the others do not notice."""
    networks = [network, network_of("llama", seed=3), network_of("qwen2", seed=4)]
    engines = [engine, *(doomed_vllm(other) for other in networks[1:])]
    prompts = [prompt(n) for n in range(3, 19)]

    async def all_at_once() -> list[list[Completion]]:
        calls = [one.generate([ask(p, 30, temperature=0) for p in prompts]) for one in engines]
        return await asyncio.gather(*calls)

    for other, found in zip(networks, asyncio.run(asyncio.wait_for(all_at_once(), 60)), strict=True):
        assert [c.content.tokens_S.tolist() for c in found] == [greedy(other, p, 30) for p in prompts]
    models = [weakref.ref(one.backend.core.model_executor.driver_worker.get_model()) for one in engines]
    for one in engines[1:]:
        one.close()
    gc.collect()
    assert [model() is None for model in models] == [False, True, True]
    assert run(engine, ask(prompts[0], 30, temperature=0))[0].content.tokens_S.tolist() == greedy(
        network, prompts[0], 30
    )


@on_cpu
def test_the_terminal_and_torch_stay_as_they_were(network, capfd):
    set_threads = torch.set_num_threads
    capfd.readouterr()
    engine = open_vllm(network)
    run(engine, ask(prompt(300), 5))
    asyncio.run(asyncio.wait_for(engine.load_weights(1, weights_of(network)), 60))
    engine.close()
    said = capfd.readouterr()
    assert [line for line in (said.out + said.err).split("\n") if line and "Writing model shards" not in line] == []
    assert torch.set_num_threads is set_threads
    assert type(torch.ops._C.init_cpu_memory_env).__name__ == "OpOverloadPacket"


def test_what_vllm_cannot_serve_is_the_users_to_mend(network):
    with pytest.raises(UserError, match=r"vLLM cannot serve .*max_model_len"):
        open_vllm(network, max_length=LONG + 1)


def test_closing_ends_those_who_bring_weights():
    """The command comes while the engine is busy with one step, and closing overtakes it."""
    network = network_of()
    engine, hold, held = doomed_vllm(network), threading.Event(), threading.Event()
    get_output = engine.backend.core.engine_core.get_output

    def slow() -> Any:
        held.set()
        hold.wait(60)
        return get_output()

    engine.backend.core.engine_core.get_output = slow

    async def wait() -> list[Any]:
        answer = asyncio.ensure_future(engine.generate([ask(prompt(1), 20)]))
        await asyncio.to_thread(held.wait, 20)
        command = asyncio.ensure_future(engine.load_weights(1, weights_of(network)))
        await asyncio.sleep(0.01)
        closing = asyncio.ensure_future(asyncio.to_thread(engine.close))
        await asyncio.sleep(0.01)
        hold.set()
        await closing
        return await asyncio.wait_for(asyncio.gather(answer, command, return_exceptions=True), 60)

    assert [type(e) for e in asyncio.run(wait())] == [RuntimeError] * 2
    asyncio.run(engine.abort("mine"))  # no request in progress: nothing to abort


def test_a_failure_reaches_everyone_who_waits():
    network = network_of()
    engine = doomed_vllm(network, max_concurrent=2)

    def fail() -> Any:
        raise ValueError("no more memory")

    def inject() -> None:
        engine.backend.core.engine_core.get_output = fail
        engine._thread.join(20)

    found = waiting_on(engine, network, inject)
    assert [str(e) for e in found[:2]] == ["the engine failed: ValueError: no more memory"] * 2
    assert str(found[2]) == "the engine has stopped" and isinstance(found[2].__cause__, ValueError)
    engine.close()


# --- as on GPUs, with a core that stands in for vLLM's


class Ahead:
    """Computes one batch ahead, as on CUDA: a step launches a batch and returns the one before it. A token's logprob
    is the weight it was computed with."""

    def __init__(self) -> None:
        self.engine_core = self.input_processor = self.scheduler = self
        self.model_executor = None  # of another kind than decoding in runs needs
        self.model_config = SimpleNamespace(hf_text_config=None, dtype=None, get_vocab_size=lambda: 16)
        self.weight, self.paused, self.calls = 0.0, False, list[Any]()
        self.requests: dict[str, Any] = {}
        self.priorities: list[int] = []  # of the requests, as they came
        self.batch_queue: deque[list[Any]] = deque()

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def process_inputs(self, name: str, prompt: Any, sampling: Any, supported_tasks: Any, priority: int) -> Any:
        due, stop = sampling.max_tokens, bool(sampling.stop_token_ids)
        self.priorities.append(priority)
        return SimpleNamespace(name=name, due=due, sent=0, stop=stop)

    def add_request(self, request: Any) -> None:
        self.requests[request.name] = request

    def abort_requests(self, names: list[str]) -> None:
        for name in names:
            self.requests.pop(name, None)

    def set_pause_state(self, state: Any) -> None:
        self.paused = state.name == "PAUSED_ALL"

    def get_output(self) -> Any:
        launched = [] if self.paused else [(r, self.weight) for r in self.requests.values() if r.due]
        for request, _ in launched:
            request.due -= 1
        if launched:
            self.batch_queue.appendleft(launched)
            if len(self.batch_queue) < 2:
                return SimpleNamespace(outputs=[])
        return SimpleNamespace(outputs=[self._output(*entry) for entry in self.batch_queue.pop()])

    def _output(self, request: Any, weight: float) -> Any:
        """One that is to stop does so at its third token, which is known only when the fourth is on its way."""
        request.sent += 1
        reason = "stop" if request.stop and request.sent == 3 else None
        if reason or not (request.due or any(r is request for batch in self.batch_queue for r, _ in batch)):
            reason = reason or "length"
            self.requests.pop(request.name, None)
        logprobs = SimpleNamespace(logprobs=np.array([[weight]]))
        return SimpleNamespace(request_id=request.name, new_token_ids=[5], new_logprobs=logprobs, finish_reason=reason)

    def collective_rpc(self, call: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        if call.__name__ == "load_in_place":
            self.weight += sum(float(tensor) for _, tensor in args[0])
        self.calls.append(call.__name__)
        return [True]

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level, len(self.batch_queue)))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", *tags))


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Ahead]]:
    from gcore.generation import vllm
    from gcore.generation.spec import LibraryOptions

    core = Ahead()
    monkeypatch.setattr(vllm, "open_core", lambda folder, options: core)
    monkeypatch.setattr(vllm, "shut_core", lambda core: None)
    monkeypatch.setattr(vllm, "is_cpu", lambda: False)
    weights = SimpleNamespace(shapes={"a": (), "b": ()}, base=lambda *_: None, as_stored=lambda tensors, last: tensors)
    monkeypatch.setattr(vllm, "FolderWeights", lambda folder, config: weights)
    options = LibraryOptions(max_concurrent=4, max_length=10**6, sleep=True)
    engine = SteppedEngine(vllm.VllmBackend(Path("no-such-folder"), options))
    yield engine, core
    engine.close()


def test_a_batch_that_is_computed_ahead_keeps_its_stamp(ahead):
    engine, _ = ahead
    one = {"a": torch.tensor(0.25), "b": torch.tensor(0.75)}

    async def loads() -> None:
        for version in range(1, 6):
            await until_generated(engine, 100 * version)
            await engine.load_weights(version, one)

    async def both() -> list[Completion]:
        requests = [ask(prompt(3), 20000) for _ in range(4)]
        return (await asyncio.gather(engine.generate(requests), loads()))[0]

    for c in asyncio.run(asyncio.wait_for(both(), 60)):
        assert c.logprobs_S.tolist() == c.versions_S.tolist() and len(c.content.tokens_S) == 20000
        assert c.versions_S[0] == 0 and c.versions_S[-1] == 5


def test_parts_go_into_the_model_as_they_come(ahead):
    engine, core = ahead

    async def load() -> None:
        assert await engine.load_weights(1, {"a": torch.tensor(2.0)}, (0, 2)) == 0
        assert core.weight == 2
        with pytest.raises(ValueError, match=r"lack \['b'\]"):
            await engine.load_weights(1, {"a": torch.tensor(2.0)}, (1, 2))
        assert core.weight == 2
        answer = asyncio.ensure_future(engine.generate([ask(prompt(3), 5)]))
        await asyncio.sleep(0.02)
        assert not answer.done()
        assert await engine.load_weights(1, {"b": torch.tensor(3.0)}, (1, 2)) == 1
        assert (await answer)[0].logprobs_S.tolist() == [5] * 5

    asyncio.run(asyncio.wait_for(load(), 60))


@pytest.mark.parametrize("level", [1, 2])
def test_after_a_sleep_that_dropped_the_weights_they_must_come_first(ahead, level):
    engine, core = ahead

    async def nap() -> bool:
        (stopped,) = await engine.generate([ask(prompt(3), 9, stop=(5,))])
        assert (len(stopped.content.tokens_S), stopped.finish, len(core.batch_queue)) == (3, "stop", 1)
        await engine.sleep(level)
        answer = asyncio.ensure_future(engine.generate([ask(prompt(3), 5)]))
        await engine.wake("weights")
        await engine.wake()
        await asyncio.sleep(0.02)
        waited = not answer.done()
        await engine.load_weights(1, {"a": torch.tensor(2.0), "b": torch.tensor(3.0)})
        await answer
        return waited

    assert asyncio.run(asyncio.wait_for(nap(), 60)) == (level == 2)
    assert core.calls[1:4] == [("sleep", level, 0), ("wake", "weights"), ("wake", "kv_cache")]


def test_aborting_while_a_batch_is_on_its_way(ahead):
    engine, _ = ahead

    async def give_up() -> tuple[list[Completion], list[Completion]]:
        mine = asyncio.ensure_future(engine.generate([ask(prompt(3), 10**5)], "mine"))
        theirs = asyncio.ensure_future(engine.generate([ask(prompt(3), 2000)], "theirs"))
        await until_generated(engine, 100)
        await engine.abort("mine")
        return await mine, await theirs

    (mine,), (theirs,) = asyncio.run(asyncio.wait_for(give_up(), 60))
    assert (mine.finish, theirs.finish, len(theirs.content.tokens_S)) == ("abort", "length", 2000)
    assert asyncio.run(engine.stats()).generated_tokens == len(mine.content.tokens_S) + 2000


def test_vllm_is_told_the_priorities(ahead):
    """For when its cache is full. Those that wait here are aborted here, and the others keep their order."""
    engine, core = ahead
    priorities = {"a": 7, "b": 3, "c": 7, "d": 0, "e": 3, "f": -1}

    async def all_of_them() -> None:
        await engine.sleep(1)
        calls = [
            asyncio.ensure_future(engine.generate([replace(ask(prompt(3), 5), priority=priority)], name))
            for name, priority in priorities.items()
        ]
        while (await engine.stats()).waiting < len(priorities):
            await asyncio.sleep(0.001)
        await engine.abort("f")
        await engine.wake()
        await asyncio.gather(*calls)

    asyncio.run(asyncio.wait_for(all_of_them(), 60))
    assert core.priorities == [0, 3, 3, 7, 7]


# --- memory of others on the GPU


def test_memory_that_others_allocate_during_the_start_is_not_counted(monkeypatch: Any) -> None:
    """vLLM's cache gets its share of the GPU minus the growth of memory outside of PyTorch since its start."""
    from vllm.utils.mem_utils import MemorySnapshot

    from gcore.generation.vllm_core import OUTSIDE_TORCH, own_memory

    gib = 2**30
    used = iter([(100 * gib, 2 * gib), (60 * gib, 42 * gib), (110 * gib, gib), (100 * gib, 2 * gib + 5)])

    def measure(snapshot: Any) -> None:
        snapshot.free_memory, snapshot.non_torch_memory = next(used)

    monkeypatch.setattr(MemorySnapshot, "measure", measure)
    with own_memory():
        start, crowded, emptied, usual = (MemorySnapshot(device="cpu") for _ in range(4))
    assert (crowded - start).non_torch_memory == OUTSIDE_TORCH  # the trainer loaded 40 GiB
    assert (emptied - start).non_torch_memory == 0 and emptied.free_memory == start.free_memory  # it freed 10 GiB
    assert (usual - start).non_torch_memory == 5
    assert MemorySnapshot.measure is measure
