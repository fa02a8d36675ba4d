"""vLLM as an engine: its core in this process, stepped by the engine's thread (engine_shell.py).

The core runs in this process, so new weights are written to its model directly. Outputs are read where they leave the
scheduler: no text, no objects per token.

Traps that this file handles (more in vllm_core.py):
- On CUDA several steps are computed at once (vllm_run.py), or, if the model is split over GPUs, one step is computed
  ahead. That step is finished before weights change or memory is freed, so every token is stamped with the version that
  computed it.
- Cached prefixes are valid only for the weights that computed them: each load uses a new cache salt, and requests
  without any token yet start again.
- Forward passes use process-wide state: engines in one process take turns (compute_lock).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gcore.config.engines import engines_taking
from gcore.content.tokens import tokens_of
from gcore.generation.engine_shell import DecodeBackend, Ended, Job, Step, SteppedEngine
from gcore.generation.noise import noise_key
from gcore.generation.request_check import check_request
from gcore.generation.sleep import GIB, SleepState, free_gpu
from gcore.generation.spec import EngineSpec, LibraryOptions
from gcore.generation.vllm_core import (
    is_cpu,
    keep_logprobs_untruncated,
    load_in_place,
    open_core,
    reload_packed,
    shut_core,
    skip_block_accounting,
    takes_images,
    with_images,
)
from gcore.generation.vllm_run import DecodeRuns, NewTokens, generated
from gcore.models.decoders import forbidden_tokens
from gcore.types import Finish, Floats, Request, UserError
from gcore.weights.receiver import FolderWeights, WeightReceiver

NEVER = -100.0  # the lowest logit bias of vLLM; a probability of at most e^-100 is lost
FINISH: dict[str, Finish] = {"stop": "stop", "length": "length"}
GATHER_STEPS, GATHER_SHARE = 16, 1 / 8  # fill free slots after this many steps, or when they are this share of all
_PROCESS_LOCK = threading.Lock()


def make_engine(spec: EngineSpec) -> SteppedEngine:
    tracer = spec.open_tracer()
    with tracer.span("start"):
        return SteppedEngine(VllmBackend(*LibraryOptions.of(spec)), tracer)


class VllmBackend(DecodeBackend):
    compute_lock: AbstractContextManager[Any] = _PROCESS_LOCK

    def __init__(self, folder: Path, options: LibraryOptions) -> None:
        self._folder, self.options = folder, options
        self.core: Any = None
        self._runs: DecodeRuns | None = None
        self._weights: FolderWeights  # set by `open`
        self._jobs: dict[str, Job] = {}  # by request id in the core
        self.jobs = self._jobs.values()
        self._num_added = self._num_loads = 0
        self._never: dict[int, float] = {}  # tokens that stand for features of images, as logit biases
        self._steps_without_admission = 0
        self._vocabulary, self._accepts_images, self._frees, self.can_truncate = 0, False, False, False
        self._loads_whole = False  # see reload_packed

    def open(self) -> tuple[WeightReceiver, SleepState]:
        options = self.options
        self.core = open_core(self._folder, options)
        core = self.core.engine_core.engine_core
        skip_block_accounting(core.scheduler)
        self._loads_whole = whole = is_cpu() or options.fp8
        config = self.core.model_config
        self.can_truncate = all(self.core.collective_rpc(keep_logprobs_untruncated))
        self._vocabulary = config.get_vocab_size()
        has_towers = bool(getattr(config, "is_multimodal_model", False))
        self._accepts_images = options.media and has_towers and takes_images(config, self._folder)
        self._never = dict.fromkeys(forbidden_tokens(config.hf_config) if has_towers else (), NEVER)
        self._runs = DecodeRuns.of(core, options.decode_steps, tuple(self._never))
        self._frees = options.sleep and not is_cpu()
        self._weights, device = FolderWeights(self._folder, config.hf_text_config), "cpu" if is_cpu() else "cuda"
        base = self._weights.base(options.adapters, device, config.dtype, whole)
        memory = SleepState(drops_weights=self._frees, adapters=options.adapters is not None)
        return WeightReceiver(self._weights.shapes, base, whole), memory

    def close(self) -> None:
        self._jobs.clear()
        core, self.core = self.core, None
        if core is not None:
            shut_core(core)

    # ---- requests -------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        accepts = ("image", "video") if self._accepts_images else ()  # videos have a message of their own
        check_request(request, self.options.max_length, self._vocabulary, accepts, "vLLM")
        media = tokens_of(request.content).media
        if tokens_of(request.content).step_media or any(medium.kind != "image" for medium in media):
            raise UserError(
                "an engine request has a video or an image after the prompt; vLLM gets only images of prompts here "
                f"(key: generation.engine={engines_taking('video')})"
            )
        if (request.params.top_k or request.params.top_p < 1) and not self.can_truncate:
            raise UserError(
                "the sampler of this vLLM version returns no logprobs of the untruncated policy; "
                "set generation.top_p to 1 and generation.top_k to 0"
            )

    def room(self, waiting: int) -> int:
        """At most as many as the core can run. The others stay in the queue, where aborts and new weights reach them.

        When all slots are taken, slots that become free are filled several at a time: a step that also prefills prompts
        takes as long as three steps that do not."""
        slots = self.options.max_concurrent
        free = slots - len(self._jobs)
        self._steps_without_admission += 1
        wait = self._steps_without_admission < GATHER_STEPS
        if waiting > free and free < GATHER_SHARE * slots and self._jobs and wait:
            return 0
        if num_new := min(free, waiting):
            self._steps_without_admission = 0
        return num_new

    def admit(self, jobs: Sequence[Job]) -> Sequence[Ended]:
        refused: list[Ended] = []
        for job in jobs:
            try:
                self._add(job)
            except ValueError as error:  # sampling parameters or images that vLLM rejects
                refused.append((job, UserError(f"vLLM rejected an engine request: {error}")))
                if job.content.media:  # vLLM's input cache assumes that the core has them
                    self.core.reset_mm_cache()
        return refused

    def _add(self, job: Job) -> None:
        from vllm import SamplingParams

        request, params = job.request, job.request.params
        seed = noise_key(request.noise_key, request.position) >> 1 if self.options.seeds else None
        sampling = SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or -1,
            seed=seed if params.temperature else None,
            stop_token_ids=list(params.stop_tokens),
            ignore_eos=True,
            logprobs=0,  # of the sampled token only
            logit_bias=self._never or None,
            detokenize=False,
        )
        job.name = self._submit(request, sampling)
        self._jobs[job.name] = job

    def _submit(self, request: Request, sampling: Any) -> str:
        """Returns its id in the core."""
        content, process = tokens_of(request.content), self.core.input_processor.process_inputs
        if content.media:
            process = partial(with_images, process, request, self.options.max_length)
        self._num_added += 1
        name, tasks = f"{self._num_added}", self.core.get_supported_tasks()
        prompt = {"prompt_token_ids": content.short_T.tolist(), "cache_salt": f"{self._num_loads}"}
        added = process(name, prompt, sampling, supported_tasks=tasks, priority=request.priority)
        self.core.engine_core.add_request(added)
        return name

    def step(self) -> Step:
        if self._runs is not None:
            return self._taken(self._runs.step(self._jobs))
        return self._taken(map(generated, self.core.engine_core.get_output().outputs))

    def _taken(self, generated: Iterable[NewTokens]) -> Step:
        num_tokens, ended = 0, list[Ended]()
        for name, tokens, logprobs, reason in generated:
            job = self._jobs.get(name)
            if job is None:  # aborted while this step was computed
                continue
            job.tokens += tokens
            job.logprobs += logprobs
            num_tokens += len(tokens)
            if reason is not None:
                del self._jobs[name]
                ended.append(
                    (job, FINISH.get(str(reason)) or RuntimeError(f"vLLM ended a request with finish reason {reason}"))
                )
        return Step(num_tokens, ended)

    def score(self, requests: Sequence[Request]) -> list[Floats]:
        """As logprobs of a prompt. vLLM always generates a token too, which is dropped. Steps of this core serve all of
        its requests, so an engine that scores has no others: teachers have none."""
        from vllm import SamplingParams

        if self._jobs:
            raise UserError("this engine of vLLM generates; expected an engine of its own for requests to score")
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True, detokenize=False)
        sizes = {self._submit(request, params): request.content.num_steps for request in requests}
        running, logprobs = set(sizes), dict[str, Floats]()
        while running:
            for output in self.core.engine_core.get_output().outputs:
                if output.new_prompt_logprobs_tensors is not None:  # of all tokens but the first
                    logprobs_T = output.new_prompt_logprobs_tensors.logprobs[:, 0].numpy()
                    logprobs[output.request_id] = logprobs_T[-sizes[output.request_id] :].copy()
                if output.finish_reason is not None:
                    running.discard(output.request_id)
        return [logprobs[name] for name in sizes]

    def flush_steps(self) -> Iterator[Step]:
        if self._runs is not None:
            yield from map(self._taken, self._runs.flush(self._jobs))
            return
        from vllm.v1.core.sched.interface import PauseState

        core = self.core.engine_core.engine_core
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while core.batch_queue:
                yield self.step()
        finally:
            core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def remove(self, jobs: Collection[Job]) -> None:
        self.core.engine_core.abort_requests([job.name for job in jobs])
        for job in jobs:
            del self._jobs[job.name]

    # ---- weights and memory ---------------------------------------------------------------------------------------

    def load(self, tensors: Mapping[str, torch.Tensor], version: int, last: bool) -> None:
        stored = self._weights.as_stored(tensors, last)
        self.core.collective_rpc(reload_packed if self._loads_whole else load_in_place, args=(list(stored.items()),))

    def finish_load(self) -> Collection[Job]:
        self._num_loads += 1
        if self._accepts_images:  # cached image embeddings were computed by the old weights
            self.core.engine_core.reset_encoder_cache()
        restarted = [job for job in self._jobs.values() if not job.tokens]  # the old weights prefilled their prompts
        self.remove(restarted)
        return restarted

    def free(self, level: int) -> float:
        """Level 1 copies the weights to host memory, level 2 drops them. No effect on CPU or without options.sleep."""
        before = free_gpu()
        if self._frees:
            self.core.sleep(level)  # drops the cached prefixes too
        return (free_gpu() - before) / GIB

    def allocate(self, tags: Sequence[str]) -> float:
        before = free_gpu()
        if self._frees:
            self.core.wake_up(list(tags))
        return (before - free_gpu()) / GIB
