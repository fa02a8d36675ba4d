"""SGLang as an engine: its scheduler runs in a child process and is called through SGLang's asynchronous interface.

    admit ──> a task per request ──> SGLang ──chunks of tokens──> tasks ──step: what has arrived──> the shell
                                                                     (all on the engine's thread, engine_shell.py)

The tasks are on an event loop of the engine's thread, which runs only within a call of the backend. At most as many
requests are admitted as SGLang runs at once. The others stay in the shell's queue, where aborts find them.

Traps that this file handles (more in sglang_core.py):
- Weights change only in a session, while generation is paused. Running requests are retracted, and their prefixes are
  computed again with the new weights. SGLang records for each token, or chunk, the version that produced it.
- SGLang joins two matrices of latent attention (DeepSeek) only if one call has both: the first one waits.
- SGLang aborts all requests whose name starts with the given name: so all names have the same length.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from gcore.content.tokens import Tokens, tokens_of
from gcore.generation.engine_shell import WATCH_S, DecodeBackend, Ended, Job, Step, SteppedEngine
from gcore.generation.request_check import check_request
from gcore.generation.sglang_core import SglangServer, open_server
from gcore.generation.sleep import GIB, MEMORY, SleepState, free_gpu
from gcore.generation.spec import EngineSpec, LibraryOptions
from gcore.types import Finish, Floats, Request, UserError
from gcore.weights.receiver import FolderWeights, WeightReceiver

T = TypeVar("T")


def make_engine(spec: EngineSpec) -> SteppedEngine:
    tracer = spec.open_tracer()
    with tracer.span("start"):
        return SteppedEngine(SglangBackend(*LibraryOptions.of(spec)), tracer)


class SglangBackend(DecodeBackend):
    def __init__(self, folder: Path, options: LibraryOptions) -> None:
        self._folder, self._options, self.max_concurrent = folder, options, options.max_concurrent
        self._jobs: dict[str, Job] = {}  # by request id
        self.jobs = self._jobs.values()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of these jobs
        self._num_added = 0
        self._num_tokens, self._ended = 0, list[Ended]()  # since the last step
        self._arrived = asyncio.Event()  # some of these
        self._paused = False  # for a weight update
        self._freed: Sequence[str] = ()  # tags of the memory that is freed
        self._frees = options.sleep and options.device != "cpu"
        self._loop = asyncio.new_event_loop()
        self._server: SglangServer  # set by `open`
        self._weights: FolderWeights
        self._loading, self._halves = -1, dict[str, torch.Tensor]()  # version; tensors that wait for their other half

    def open(self) -> tuple[WeightReceiver, SleepState]:
        asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(self._open())

    async def _open(self) -> tuple[WeightReceiver, SleepState]:
        options = self._options
        self._server = open_server(self._folder, options)
        config = self._server.manager.model_config
        self._weights = FolderWeights(self._folder, config.hf_text_config)
        base = self._weights.base(options.adapters, options.device, config.dtype)
        self._server.manager.auto_create_handle_loop()
        memory = SleepState(drops_weights=self._frees, adapters=options.adapters is not None)
        return WeightReceiver(self._weights.shapes, base), memory

    def _result_of(self, work: Coroutine[Any, Any, T]) -> T:
        """The result. All tasks go on meanwhile."""
        task = self._loop.create_task(work)
        while not task.done():
            self._loop.run_until_complete(asyncio.wait([task], timeout=WATCH_S))
            if died := self.died():
                raise RuntimeError(died)
        return task.result()

    def died(self) -> str:
        died = self._server.died()
        if died and self._options.dies_with_library:  # the exit fails all pending calls
            print(died, file=sys.stderr, flush=True)
            os._exit(1)
        return died

    def close(self) -> None:
        self._jobs.clear()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        if hasattr(self, "_server"):
            self._server.close()
        self._loop.close()

    # ---- requests -------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        check_request(request, self._options.max_length, self._server.vocabulary, library="SGLang")

    def admit(self, jobs: Sequence[Job]) -> Sequence[Ended]:
        for job in jobs:
            job.name = self._new_name()
            self._jobs[job.name] = job
            self._tasks[job.name] = self._loop.create_task(self._serve(job))
        return ()

    def _new_name(self) -> str:
        self._num_added += 1
        return f"{self._num_added:020}"

    def step(self) -> Step:
        self._result_of(self._arrived.wait())
        self._arrived.clear()
        step, self._num_tokens, self._ended = Step(self._num_tokens, self._ended), 0, []
        for job, _ in step.ended:
            del self._jobs[job.name], self._tasks[job.name]
        return step

    async def _serve(self, job: Job) -> None:
        """The tokens of a job, until it ends."""
        end: Finish | Exception
        try:
            reason = await self._stream(job)
            if reason not in ("stop", "length", "abort"):
                raise RuntimeError(f"SGLang ended a request with finish reason {reason}")
            end = "abort" if reason == "abort" else job.finish or "length"
        except ValueError as error:  # sampling parameters that SGLang rejects
            end = UserError(f"SGLang rejected an engine request: {error}")
        except Exception as error:
            end = error
        self._ended.append((job, end))
        self._arrived.set()

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
            if job.name not in self._jobs:  # removed
                continue
            info = chunk["meta_info"]
            num_new = info["completion_tokens"] - len(job.tokens)  # the chunk of an aborted request may repeat a token
            spans = info.get("weight_versions")
            if num_new:
                if not spans:  # older versions of SGLang report one version per chunk
                    job.stamp(int(info["weight_version"]))
                job.tokens += chunk["output_ids"][:num_new]
                job.logprobs += [logprob for logprob, *_ in info["output_token_logprobs"][:num_new]]
                self._num_tokens += num_new
                self._arrived.set()
            if spans:
                job.versions = sorted((span["start"], int(span["version"])) for span in spans)
            reason = info["finish_reason"] and info["finish_reason"]["type"]
        return reason

    def score(self, requests: Sequence[Request]) -> list[Floats]:
        async def score_all() -> list[Floats]:
            return await asyncio.gather(*(self._score(tokens_of(request.content)) for request in requests))

        return self._result_of(score_all())

    async def _score(self, content: Tokens) -> Floats:
        """Logprobs of the steps, as those of a prompt."""
        sampling: dict[str, Any] = {"max_new_tokens": 0, "temperature": 1.0}
        if self._options.seeds:  # its batch may have requests that generate
            sampling["custom_params"] = {"noise": (0, 0)}
        chunks = await self._server.front.async_generate(
            input_ids=content.tokens_T.tolist(),
            sampling_params=sampling,
            return_logprob=True,
            logprob_start_len=len(content.tokens_P) - 1,  # its first entry has no logprob
            stream=True,
            rid=self._new_name(),
        )
        infos = [chunk["meta_info"] async for chunk in chunks]
        if not infos or infos[-1]["finish_reason"]["type"] == "abort":
            raise RuntimeError("SGLang ended a request for logprobs of given tokens without them")
        logprobs = [logprob for logprob, *_ in infos[-1]["input_token_logprobs"]]
        return np.array(logprobs[-content.num_steps :], np.float32)

    def remove(self, jobs: Collection[Job]) -> None:
        """What still arrives of them is dropped."""
        for job in jobs:
            del self._jobs[job.name]
            self._server.manager.abort_request(job.name)
        if jobs:
            self._result_of(asyncio.wait([self._tasks.pop(job.name) for job in jobs]))
        self._ended = [(job, end) for job, end in self._ended if job.name in self._jobs]

    # ---- weights and memory ---------------------------------------------------------------------------------------

    def load(self, tensors: Mapping[str, torch.Tensor], version: int, last: bool) -> None:
        if version != self._loading:
            self._loading, self._halves = version, {}
        stored = {**self._halves, **self._weights.as_stored(tensors, last)}
        alone = {name for name in stored if not last and _other_half(name) not in ("", *stored)}
        self._halves = {name: stored[name].detach().clone() for name in alone}  # the sender may overwrite its memory
        now = {name: tensor for name, tensor in stored.items() if name not in alone}
        self._result_of(self._load(now, str(version) if last else None))

    async def _load(self, tensors: Mapping[str, torch.Tensor], last_of: str | None) -> None:
        from sglang.srt.managers import io_struct
        from sglang.srt.utils import MultiprocessingSerializer

        if not self._paused:
            self._paused = True
            await self._server.manager.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
            if self._server.has_sessions:
                _check(await self._server.manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(), None))
        copies = [(name, tensor.detach().clone()) for name, tensor in tensors.items()]  # shared with the child process
        ranks = range(self._options.tensor_parallel)  # each rank opens its own handle
        update = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(copies) for _ in ranks],
            flush_cache=last_of is not None,
            weight_version=last_of,
        )
        _check(await self._server.manager.update_weights_from_tensor(update, None))

    def finish_load(self) -> Collection[Job]:
        self._result_of(self._finish_load())
        return ()

    async def _finish_load(self) -> None:
        from sglang.srt.managers import io_struct

        if self._server.has_sessions:
            _check(await self._server.manager.end_weight_update(io_struct.EndWeightUpdateReqInput(), None))
        states = self._server.manager.rid_to_state
        while any(states[name].out_list for name in self._jobs if name in states):
            await asyncio.sleep(0)  # SGLang joins unread chunks; chunks of two loads must not be joined
        await self._server.manager.continue_generation(io_struct.ContinueGenerationReqInput())
        self._paused = False

    def free(self, level: int) -> float:
        """Level 1 frees the KV cache, level 2 also the weights. No effect on CPU or without options.sleep."""
        before, self._freed = free_gpu(), MEMORY if level == 2 else MEMORY[1:]
        self._result_of(self._change_memory("release", self._freed))
        return (free_gpu() - before) / GIB

    def allocate(self, tags: Sequence[str]) -> float:
        before = free_gpu()
        self._result_of(self._change_memory("resume", [tag for tag in tags if tag in self._freed]))
        return (before - free_gpu()) / GIB

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


def _other_half(name: str) -> str:
    """Of a matrix that SGLang concatenates if both halves are in one call, and leaves out otherwise; empty: it is
    whole."""
    first, second = "q_a_proj.", "kv_a_proj_with_mqa."
    return name.replace(first, second) if first in name else name.replace(second, first) if second in name else ""


def _signed(key: int) -> int:
    """The same 64 bits as int64: torch barely supports uint64."""
    return key - 2**64 if key >= 2**63 else key


def _check(result: tuple[bool, str]) -> None:
    done, message = result
    if not done:
        raise RuntimeError(f"SGLang reported an error: {message}")
