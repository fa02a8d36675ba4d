"""SGLang, where it is installed (docs/engines.md says how it was): the contract's own tests, and what only it does.

An engine takes half a minute to start: one of an architecture is lent to one test after another.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any

import numpy as np
import psutil
import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

from gcore.content.tokens import Tokens
from gcore.generation.engine_shell import SteppedEngine
from gcore.generation.sglang import SglangBackend
from gcore.generation.spec import LibraryOptions
from gcore.prompts.tokenizer import build_char_tokenizer
from gcore.protocols import MemoryChange
from gcore.types import Completion, Request, SamplingParams, UserError
from tests.contract import test_engine as contract
from tests.contract.test_engine import (
    ALPHABET,
    CLOSE,
    CUDA,
    ask,
    crowd,
    embedded,
    greedy,
    in_parts,
    logprobs_of,
    network_of,
    prompt,
    run,
    until_generated,
    waiting_on,
    weights_of,
)

if CUDA:
    pytest.skip("SGLang has no float32 on GPUs, and the contract is of that", allow_module_level=True)

lent: dict[str, SteppedEngine] = {}


def open_sglang(network: Any, **options: Any) -> SteppedEngine:
    length = network.config.max_position_embeddings
    options = {"max_concurrent": 32, "max_length": length, "dtype": "float32", "cpu_cache_gib": 0.25, **options}
    with TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        build_char_tokenizer(ALPHABET).save_pretrained(folder)
        return SteppedEngine(SglangBackend(Path(folder), LibraryOptions(**options)))


def sglang(network: Any, max_concurrent: int = 32) -> SteppedEngine:
    """With the weights of the network, and nothing else remembered."""
    kind = network.config.model_type
    if kind not in lent:
        lent[kind] = open_sglang(network, max_concurrent=1024)
    engine = lent[kind]
    asyncio.run(asyncio.wait_for(engine.load_weights(0, weights_of(network)), 60))
    stats = asyncio.run(engine.stats())
    assert not (stats.running or stats.waiting)
    engine.backend.max_concurrent = max_concurrent
    engine._generated, engine._busy_s = 0, 0.0
    return engine


def doomed(network: Any, max_concurrent: int = 32) -> SteppedEngine:
    """For a test that closes or breaks it."""
    sglang(network, max_concurrent)
    return lent.pop(network.config.model_type)


@pytest.fixture(autouse=True, scope="module")
def return_what_was_lent() -> Iterator[None]:
    yield
    for engine in lent.values():
        engine.close()
    lent.clear()


@pytest.fixture(scope="module")
def networks() -> dict[str, Any]:
    return {name: network_of(name) for name in ("qwen3", "qwen2", "llama")}


@pytest.fixture
def make() -> Callable[..., SteppedEngine]:
    sglang.exact = False  # type: ignore[attr-defined]
    return sglang


make_exact = make


def taken(case: Any) -> Any:
    """A test of the contract, without the list of engines that it is given there."""
    copy = FunctionType(case.__code__, case.__globals__, case.__name__, case.__defaults__, case.__closure__)
    marks = [mark for mark in getattr(case, "pytestmark", []) if mark.args[:1] not in (("make",), ("make_exact",))]
    copy.pytestmark = marks  # type: ignore[attr-defined]
    return copy


ALSO_EXACT = ("test_a_later_turn_goes_on_with_the_noise",)
for _name, _case in list(vars(contract).items()):
    if _name.startswith("test_") and ("make" in inspect.signature(_case).parameters or _name in ALSO_EXACT):
        globals()[_name] = taken(_case)


# --- samples


def test_samples_are_those_of_the_embedded_engine(networks):
    """The noise belongs to the sample, in any engine."""
    requests, other = crowd(40), embedded(networks["qwen3"])
    found, expected = run(sglang(networks["qwen3"]), *requests), run(other, *requests)
    other.close()
    assert [(c.content.tokens_S.tolist(), c.finish) for c in found] == [
        (c.content.tokens_S.tolist(), c.finish) for c in expected
    ]
    for c, e in zip(found, expected, strict=True):
        assert np.abs(c.logprobs_S - e.logprobs_S).max() < CLOSE


def test_the_models_own_end_of_sequence_is_a_token_like_others(networks):
    network = network_of()
    engine, p = doomed(networks["qwen3"]), prompt(6)
    engine.close()
    expected = greedy(network, p, 12)
    network.config.eos_token_id = expected[3]
    network.generation_config.eos_token_id = expected[3]
    engine = lent["qwen3"] = open_sglang(network, max_concurrent=1024)
    never = next(t for t in range(16) if t not in expected)
    for stop in ((), (never,)):
        (found,) = run(engine, ask(p, 12, temperature=0, stop=stop))
        assert (found.content.tokens_S.tolist(), found.finish) == (expected, "length")


def test_aborting_one_spares_those_whose_numbers_begin_alike(networks):
    engine = sglang(networks["qwen3"])
    engine.backend._num_added = 0

    async def give_up() -> list[Completion]:
        calls = [asyncio.ensure_future(engine.generate([ask(prompt(4), 50, key=i)], f"{i}")) for i in range(15)]
        await until_generated(engine, 40)
        await engine.abort("1")
        return [found for call in calls for found in await call]

    found = asyncio.run(asyncio.wait_for(give_up(), 60))
    assert [c.finish for c in found] == ["length", "abort"] + ["length"] * 13


# --- weights


def test_a_prefix_dies_with_its_weights(networks):
    new, p = network_of(seed=2), prompt(30)
    engine = sglang(networks["qwen3"])
    run(engine, ask(p, 5), ask(p, 5, key=1))
    asyncio.run(asyncio.wait_for(engine.load_weights(7, weights_of(new)), 60))
    (found,) = run(engine, ask(p, 5))
    assert np.abs(found.logprobs_S - logprobs_of(new, p, found.content.tokens_S)).max() < CLOSE


def test_those_under_way_go_on_with_the_new_weights_alone(networks):
    """Their prefixes are computed again: what follows is what the new policy says to all that came before."""
    new, p = network_of(seed=2), prompt(9)
    engine = sglang(networks["qwen3"], max_concurrent=2)

    async def both() -> Completion:
        answer = asyncio.ensure_future(engine.generate([ask(p, 50)]))
        await until_generated(engine, 10)
        await engine.load_weights(3, weights_of(new))
        return (await answer)[0]

    found = asyncio.run(asyncio.wait_for(both(), 60))
    switch = found.versions_S.tolist().index(3)
    assert 10 <= switch < 50
    for network, part in ((networks["qwen3"], slice(0, switch)), (new, slice(switch, 50))):
        expected = logprobs_of(network, p, found.content.tokens_S)[part]
        assert np.abs(found.logprobs_S[part] - expected).max() < CLOSE


def test_aborted_while_weights_arrive(networks):
    engine, p = sglang(networks["qwen3"], max_concurrent=2), prompt(9)
    first, second = in_parts(networks["qwen3"], 2)
    (whole,) = run(engine, ask(p, 50))

    async def give_up() -> Completion:
        answer = asyncio.ensure_future(engine.generate([ask(p, 50)], "mine"))
        await until_generated(engine, 60)
        await engine.load_weights(5, first, (0, 2))
        await engine.abort("mine")
        found = (await answer)[0]
        await engine.load_weights(5, second, (1, 2))
        return found

    found = asyncio.run(asyncio.wait_for(give_up(), 60))
    n = len(found.content.tokens_S)
    assert 10 <= n < 50 and found.finish == "abort" and set(found.versions_S.tolist()) == {0}
    assert found.content.tokens_S.tolist() == whole.content.tokens_S[:n].tolist() and len(found.logprobs_S) == n
    assert run(engine, ask(p, 50))[0].versions_S.tolist() == [5] * 50


def test_sleep_and_weights(networks):
    engine, network = sglang(networks["qwen3"]), networks["qwen3"]

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


def test_what_sglang_cannot_serve_is_the_users_to_mend():
    with pytest.raises(UserError, match="65 tokens, the model has 64 positions"):
        open_sglang(network_of(), max_length=65)


def test_the_process_around_it_stays_as_it_was(networks):
    """It opens an engine; what SGLang would leave behind is not there. Its own process ends with it."""
    doomed(networks["qwen3"]).close()
    before = (
        logging.getLogger().handlers[:],
        logging.getLogger().level,
        asyncio.get_event_loop_policy(),
        multiprocessing.get_start_method(allow_none=True),
        signal.getsignal(signal.SIGQUIT),
        dict(os.environ),
    )
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    old = {child.pid for child in psutil.Process().children(recursive=True)}
    engine = lent["qwen3"] = open_sglang(networks["qwen3"], max_concurrent=1024)
    after = (
        logging.getLogger().handlers[:],
        logging.getLogger().level,
        asyncio.get_event_loop_policy(),
        multiprocessing.get_start_method(allow_none=True),
        signal.getsignal(signal.SIGQUIT),
        dict(os.environ),
    )
    assert after == before
    started = [child for child in psutil.Process().children(recursive=True) if child.pid not in old]
    assert started
    doomed(networks["qwen3"]).close()
    assert engine._thread.is_alive() is False
    sockets = (engine.backend._server.manager.send_to_scheduler, engine.backend._server.front.send_to_rpc)
    assert [socket.context.closed for socket in sockets] == [True, True]  # they would keep the process from ending
    assert [child.is_running() and "scheduler" in child.name() for child in started] == [False] * len(started)
    assert other.poll() is None
    other.kill()
    other.wait()


def test_closing_ends_waiters(networks):
    engine = doomed(networks["qwen3"], max_concurrent=2)
    found = waiting_on(engine, networks["qwen3"], engine.close)
    assert [type(e) for e in found] == [RuntimeError] * 3
    with pytest.raises(RuntimeError, match="stopped"):
        run(engine, ask(prompt(4)))
    engine.close()  # twice is fine


def test_a_killed_scheduler_reaches_everyone_who_waits(networks):
    engine = doomed(networks["qwen3"], max_concurrent=2)
    (process,) = engine.backend._server._processes

    def kill() -> None:
        process.kill()
        engine._thread.join(20)

    found = waiting_on(engine, networks["qwen3"], kill)
    told = f"the engine failed: RuntimeError: SGLang's process {process.pid} is gone (exit code -9)"
    assert [str(e) for e in found[:2]] == [told] * 2
    assert str(found[2]) == "the engine has stopped"
    engine.close()


def test_the_scheduler_ends_with_the_process_that_opened_it():
    """Killed without a word, as the role of a dead machine's neighbour would be."""
    with TemporaryDirectory() as folder:
        network_of().save_pretrained(folder)
        code = (
            "from pathlib import Path\n"
            "from gcore.generation.engine_shell import SteppedEngine\n"
            "from gcore.generation.sglang import SglangBackend\n"
            "from gcore.generation.spec import LibraryOptions\n"
            "if __name__ == '__main__':\n"
            f"    options = LibraryOptions(4, 64, dtype='float32', cpu_cache_gib=0.1)\n"
            f"    engine = SteppedEngine(SglangBackend(Path({folder!r}), options))\n"
            "    print(engine.backend._server._processes[0].pid, flush=True)\n"
            "    import time; time.sleep(600)\n"
        )
        script = Path(folder) / "role.py"
        script.write_text(code)
        where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        role = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=where)
        assert role.stdout is not None
        scheduler = psutil.Process(int(role.stdout.readline()))
        role.kill()
        role.wait()
        deadline = time.monotonic() + 60
        while scheduler.is_running() and scheduler.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not scheduler.is_running() or scheduler.status() == psutil.STATUS_ZOMBIE


