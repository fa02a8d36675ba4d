"""The shell of stepped engines with a backend that computes nothing, and the sleep state that all engines share."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from gcore.content.tokens import Tokens
from gcore.generation.engine_shell import DecodeBackend, Ended, Job, Step, SteppedEngine
from gcore.generation.sleep import SleepState
from gcore.protocols import MemoryChange, RoleError
from gcore.runtime.local import LocalHandle
from gcore.types import Completion, Request, SamplingParams, UserError
from gcore.weights.broadcast import BroadcastError
from gcore.weights.receiver import WeightReceiver


class Counter(DecodeBackend):
    """The tokens of a job are 0, 1, 2, ... `slots` jobs at a time; `log` has the calls."""

    def __init__(self, slots: int = 2) -> None:
        self.jobs: list[Job] = []
        self.max_concurrent, self.log, self.admitted = slots, list[Any](), list[str]()
        self.fails_at = ""

    def open(self) -> tuple[WeightReceiver, SleepState]:
        self._call("open")
        return WeightReceiver({"a": (), "b": ()}), SleepState(drops_weights=True)

    def check(self, request: Request) -> None:
        if request.params.max_tokens < 1:
            raise UserError("no tokens")

    def admit(self, jobs: Sequence[Job]) -> Sequence[Ended]:
        self._call("admit")
        self.admitted += [job.ticket for job in jobs]
        refused = [job for job in jobs if job.ticket == "refused"]
        self.jobs += [job for job in jobs if job not in refused]
        return [(job, UserError("the library refuses it")) for job in refused]

    def step(self) -> Step:
        self._call("step")
        for job in self.jobs:
            job.tokens.append(len(job.tokens))
            job.logprobs.append(-1.0)
        ended = [job for job in self.jobs if len(job.tokens) == job.request.params.max_tokens]
        num_tokens = len(self.jobs)
        self.jobs = [job for job in self.jobs if job not in ended]
        return Step(num_tokens, [(job, job.finish) for job in ended])

    def flush_steps(self) -> Sequence[Step]:
        self.log.append("flush")
        return ()

    def remove(self, jobs: Collection[Job]) -> None:
        self.jobs = [job for job in self.jobs if job not in jobs]

    def load(self, tensors: Mapping[str, Any], version: int, last: bool) -> None:
        self.log.append(("load", *tensors))

    def finish_load(self) -> Collection[Job]:
        restarted = [job for job in self.jobs if not job.tokens]
        self.remove(restarted)
        return restarted

    def free(self, level: int) -> float:
        self.log.append(("free", level))
        return 2.5

    def allocate(self, tags: Sequence[str]) -> float:
        self.log.append(("allocate", *tags))
        return 1.5

    def close(self) -> None:
        self.log.append("close")
        self.jobs = []

    def _call(self, name: str) -> None:
        if name == self.fails_at:
            raise MemoryError(f"in {name}")


WEIGHTS = {"a": np.zeros((), np.float32), "b": np.zeros((), np.float32)}


def ask(max_tokens: int = 3, priority: int = 0) -> Request:
    return Request(Tokens(np.array([4], np.int32)), SamplingParams(max_tokens), 0, priority=priority)


def run(backend: Counter, calls: Callable[[SteppedEngine], Coroutine[Any, Any, None]]) -> None:
    engine = SteppedEngine(backend)
    asyncio.run(asyncio.wait_for(calls(engine), 60))
    engine.close()
    assert backend.log[-1] == "close"


def test_all_callers_learn_that_scoring_failed():
    """Their requests are computed together, by the command of the first one."""

    class Full(Counter):
        def check(self, request: Request) -> None:
            """Requests for logprobs are accepted."""

        def score(self, requests: Sequence[Request]) -> list[Any]:
            self.log.append(("score", len(requests)))
            raise MemoryError("the GPU is full")

    backend = Full()

    async def calls(engine: SteppedEngine) -> None:
        callers = (engine.generate([ask(0)]) for _ in range(3))
        with backend.held:
            answers = asyncio.gather(*callers, return_exceptions=True)
            await asyncio.sleep(0.1)
        assert [str(answer) for answer in await answers] == ["the GPU is full"] * 3
        assert ("score", 3) in backend.log

    backend.held = threading.Lock()
    backend.compute_lock = backend.held
    run(backend, calls)


def test_requests_queue_by_priority_while_the_engine_sleeps_and_aborts_find_them():
    backend = Counter(slots=1)

    async def calls(engine: SteppedEngine) -> None:
        assert (await engine.sleep(1)).gigabytes == 2.5
        tasks = {
            name: asyncio.ensure_future(engine.generate([ask(priority=priority)], name))
            for name, priority in {"c": 7, "a": 0, "d": 7, "gone": 3, "b": 3}.items()
        }
        await asyncio.sleep(0)
        await engine.abort("gone")
        (aborted,) = await tasks.pop("gone")  # although the engine sleeps
        assert (aborted.finish, len(aborted.content.tokens_S), len(aborted.versions_S)) == ("abort", 0, 0)
        assert await engine.sleep(1) == MemoryChange(0.0, 0.0)
        assert (await engine.stats()).waiting == 4
        assert (await engine.wake()).gigabytes == 1.5
        for (found,) in await asyncio.gather(*tasks.values()):
            assert (found.content.tokens_S.tolist(), found.finish) == ([0, 1, 2], "length")
        assert (await engine.stats()).generated_tokens == 12

    run(backend, calls)
    assert backend.admitted == ["a", "b", "c", "d"]


def test_nothing_is_decoded_between_the_first_bucket_and_the_last():
    backend = Counter()

    async def calls(engine: SteppedEngine) -> None:
        await engine.load_weights(3, WEIGHTS)
        await engine.load_weights(4, {"a": WEIGHTS["a"]}, (0, 2))
        answers = asyncio.ensure_future(engine.generate([ask(3), ask(3)]))
        await asyncio.sleep(0.02)
        assert not answers.done() and (await engine.stats()).waiting == 2
        await engine.load_weights(4, {"b": WEIGHTS["b"]}, (1, 2))
        assert [c.versions_S.tolist() for c in await answers] == [[4, 4, 4]] * 2

    run(backend, calls)
    assert backend.log == ["flush", ("load", "a", "b"), "flush", ("load", "a"), "flush", ("load", "b"), "close"]


def test_a_job_keeps_the_version_of_each_token():
    async def calls() -> Completion:
        job = Job(ask(), "", 0, asyncio.get_running_loop().create_future())
        job.stamp(2)
        job.stamp(3)  # started again before its first token
        job.tokens += [7, 8]
        job.stamp(5)
        job.tokens += [9]
        job.logprobs += [-1.0] * 3
        return job.completion("length")

    assert asyncio.run(calls()).versions_S.tolist() == [3, 3, 5]


def test_what_the_library_refuses_is_answered_and_the_others_go_on():
    async def calls(engine: SteppedEngine) -> None:
        fine = asyncio.ensure_future(engine.generate([ask(5)]))
        with pytest.raises(UserError, match="the library refuses it"):
            await engine.generate([ask(5)], "refused")
        with pytest.raises(UserError, match="no tokens"):
            await engine.generate([ask(0)])
        assert len((await fine)[0].content.tokens_S) == 5

    run(Counter(), calls)


def test_a_failed_command_keeps_its_class_and_the_engine_goes_on():
    """The sender of weights repeats a broadcast that failed: it knows the failure by its class."""

    class Fails(Counter):
        def load(self, tensors: Mapping[str, Any], version: int, last: bool) -> None:
            if "failed" not in self.log:
                self.log.append("failed")
                raise BroadcastError("a member died")

    async def calls(engine: SteppedEngine) -> None:
        handle = LocalHandle("engine-0", engine)
        with pytest.raises(RoleError, match="engine-0: BroadcastError: a member died") as found:
            await handle.call("load_weights", 1, WEIGHTS)
        assert found.value.kind == "BroadcastError"
        assert pickle.loads(pickle.dumps(found.value)).kind == "BroadcastError"
        assert await handle.call("load_weights", 1, WEIGHTS) == 1

    run(Fails(), calls)


@pytest.mark.parametrize("where", ["admit", "step"])
def test_a_failure_reaches_all_callers(where: str):
    backend = Counter(slots=2)

    async def calls(engine: SteppedEngine) -> None:
        await engine.sleep(1)
        answers = [asyncio.ensure_future(engine.generate([ask()])) for _ in range(5)]
        await asyncio.sleep(0)
        backend.fails_at = where
        await engine.wake()
        for answer in answers:  # of jobs in the batch, on their way into it, and in the queue
            with pytest.raises(RuntimeError, match=f"the engine failed: MemoryError: in {where}"):
                await answer
        with pytest.raises(RuntimeError, match="the engine has stopped") as error:
            await engine.wake()
        assert isinstance(error.value.__cause__, MemoryError)
        await engine.abort("")
        assert (await engine.stats()).waiting == 0

    run(backend, calls)


def test_a_backend_that_cannot_open_says_why_and_is_closed():
    backend = Counter()
    backend.fails_at = "open"
    with pytest.raises(MemoryError, match="in open"):
        SteppedEngine(backend)
    assert backend.log == ["close"]


# --- sleep


def test_sleep_is_refused_at_work_and_while_weights_arrive():
    state = SleepState()
    with pytest.raises(RuntimeError, match="sleep called with 3 requests in progress"):
        state.may_sleep(1, 3, False)
    with pytest.raises(RuntimeError, match="sleep called during a weight update"):
        state.may_sleep(1, 0, True)
    assert state.may_sleep(1, 0, False) and state.awake
    state.sleep(1)
    assert not state.awake and not state.may_sleep(1, 3, True)  # it sleeps already
    with pytest.raises(RuntimeError, match="version 4 sent to an engine that is asleep; wake 'weights' first"):
        state.check_load(4)
    with pytest.raises(
        ValueError, match=r"wake called with tags \['all'\], expected some of \['weights', 'kv_cache'\]"
    ):
        state.due(["all"])
    assert state.due(["weights"]) == ["weights"]
    state.wake(["weights"])
    state.check_load(4)
    with pytest.raises(RuntimeError, match="sleep called on an engine that is partly awake"):
        state.may_sleep(1, 0, False)
    assert state.due([]) == ["kv_cache"]
    state.wake(["kv_cache"])
    assert state.awake


def test_dropped_weights_must_arrive_before_the_engine_decodes():
    for drops, awake in ((False, True), (True, False)):
        state = SleepState(drops_weights=drops)
        state.sleep(2)
        state.wake(state.due([]))
        assert (state.awake, state.weights_lost) == (awake, drops)
    with pytest.raises(UserError, match=r"generation\.sleep=2 .*model\.lora.*; use 1"):
        SleepState(drops_weights=True, adapters=True).may_sleep(2, 0, False)
    assert SleepState(adapters=True).may_sleep(2, 0, False)


def test_dropped_weights_stay_lost_when_the_engine_sleeps_again():
    async def calls(engine: SteppedEngine) -> None:
        for level in (2, 1):  # level 1 keeps what is there: no weights
            await engine.sleep(level)
            await engine.wake()
        answers = asyncio.ensure_future(engine.generate([ask()]))
        await asyncio.sleep(0.02)
        assert not answers.done()
        await engine.load_weights(1, WEIGHTS)
        assert (await answers)[0].versions_S.tolist() == [1, 1, 1]

    run(Counter(), calls)


def test_an_engine_that_frees_its_cache_alone_takes_weights_in_its_sleep():
    state = SleepState(("kv_cache",))
    state.sleep(1)
    state.check_load(1)
    assert state.due(["weights"]) == [] and state.due([]) == ["kv_cache"]
