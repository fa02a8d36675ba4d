"""The engine around SGLang, with a server that counts: what it does without SGLang itself (contract/ needs it)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gcore.content.tokens import Tokens
from gcore.generation import sglang
from gcore.generation.engine_shell import SteppedEngine
from gcore.generation.spec import LibraryOptions
from gcore.protocols import MemoryChange
from gcore.types import Completion, Request, SamplingParams

WEIGHTS = {"a": np.zeros((), np.float32), "b": np.zeros((), np.float32)}


class Server:
    """The tokens of a request are 0, 1, 2, ...; each is stamped with the load that was the last one then."""

    vocabulary, has_sessions = 64, True

    def __init__(self) -> None:
        self.front = self.manager = self
        self.model_config = SimpleNamespace(hf_text_config=None, dtype=torch.float32)
        self.rid_to_state: dict[str, Any] = {}
        self.log: list[Any] = []
        self.running, self.load, self.aborted, self.closed, self.death = True, "0", set[str](), False, ""

    def auto_create_handle_loop(self) -> None:
        self.log.append("open")

    def died(self) -> str:
        return self.death

    def close(self) -> None:
        self.closed = True

    async def async_generate(self, rid: str, sampling_params: dict[str, Any], **options: Any) -> Any:
        most = sampling_params["max_new_tokens"]

        async def chunks() -> Any:
            if not most:
                finish = {"type": "length"}
                entries = [(-0.5 * i, i) for i in range(len(options["input_ids"]))]
                yield {"meta_info": {"finish_reason": finish, "input_token_logprobs": entries, "weight_version": "0"}}
            for number in range(most):
                await asyncio.sleep(0.001)
                while not self.running and rid not in self.aborted:
                    await asyncio.sleep(0.001)
                ended = "abort" if rid in self.aborted else "length" if number + 1 == most else ""
                info = {
                    "completion_tokens": number + (ended != "abort"),
                    "weight_version": self.load,
                    "output_token_logprobs": [(-1.0, number)],
                    "finish_reason": {"type": ended} if ended else None,
                }
                yield {"meta_info": info, "output_ids": [number]}
                if ended:
                    return

        return chunks()

    def abort_request(self, rid: str) -> None:
        self.aborted.add(rid)

    async def pause_generation(self, request: Any) -> None:
        self.running = False

    async def continue_generation(self, request: Any) -> None:
        self.running = True

    async def begin_weight_update(self, request: Any, _: None) -> tuple[bool, str]:
        self.log.append("begin")
        return True, ""

    async def end_weight_update(self, request: Any, _: None) -> tuple[bool, str]:
        self.log.append("end")
        return True, ""

    async def update_weights_from_tensor(self, update: Any, _: None) -> tuple[bool, str]:
        names = [name for name, _ in update.serialized_named_tensors[0]]
        self.log.append((*names, update.flush_cache))
        self.load = update.weight_version or self.load
        return True, ""

    async def release_memory_occupation(self, request: Any, _: None) -> None:
        self.log.append(("release", *request.tags))

    async def resume_memory_occupation(self, request: Any, _: None) -> None:
        self.log.append(("resume", *request.tags))


@pytest.fixture
def server(monkeypatch) -> Server:
    made = Server()
    names = ("PauseGeneration", "ContinueGeneration", "BeginWeightUpdate", "EndWeightUpdate", "UpdateWeightsFromTensor")
    names += ("ReleaseMemoryOccupation", "ResumeMemoryOccupation")
    structs = {f"{name}ReqInput": SimpleNamespace for name in names}
    contents: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.managers": {},
        "sglang.srt.managers.io_struct": structs,
        "sglang.srt.utils": {"MultiprocessingSerializer": SimpleNamespace(serialize=lambda tensors: tensors)},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    monkeypatch.setattr(sglang, "open_server", lambda folder, options: made)
    monkeypatch.setattr(sglang, "WATCH_S", 0.01)
    return made


def ask(max_tokens: int = 3, content: Tokens | None = None) -> Request:
    return Request(content or Tokens(np.array([4], np.int32)), SamplingParams(max_tokens), 0)


def run(calls: Callable[[SteppedEngine], Coroutine[Any, Any, None]], **options: Any) -> SteppedEngine:
    engine = SteppedEngine(sglang.SglangBackend(Path("no-such-folder"), LibraryOptions(2, 1000, **options)))
    asyncio.run(asyncio.wait_for(calls(engine), 60))
    engine.close()
    return engine


async def until_generated(engine: SteppedEngine, tokens: int) -> None:
    while (await engine.stats()).running_tokens < tokens:
        await asyncio.sleep(0.001)


def test_requests_are_served_two_at_a_time_and_counted(server):
    async def calls(engine: SteppedEngine) -> None:
        tasks = [asyncio.ensure_future(engine.generate([ask(40)], str(i))) for i in range(3)]
        await until_generated(engine, 4)
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (2, 1) and stats.busy_s > 0
        for (completion,) in await asyncio.gather(*tasks):
            assert completion.content.tokens_S.tolist() == list(range(40)) and completion.finish == "length"
        done = await engine.stats()
        assert (done.running, done.waiting, done.generated_tokens) == (0, 0, 120)
        assert done.busy_s == (await engine.stats()).busy_s > stats.busy_s

    run(calls)
    assert server.closed


def test_an_abort_ends_what_runs_and_what_waits(server):
    async def calls(engine: SteppedEngine) -> None:
        names = ("mine", "other", "mine")
        tasks = [asyncio.ensure_future(engine.generate([ask(200)], name)) for name in names]
        await until_generated(engine, 6)
        await engine.abort("mine")
        await asyncio.gather(tasks[0], tasks[2])
        assert not tasks[1].done()
        first, other, waited = [completion for task in tasks for completion in await task]
        assert (first.finish, other.finish, waited.finish) == ("abort", "length", "abort")
        assert 0 < first.content.num_steps < 200 and waited.content.num_steps == 0
        assert first.content.tokens_S.tolist() == list(range(first.content.num_steps))

    run(calls)


def test_tokens_have_the_version_of_the_load_that_made_them(server):
    async def calls(engine: SteppedEngine) -> None:
        task = asyncio.ensure_future(engine.generate([ask(60)]))
        await until_generated(engine, 5)
        assert await engine.load_weights(7, {"a": WEIGHTS["a"]}, (0, 2)) == 0
        with pytest.raises(RuntimeError, match="1 requests in progress"):
            await engine.sleep(1)
        seen = (await engine.stats()).running_tokens
        await asyncio.sleep(0.02)
        assert (await engine.stats()).running_tokens == seen, "it decodes with a mix of two versions"
        assert await engine.load_weights(7, {"b": WEIGHTS["b"]}, (1, 2)) == 7
        (completion,) = await task
        versions = completion.versions_S.tolist()
        assert versions == sorted(versions) and set(versions) == {0, 7} and len(versions) == 60
        assert server.log == ["open", "begin", ("a", False), ("b", True), "end"]
        assert await engine.load_weights(9, WEIGHTS) == engine.version == 9
        assert (await engine.generate([ask()]))[0].versions_S.tolist() == [9] * 3

    run(calls)


@pytest.mark.parametrize(("level", "freed"), [(1, ["kv_cache"]), (2, ["weights", "kv_cache"])])
def test_sleep_frees_by_level_and_requests_wait_for_the_wake(server, level, freed):
    async def calls(engine: SteppedEngine) -> None:
        assert (await engine.sleep(level)).seconds > 0
        assert await engine.sleep(level) == MemoryChange(0.0, 0.0)
        task = asyncio.ensure_future(engine.generate([ask()]))
        with pytest.raises(RuntimeError, match="wake 'weights' first"):
            await engine.load_weights(1, WEIGHTS)
        await engine.wake("weights")
        await engine.load_weights(1, WEIGHTS)
        assert not task.done()
        await engine.wake("kv_cache")
        assert (await task)[0].versions_S.tolist() == [1] * 3
        changes = [entry for entry in server.log if entry[0] in ("release", "resume")]
        assert changes[0] == ("release", *freed)
        assert sorted(tag for change in changes[1:] for tag in change[1:]) == sorted(freed)

    run(calls, device="cuda", sleep=True)


def test_a_reset_ends_all_requests_and_a_mix_of_versions_serves_none(server):
    async def calls(engine: SteppedEngine) -> None:
        tasks = [asyncio.ensure_future(engine.generate([ask(400)], str(i))) for i in range(3)]
        await until_generated(engine, 2)
        await engine.load_weights(3, {"a": WEIGHTS["a"]}, (0, 2))
        await engine.reset()
        completions: list[Completion] = [(await task)[0] for task in tasks]
        assert {completion.finish for completion in completions} == {"abort"}
        task = asyncio.ensure_future(engine.generate([ask()]))
        await asyncio.sleep(0.02)
        assert not task.done()
        await engine.load_weights(4, WEIGHTS)
        assert (await task)[0].versions_S.tolist() == [4] * 3

    run(calls)


def test_given_steps_are_scored(server):
    async def calls(engine: SteppedEngine) -> None:
        content = Tokens(np.array([4, 5], np.int32), np.array([6, 7, 8], np.int32))
        (scored,) = await engine.generate([ask(0, content)])
        assert scored.logprobs_S.tolist() == [-1.0, -1.5, -2.0] and scored.finish == "length"

    run(calls)


def test_a_dead_server_and_a_closed_engine_are_told_to_all_who_wait(server):
    async def calls(engine: SteppedEngine) -> None:
        task = asyncio.ensure_future(engine.generate([ask(900)]))
        await until_generated(engine, 2)
        server.death = "SGLang's process 12 is gone (exit code -9)"
        with pytest.raises(RuntimeError, match="the engine failed: RuntimeError: SGLang's process 12 is gone"):
            await task
        with pytest.raises(RuntimeError, match="the engine has stopped"):
            await engine.load_weights(1, WEIGHTS)
        await engine.abort("1")  # nothing is in progress

    engine = run(calls)
    assert server.closed and not engine._thread.is_alive()


def test_halves_of_a_matrix_arrive_in_one_call(server):
    """SGLang would leave out a half that comes alone: at the latest the last call has it, for a model that has no other
    half."""
    zero = np.zeros((), np.float32)
    q, kv, other, single = "l.0.q_a_proj.weight", "l.0.kv_a_proj_with_mqa.weight", "l.1.o.weight", "l.2.q_a_proj.weight"

    async def calls(engine: SteppedEngine) -> None:
        await engine.load_weights(1, {q: zero, other: zero}, (0, 3))
        await engine.load_weights(2, {q: zero, other: zero}, (0, 3))  # the first update was given up
        await engine.load_weights(2, {kv: zero, single: zero}, (1, 3))
        await engine.load_weights(2, {"b": zero}, (2, 3))

    run(calls)
    loads = [entry for entry in server.log if isinstance(entry, tuple)]
    assert loads == [(other, False), (other, False), (q, kv, False), (single, "b", True)]