# --- given tokens


def test_it_scores_given_tokens(networks):
    """As a teacher does: logprobs of the steps that a request has, beside others, also of new weights."""
    engine = sglang(networks["qwen3"])
    sizes = ((9, 4), (20, 19), (30, 6))
    contents = [Tokens.split(prompt(size, seed=size), steps) for size, steps in sizes]
    requests = [Request(content, SamplingParams(0), noise_key=0) for content in contents]

    def matches(expected: Any, version: int) -> bool:
        found, generated = run(engine, *requests, ask(prompt(9), 5))[:3], run(engine, ask(prompt(9), 5))
        wanted = [logprobs_of(expected, content.tokens_P, content.tokens_S) for content in contents]
        assert all(c.content.num_steps == 0 and set(c.versions_S) == {version} for c in found)
        assert generated[0].content.num_steps == 5
        return all(np.abs(c.logprobs_S - w).max() < CLOSE for c, w in zip(found, wanted, strict=True))

    assert matches(networks["qwen3"], 0)
    assert matches(networks["qwen3"], 0)  # its cache has the prompts now
    other = network_of(seed=5)
    asyncio.run(asyncio.wait_for(engine.load_weights(1, weights_of(other)), 60))
    assert matches(other, 1) and not matches(networks["qwen3"], 1)
    with pytest.raises(UserError, match=r"SGLang returns logprobs of given tokens at temperature 1"):
        run(engine, Request(contents[0], SamplingParams(0, temperature=0.7), noise_key=0))
