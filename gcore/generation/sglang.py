"""SGLang as an engine: its scheduler in a process of its own, asked through its asynchronous interface.

    requests ──> inbox ──admit──> SGLang ──chunks of tokens──> completions
                   orders: weights, sleep, wake, abort         (all on the engine's own event loop, in its own thread)

No more requests are admitted than SGLang runs at once; the others wait here, by priority, where aborts find them.

Traps that this file knows of (more in sglang_core.py):
- Weights change only in a session, while generation is paused. Requests under way are taken back, and their prefixes
  are computed anew with the new weights. SGLang itself notes which token, or chunk, came from which load.
- Requests are aborted by the beginning of their names: all names have the same length.
- The chunk of an aborted request may repeat its last token.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gcore.content.tokens import Tokens, tokens_of
from gcore.generation.common import GIB, MEMORY, check, free_gpu
from gcore.generation.futures import fail, finish
from gcore.generation.sglang_core import Server, SglangOptions, open_server
from gcore.observe.trace import Tracer
from gcore.protocols import EngineStats, MemoryChange, Weights
from gcore.types import Completion, Finish, Request, UserError
from gcore.weights.receiver import WeightReceiver, base_of, shapes_of

WATCH_S = 0.5


@dataclass(slots=True)
class _Job:
    request: Request
    future: asyncio.Future[Completion]
    ticket: str
    arrival: int
    name: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)  # of tokens, by the load that they come from

    def __lt__(self, other: _Job) -> bool:
        """Lower priority goes first; of equals, the earlier arrival."""
        return (self.request.priority, self.arrival) < (other.request.priority, other.arrival)


class SglangEngine:
    """Implements protocols.Engine."""

    def __init__(self, folder: Path, options: SglangOptions, tracer: Tracer | None = None) -> None:
        self._folder, self._options, self._tracer = folder, options, tracer or Tracer(None, "engine")
        self._inbox: list[_Job] = []  # a heap
        self._jobs: dict[str, _Job] = {}  # those that SGLang has, by the name it knows them by
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._arrivals = itertools.count()
        self._failure: BaseException | None = None
        self._closed = False
        self._gate = threading.Lock()  # calls that pass it before the engine ends get an answer
        self._generated, self._busy_s, self._busy_since = 0, 0.0, 0.0
        self.version, self._loads = 0, [0]  # the version of each load: SGLang is told their index
        self._receiver: WeightReceiver
        self._session = False  # weights can be written; generation is paused
        self._asleep: set[str] = set()
        self._hollow = False  # woken from a sleep that dropped the weights: they must come before anything is decoded
        self._server: Server
        self._loop, self._ending, self._turn = asyncio.new_event_loop(), asyncio.Event(), asyncio.Lock()
        self._orders: dict[asyncio.Future[Any], asyncio.Task[None]] = {}
        opened = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="sglang-engine", daemon=True)
        self._thread.start()
        opened.wait()
        if self._failure is not None:
            raise self._failure

    # ---- protocol -------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[Request], ticket: str = "") -> list[Completion]:
        for request in requests:
            check(request, self._options.max_length, self._server.vocabulary)
        found: list[Completion] = await self._ask(lambda: self._generate(requests, ticket))
        return found

    async def abort(self, ticket: str) -> None:
        if not (self._failure or self._closed):  # else there is nothing to abort
            await self._order(lambda: self._abort(ticket))

    async def load_weights(self, version: int, weights: Weights, bucket: tuple[int, int] = (0, 1)) -> int:
        """A part (i, n) of the weights, in order; with the last one `version` is served. Nothing is decoded from the
        first part to the last. One that does not fit is refused: send it again, or begin anew with part 0."""
        return int(await self._order(lambda: self._load(version, weights, bucket)))

    async def sleep(self, level: int) -> MemoryChange:
        """Give memory back: level 1 the KV cache; 2 the weights too, and requests wait for new ones. Refused while
        requests are under way; those that come later wait. On CPU, or without options.sleep, no memory is given back
        and nothing is lost."""
        found: MemoryChange = await self._order(lambda: self._sleep(level))
        return found

    async def wake(self, *tags: str) -> MemoryChange:
        """Take memory again, all of it or what `tags` name: "weights", "kv_cache"."""
        found: MemoryChange = await self._order(lambda: self._wake_up(tags))
        return found

    async def stats(self) -> EngineStats:
        busy = time.perf_counter() - self._busy_since if self._jobs else 0.0
        return EngineStats(
            running=len(self._jobs),
            waiting=len(self._inbox),
            busy_s=self._busy_s + busy,
            generated_tokens=self._generated,
            running_tokens=sum(len(job.tokens) for job in list(self._jobs.values())),
        )

    def close(self) -> None:
        with self._gate:
            first, self._closed = not self._closed, True
        if first and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(timeout=30)

    async def _ask(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """`work` on the engine's loop."""
        with self._gate:
            if self._failure or self._closed:
                raise RuntimeError("the engine has stopped") from self._failure
            asked = asyncio.run_coroutine_threadsafe(work(), self._loop)
        return await asyncio.wrap_future(asked)

    async def _order(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return await self._ask(lambda: self._in_turn(work))

    async def _in_turn(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Orders run one after another, each to its end, even if its caller was cancelled."""
        done = self._loop.create_future()

        async def run() -> None:
            try:
                async with self._turn:
                    finish(done, await work())
            except Exception as error:
                fail(done, error)

        self._orders[done] = self._loop.create_task(run())
        done.add_done_callback(self._orders.pop)
        return await asyncio.shield(done)

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def _run(self, opened: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live(opened))
        except BaseException as error:
            self._end(error)
        finally:
            opened.set()

    async def _live(self, opened: threading.Event) -> None:
        self._server = open_server(self._folder, self._options)
        self._frees = self._options.sleep and self._options.device != "cpu"
        self._receiver = self._make_receiver()
        self._server.manager.auto_create_handle_loop()
        opened.set()
        while not self._ending.is_set():
            if died := self._server.died():
                raise RuntimeError(died)
            try:
                await asyncio.wait_for(self._ending.wait(), WATCH_S)
            except TimeoutError:
                self._tracer.flush()
        raise RuntimeError("the engine was closed")

    def _make_receiver(self) -> WeightReceiver:
        config, options = self._server.manager.model_config, self._options
        shapes = shapes_of(self._folder, config.hf_text_config)
        return WeightReceiver(
            shapes, base_of(self._folder, shapes, options.adapters, options.device, config.dtype, False)
        )

    def _end(self, error: BaseException) -> None:
        """Fail all pending calls, then shut SGLang down."""
        opened = hasattr(self, "_server")
        if opened and self._options.dies_with_scheduler and not self._closed:  # then the death itself tells them
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        with self._gate:
            self._failure = error
        self._loop.run_until_complete(asyncio.sleep(0))  # let calls that passed the gate submit
        for future in [*(job.future for job in (*self._jobs.values(), *self._inbox)), *self._orders]:
            fail(future, error)
        self._inbox = []
        self._loop.run_until_complete(asyncio.sleep(0))
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        if opened:
            self._server.close()
        self._loop.close()

    def _can_admit(self) -> bool:
        free = len(self._jobs) < self._options.max_concurrent
        return bool(self._inbox) and free and not (self._session or self._asleep or self._hollow)

    async def _generate(self, requests: Sequence[Request], ticket: str) -> list[Completion]:
        jobs = [_Job(request, self._loop.create_future(), ticket, next(self._arrivals)) for request in requests]
        for job in jobs:
            heappush(self._inbox, job)
        self._admit()
        return list(await asyncio.gather(*(job.future for job in jobs)))

    def _admit(self) -> None:
        while self._can_admit():
            job = heappop(self._inbox)
            job.name = f"{job.arrival:020}"
            if not self._jobs:
                self._busy_since = time.perf_counter()
            self._jobs[job.name] = job
            self._tasks[job.name] = self._loop.create_task(self._serve(job))

    async def _serve(self, job: _Job) -> None:
        try:
            reason = await self._stream(job)
            if reason not in ("stop", "length", "abort"):
                raise RuntimeError(f"SGLang ended a request: {reason}")
            if reason != "abort":
                reason = "stop" if job.tokens[-1] in job.request.params.stop_tokens else "length"
            finish(job.future, self._completion(job, reason))
        except ValueError as error:  # sampling parameters that SGLang does not take
            fail(job.future, UserError(f"SGLang refuses an engine request: {error}"))
        except Exception as error:
            fail(job.future, error)
        finally:
            del self._jobs[job.name], self._tasks[job.name]
            if not self._jobs:
                self._busy_s += time.perf_counter() - self._busy_since
            self._admit()

    async def _stream(self, job: _Job) -> Any:
        """Take the tokens as they come. Returns why there are no more."""
        request, params = job.request, job.request.params
        sampling: dict[str, Any] = {
            "max_new_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "stop_token_ids": list(params.stop_tokens),
            "ignore_eos": not params.stop_tokens,
        }
        if self._options.seeds:
            sampling["custom_params"] = {"noise": (_signed(request.noise_key), request.position)}
        chunks = await self._server.front.async_generate(
            input_ids=tokens_of(request.content).tokens_T.tolist(),
            sampling_params=sampling,
            return_logprob=True,
            stream=True,
            rid=job.name,
        )
        reason = None
        async for chunk in chunks:
            about = chunk["meta_info"]
            fresh = about["completion_tokens"] - len(job.tokens)
            if fresh:
                here = {"version": about["weight_version"], "start": len(job.tokens), "end": len(job.tokens) + fresh}
                job.spans.append(here)  # all that older versions of SGLang know
                job.tokens += chunk["output_ids"][:fresh]
                job.logprobs += [logprob for logprob, *_ in about["output_token_logprobs"][:fresh]]
                self._generated += fresh
            job.spans = about.get("weight_versions") or job.spans
            reason = about["finish_reason"] and about["finish_reason"]["type"]
        return reason

    def _completion(self, job: _Job, ending: Finish) -> Completion:
        versions = np.zeros(len(job.tokens), np.int32)
        for span in job.spans:
            versions[span["start"] : span["end"]] = self._loads[int(span["version"])]
        return Completion(
            Tokens.steps(np.array(job.tokens, np.int32)), np.array(job.logprobs, np.float32), versions, ending
        )

    # ---- orders ---------------------------------------------------------------------------------------------------

    async def _abort(self, ticket: str) -> None:
        gone = [job for job in self._inbox if job.ticket == ticket]
        self._inbox = [job for job in self._inbox if job.ticket != ticket]
        heapify(self._inbox)
        for job in gone:
            finish(job.future, self._completion(job, "abort"))
        running = [job.name for job in self._jobs.values() if job.ticket == ticket]
        tasks = [self._tasks[name] for name in running]
        for name in running:
            self._server.manager.abort_request(name)
        if tasks:
            await asyncio.wait(tasks)

    async def _load(self, version: int, weights: Weights, bucket: tuple[int, int]) -> int:
        if "weights" in self._asleep:
            raise RuntimeError(f"weights of version {version} for an engine that sleeps; wake 'weights' first")
        with (
            self._receiver.receive(version, weights, bucket) as loads,
            self._tracer.span("load weights", bucket=bucket[0]),
        ):
            await self._open_session()
            for tensors, last in loads:
                await self._write(tensors, str(len(self._loads)) if last else None)
        if not self._receiver.incomplete:
            self._loads.append(version)
            self.version, self._hollow = version, False
            await self._close_session()
        return self.version

    async def _open_session(self) -> None:
        from sglang.srt.managers import io_struct

        if not self._session:
            self._session = True
            await self._server.manager.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
            if self._server.has_sessions:
                _demand(await self._server.manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(), None))

    async def _close_session(self) -> None:
        from sglang.srt.managers import io_struct

        if self._server.has_sessions:
            _demand(await self._server.manager.end_weight_update(io_struct.EndWeightUpdateReqInput(), None))
        states = self._server.manager.rid_to_state
        while any(states[name].out_list for name in self._jobs if name in states):
            await asyncio.sleep(0)  # chunks that wait are joined, and those of two loads must not be
        await self._server.manager.continue_generation(io_struct.ContinueGenerationReqInput())
        self._session = False
        self._admit()

    async def _write(self, tensors: Mapping[str, torch.Tensor], load: str | None) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        own = [(name, tensor.detach().clone()) for name, tensor in tensors.items()]  # they are shared with the child
        ranks = range(self._options.tensor_parallel)  # each opens its own
        order = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(own) for _ in ranks],
            flush_cache=load is not None,
            weight_version=load,
        )
        _demand(await self._server.manager.update_weights_from_tensor(order, None))

    async def _sleep(self, level: int) -> MemoryChange:
        if self._asleep == set(MEMORY):
            return MemoryChange(0.0, 0.0)
        if busy := len(self._jobs) + len(self._inbox):
            raise RuntimeError(f"asked to sleep with {busy} requests under way")
        if self._receiver.incomplete or self._asleep:
            raise RuntimeError(
                "asked to sleep " + ("while weights arrive" if self._receiver.incomplete else "when half awake")
            )
        if level == 2 and self._frees and self._options.adapters is not None:
            raise UserError(
                "generation.sleep=2 drops the weights, of which adapters (model.lora) bring a part alone; use 1"
            )
        before, started = free_gpu(), time.perf_counter()
        with self._tracer.span("sleep", level=level):
            self._asleep, self._hollow = set(MEMORY), level == 2 and self._frees
            await self._memory("release", MEMORY if level == 2 else MEMORY[1:])
        return MemoryChange(time.perf_counter() - started, (free_gpu() - before) / GIB)

    async def _wake_up(self, tags: Sequence[str]) -> MemoryChange:
        if unknown := set(tags) - set(MEMORY):
            raise ValueError(f"asked to wake {sorted(unknown)}, expected some of {list(MEMORY)}")
        due = [tag for tag in MEMORY if tag in self._asleep and tag in (tags or MEMORY)]
        before, started = free_gpu(), time.perf_counter()
        with self._tracer.span("wake", tags=due):
            await self._memory("resume", due if self._hollow else [tag for tag in due if tag != "weights"])
        self._asleep -= set(due)
        self._admit()
        return MemoryChange(time.perf_counter() - started, (before - free_gpu()) / GIB)

    async def _memory(self, what: str, tags: Sequence[str]) -> None:
        from sglang.srt.managers import io_struct

        if tags and self._frees:
            manager, release = self._server.manager, what == "release"
            if release:  # answers are there a step before SGLang is idle, and it dies if it is not
                await manager.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
            order = getattr(io_struct, f"{what.capitalize()}MemoryOccupationReqInput")(tags=list(tags))
            await getattr(manager, f"{what}_memory_occupation")(order, None)
            if release:
                await manager.continue_generation(io_struct.ContinueGenerationReqInput())


def _signed(key: int) -> int:
    """The same 64 bits: torch has no unsigned ones to speak of."""
    return key - 2**64 if key >= 2**63 else key


def _demand(answer: tuple[bool, str]) -> None:
    done, message = answer
    if not done:
        raise RuntimeError(f"SGLang refuses: {message}")
