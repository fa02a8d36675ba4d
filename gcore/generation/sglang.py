"""SGLang as an engine: its scheduler runs in a child process and is called through SGLang's asynchronous interface.

    requests ──> JobQueue ──admit──> SGLang ──chunks of tokens──> completions
                   commands: abort, load weights, sleep, wake       (all on the engine's own thread and event loop)

At most as many requests are admitted as SGLang runs at once. The others stay in the queue, where aborts find them.

Traps that this file handles (more in sglang_core.py):
- Weights change only in a session, while generation is paused. Running requests are retracted, and their prefixes are
  computed again with the new weights. SGLang records for each token, or chunk, the load that produced it.
- SGLang aborts all requests whose name starts with the given name: so all names have the same length.
- The chunk of an aborted request may repeat its last token.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from gcore.generation.engine_shell import EngineShell
from gcore.generation.jobs import Job, engine_failed, resolve, scored
from gcore.generation.request_check import check_request, check_score
from gcore.generation.sglang_core import SglangOptions, SglangServer, open_server
from gcore.generation.sleep import GIB, MEMORY, SleepState, free_gpu
from gcore.generation.spec import EngineSpec, library_options
from gcore.observe.trace import Tracer
from gcore.protocols import MemoryChange
from gcore.types import Completion, Finish, Request, UserError
from gcore.weights.receiver import Loads, WeightReceiver, base_of, shapes_of

WATCH_S = 0.5
T = TypeVar("T")


def make_engine(spec: EngineSpec) -> SglangEngine:
    tracer = spec.open_tracer()
    with tracer.span("start"):
        folder, options, device = library_options(spec)
        options |= {"device": device.type, "dies_with_scheduler": spec.restarts}
        return SglangEngine(folder, SglangOptions(**options), tracer)


class SglangEngine(EngineShell):
    """An engine around SGLang. Commands run one after another on its event loop, each to its end, even if its caller is
    cancelled."""

    def __init__(self, folder: Path, options: SglangOptions, tracer: Tracer | None = None) -> None:
        super().__init__(tracer)
        self._folder, self._options = folder, options
        self._jobs: dict[str, Job] = {}  # jobs in SGLang, by request id
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._busy_since = 0.0
        self._loads = [0]  # version of each load; SGLang is given the index
        self._session = False  # open: weights can be written and generation is paused
        self._server: SglangServer
        self._loop, self._stop, self._command_lock = asyncio.new_event_loop(), asyncio.Event(), asyncio.Lock()
        self._commands: dict[asyncio.Future[Any], asyncio.Task[None]] = {}
        self._start()

    @property
    def _batch(self) -> Collection[Job]:
        return self._jobs.values()

    async def generate(self, requests: Sequence[Request], ticket: str = "") -> list[Completion]:
        for request in requests:
            check_request(request, self._options.max_length, self._server.vocabulary, scores=True)
            if request.params.max_tokens == 0:
                check_score(request, self._options.max_length, "SGLang")
        return await self._on_loop(lambda: self._generate(requests, ticket))

    def _busy(self) -> float:
        return self._busy_s + (time.perf_counter() - self._busy_since if self._jobs else 0.0)

    def close(self) -> None:
        with self._changed:
            first, self._closed = not self._closed, True
        if first and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=30)

    async def _on_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` on the engine's event loop."""
        with self._changed:
            self._check_running()  # a call that passes it before the engine ends is always answered
            future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        return await asyncio.wrap_future(future)

    async def _command(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self._on_loop(lambda: self._serialized(work))

    async def _serialized(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Commands run one after another. Each runs to its end, even if its caller is cancelled."""
        done: asyncio.Future[T] = self._loop.create_future()

        async def run() -> None:
            try:
                async with self._command_lock:
                    resolve(done, await work())
            except Exception as error:
                resolve(done, error)

        self._commands[done] = self._loop.create_task(run())
        done.add_done_callback(self._commands.pop)
        return await asyncio.shield(done)

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def _run(self, opened: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve_until_stopped(opened))
        except BaseException as error:
            self._end(error)
        finally:
            opened.set()

    async def _serve_until_stopped(self, opened: threading.Event) -> None:
        options = self._options
        self._server = open_server(self._folder, options)
        self._frees = options.sleep and options.device != "cpu"
        self._memory = SleepState(drops_weights=self._frees, adapters=options.adapters is not None)
        config = self._server.manager.model_config
        shapes = shapes_of(self._folder, config.hf_text_config)
        base = base_of(self._folder, shapes, options.adapters, options.device, config.dtype, False)
        self._receiver = WeightReceiver(shapes, base)
        self._server.manager.auto_create_handle_loop()
        opened.set()
        while not self._stop.is_set():
            if died := self._server.died():
                raise RuntimeError(died)
            try:
                await asyncio.wait_for(self._stop.wait(), WATCH_S)
            except TimeoutError:
                self._tracer.flush()
        raise RuntimeError("the engine was closed")

    def _end(self, error: BaseException) -> None:
        """Fail all pending calls, then shut SGLang down."""
        opened = hasattr(self, "_server")
        if opened and self._options.dies_with_scheduler and not self._closed:  # the exit fails all pending calls
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        with self._changed:
            self._failure = error
        self._loop.run_until_complete(asyncio.sleep(0))  # let calls that passed the gate submit
        for future in [*(job.future for job in (*self._jobs.values(), *self._queue.clear())), *self._commands]:
            resolve(future, engine_failed(error))
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
        return bool(self._queue) and free and self._memory.awake and not self._session

    async def _generate(self, requests: Sequence[Request], ticket: str) -> list[Completion]:
        jobs = self._queue.add(requests, ticket)
        self._admit()
        return list(await asyncio.gather(*(job.future for job in jobs)))

    def _admit(self) -> None:
        while self._can_admit():
            job = self._queue.pop()
            job.name = f"{job.arrival:020}"
            if not self._jobs:
                self._busy_since = time.perf_counter()
            self._jobs[job.name] = job
            self._tasks[job.name] = self._loop.create_task(self._serve(job))

    async def _serve(self, job: Job) -> None:
        try:
            if job.request.params.max_tokens == 0:
                resolve(job.future, await self._score(job))
                return
            reason = await self._stream(job)
            if reason not in ("stop", "length", "abort"):
                raise RuntimeError(f"SGLang ended a request with finish reason {reason}")
            resolve(job.future, self._completion(job, "abort" if reason == "abort" else job.finish))
        except ValueError as error:  # sampling parameters that SGLang rejects
            resolve(job.future, UserError(f"SGLang rejected an engine request: {error}"))
        except Exception as error:
            resolve(job.future, error)
        finally:
            del self._jobs[job.name], self._tasks[job.name]
            if not self._jobs:
                self._busy_s += time.perf_counter() - self._busy_since
            self._admit()

    async def _stream(self, job: Job) -> Any:
        """Append tokens to the job as they arrive. Returns the finish reason."""
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
            input_ids=job.content.tokens_T.tolist(),
            sampling_params=sampling,
            return_logprob=True,
            stream=True,
            rid=job.name,
        )
        reason = None
        async for chunk in chunks:
            info = chunk["meta_info"]
            num_new = info["completion_tokens"] - len(job.tokens)
            spans = info.get("weight_versions")
            if num_new:
                if not spans:  # older versions of SGLang report one version per chunk
                    job.stamp(int(info["weight_version"]))
                job.tokens += chunk["output_ids"][:num_new]
                job.logprobs += [logprob for logprob, *_ in info["output_token_logprobs"][:num_new]]
                self._generated += num_new
            if spans:
                job.versions = sorted((span["start"], int(span["version"])) for span in spans)
            reason = info["finish_reason"] and info["finish_reason"]["type"]
        return reason

    async def _score(self, job: Job) -> Completion:
        """Logprobs of the steps that the request has, as those of a prompt."""
        content = job.content
        sampling: dict[str, Any] = {"max_new_tokens": 0, "temperature": 1.0}
        if self._options.seeds:  # its batch may have requests that generate
            sampling["custom_params"] = {"noise": (0, 0)}
        chunks = await self._server.front.async_generate(
            input_ids=content.tokens_T.tolist(),
            sampling_params=sampling,
            return_logprob=True,
            logprob_start_len=len(content.tokens_P) - 1,  # its first entry has no logprob
            stream=True,
            rid=job.name,
        )
        infos = [chunk["meta_info"] async for chunk in chunks]
        reason = infos[-1]["finish_reason"] if infos else None
        if reason is None or reason["type"] == "abort":
            return scored(np.zeros(0, np.float32), self.version, "abort")
        logprobs = [logprob for logprob, *_ in infos[-1]["input_token_logprobs"]][-content.num_steps :]
        return scored(np.array(logprobs, np.float32), self._loads[int(infos[-1]["weight_version"])])

    def _completion(self, job: Job, finish: Finish) -> Completion:
        """SGLang stamps tokens with the index of a load. The version of that load may be known only now."""
        job.versions = [(start, self._loads[load]) for start, load in job.versions]
        return job.completion(finish)

    # ---- commands -------------------------------------------------------------------------------------------------

    async def _drop(self, waiting: Sequence[Job], running: Sequence[Job]) -> None:
        for job in waiting:
            resolve(job.future, self._completion(job, "abort"))
        tasks = [self._tasks[job.name] for job in running]
        for job in running:
            self._server.manager.abort_request(job.name)
        if tasks:
            await asyncio.wait(tasks)

    async def _write(self, loads: Loads) -> None:
        from sglang.srt.managers import io_struct

        if not self._session:
            self._session = True
            await self._server.manager.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
            if self._server.has_sessions:
                _check_success(
                    await self._server.manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(), None)
                )
        for tensors, last in loads:
            await self._send(tensors, last)

    async def _end_load(self) -> None:
        from sglang.srt.managers import io_struct

        self._loads.append(self.version)
        if self._server.has_sessions:
            _check_success(await self._server.manager.end_weight_update(io_struct.EndWeightUpdateReqInput(), None))
        states = self._server.manager.rid_to_state
        while any(states[name].out_list for name in self._jobs if name in states):
            await asyncio.sleep(0)  # SGLang joins unread chunks; chunks of two loads must not be joined
        await self._server.manager.continue_generation(io_struct.ContinueGenerationReqInput())
        self._session = False
        self._admit()

    async def _send(self, tensors: Mapping[str, torch.Tensor], last: bool) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        copies = [(name, tensor.detach().clone()) for name, tensor in tensors.items()]  # shared with the child process
        ranks = range(self._options.tensor_parallel)  # each rank opens its own handle
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(copies) for _ in ranks],
            flush_cache=last,
            weight_version=str(len(self._loads)) if last else None,
        )
        _check_success(await self._server.manager.update_weights_from_tensor(update, None))

    async def _free(self, level: int) -> float:
        """Level 1 frees the KV cache, level 2 also the weights. No effect on CPU or without options.sleep."""
        before = free_gpu()
        self._memory.sleep(level)  # first: requests that arrive during the release must queue
        await self._change_memory("release", MEMORY if level == 2 else MEMORY[1:])
        return (free_gpu() - before) / GIB

    async def _allocate(self, tags: Sequence[str]) -> float:
        before = free_gpu()
        not_freed = () if self._memory.weights_dropped else ("weights",)
        await self._change_memory("resume", [tag for tag in tags if tag not in not_freed])
        return (before - free_gpu()) / GIB

    async def _wake(self, tags: Sequence[str]) -> MemoryChange:
        change = await super()._wake(tags)
        self._admit()
        return change

    async def _change_memory(self, action: Literal["release", "resume"], tags: Sequence[str]) -> None:
        from sglang.srt.managers import io_struct

        if tags and self._frees:
            manager, release = self._server.manager, action == "release"
            if release:  # outputs arrive one step before SGLang is idle, and it crashes if it is not idle
                await manager.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
            call = getattr(io_struct, f"{action.capitalize()}MemoryOccupationReqInput")(tags=list(tags))
            await getattr(manager, f"{action}_memory_occupation")(call, None)
            if release:
                await manager.continue_generation(io_struct.ContinueGenerationReqInput())


def _signed(key: int) -> int:
    """The same 64 bits as int64: torch barely supports uint64."""
    return key - 2**64 if key >= 2**63 else key


def _check_success(result: tuple[bool, str]) -> None:
    done, message = result
    if not done:
        raise RuntimeError(f"SGLang reported an error: {message}")
