"""Several decoding steps of vLLM in a row, with one call of its scheduler.

    schedule, with KV cache for up to 64 steps ──> launch run 1 ──> launch run 2 ──> launch run 3 ...
                                                                      read run 1       read run 2 ...

A GPU computes a decoding step of a small model in 2 to 4 ms. vLLM's Python needs longer: about 20 microseconds per
sequence and step. Between two steps in which no request starts it has nothing to decide, and its second model runner
keeps the state of requests on the GPU: a sampled token is the input of the next step without a copy to the host. So
the steps of a run are launched one after another, and while the next run is computed, the host reads the tokens of the
last one.

A request that ends within a run is cut there. Its row is computed until the scheduler is called again; the tokens are
dropped. They are written behind the end of the request, to blocks that are given to other requests by the scheduler
only, whose steps come later on the same stream. Runs are short while responses are, so that little is wasted
(`RunLengths`).

Written against the sources of vLLM 0.24 and 0.32.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from gcore.generation.engine_shell import Job

log = logging.getLogger(__name__)
PLANNED_STEPS = 64  # at most this many between two calls of the scheduler
MAX_RUN_S = 0.04  # aborts and new weights wait for at most two runs
SHARE_OF_LENGTH = 4  # a run has at most a quarter of the tokens that requests have on average
SHARE_ENDED = 8  # the scheduler is called again when an eighth of the requests has ended


class NewTokens(NamedTuple):
    """New tokens of a request."""

    name: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: Any  # None: not finished


class RunLengths(NamedTuple):
    """Steps until the next call of the scheduler, and steps per run. When a request ends is unknown; those that have
    many tokens are expected to get many more."""

    plan: int
    run: int

    @classmethod
    def of(cls, jobs: Collection[Job], max_run: int, positions_left: int, step_s: float) -> RunLengths:
        have = sum(len(job.tokens) for job in jobs) // len(jobs)
        needed = max(job.request.params.max_tokens - len(job.tokens) for job in jobs)
        plan = max(1, min(PLANNED_STEPS, have, needed, positions_left))
        in_time = int(MAX_RUN_S / step_s) if step_s else max_run
        return cls(plan, max(1, min(max_run, have // SHARE_OF_LENGTH, in_time, plan)))


class LaunchedRun(NamedTuple):
    """Launched steps."""

    outputs: list[Any]  # one per step that vLLM prepared
    repeated: Copied | None  # the steps after these
    counted: int  # of these steps, how many the scheduler counts already
    started: float

    def read(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Tokens and logprobs. Waits until they are computed."""
        tokens, logprobs = list[Any](), list[Any]()
        for output in (each.get_output() for each in self.outputs):
            tokens.append(np.array(output.sampled_token_ids, np.int64))
            logprobs.append(output.logprobs.logprobs[:, :1])
        if self.repeated is not None:
            self.repeated.ready.synchronize()
            tokens.append(self.repeated.tokens_SR.numpy().T)
            logprobs.append(self.repeated.logprobs_SR.numpy().T)
        return np.concatenate(tokens, 1), np.concatenate(logprobs, 1)


@dataclass(slots=True)
class DecodePlan:
    """The requests of the last call of the scheduler. Their KV cache suffices for `left` more steps."""

    scheduled: Any
    again: Any  # as `scheduled`, without what the model runner has done already
    names: list[str]  # of the requests, in the order of their rows in the outputs
    rows: np.ndarray[Any, Any]  # of the requests in the model runner
    repeated: RepeatedStep | None
    run: int
    left: int
    ended: int = 0


class DecodeRuns:
    """Steps of vLLM's core in this process."""

    def __init__(self, core: Any, max_run: int) -> None:
        self._scheduler = core.scheduler
        self._runner = core.model_executor.driver_worker.worker.model_runner
        kinds = self._scheduler.kv_cache_manager.coordinator.single_type_managers  # of layers, with blocks of their own
        sizes = [int(kind.block_size) for kind in kinds]
        self._block_sizes = [size for size in sizes if size < self._scheduler.max_model_len]  # others: one per request
        self._max_run = max_run
        self._step_s = self._last_read = 0.0  # measured
        self._plan: DecodePlan | None = None
        self._in_flight: LaunchedRun | None = None

    @classmethod
    def of(cls, core: Any, max_run: int, forbidden: Sequence[int] = ()) -> DecodeRuns | None:
        """None if the core is in other processes, has another model runner, or computes steps ahead by itself; or if it
        keeps states of layers at the ends of blocks, which vLLM copies from block to block before each step.
        `forbidden`: tokens that are never sampled."""
        worker = getattr(getattr(core.model_executor, "driver_worker", None), "worker", None)
        runner: Any = getattr(worker, "model_runner", None)
        if max_run < 2 or core.batch_queue is not None or not hasattr(runner, "req_states"):
            return None
        if (mode := getattr(core.vllm_config.cache_config, "mamba_cache_mode", "none")) != "none":
            log.warning("mamba_cache_mode=%s: vLLM's scheduler is called for every step", mode)
            return None
        try:
            runs, known = cls(core, max_run), hasattr(core.scheduler, "num_lookahead_tokens")
            known = known and hasattr(runner.req_states, "num_computed_tokens_np") and not runner.num_speculative_steps
        except (AttributeError, IndexError):
            known = False
        if not known:
            log.warning("unknown version of vLLM: its scheduler is called for every step")
            return None
        from gcore.generation.vllm_sampler import OnePassSampler

        runs._runner.sampler = OnePassSampler(runs._runner.sampler, forbidden)
        return runs

    def step(self, jobs: Mapping[str, Job]) -> list[NewTokens]:
        """One step if requests start; otherwise the oldest run, while the next one is computed."""
        if self._in_flight is None:
            scheduled, lengths = self._schedule(jobs)
            if lengths.plan == 1 or not _only_decodes(scheduled):
                return self._single(scheduled)
            self._plan = self._planned(scheduled, lengths)
            self._in_flight = self._launch(self._plan, first=True)
        plan, run, self._in_flight = self._plan, self._in_flight, None
        assert plan is not None
        if plan.left and not self._scheduler.waiting and plan.ended * SHARE_ENDED < len(plan.rows):
            self._in_flight = self._launch(plan)
        return self._read(plan, run, jobs)

    def flush(self, jobs: Mapping[str, Job]) -> Iterator[list[NewTokens]]:
        """Read what is in flight."""
        if self._in_flight is not None and self._plan is not None:
            run, self._in_flight = self._in_flight, None
            yield self._read(self._plan, run, jobs)

    def _schedule(self, jobs: Mapping[str, Job]) -> tuple[Any, RunLengths]:
        scheduler, lengths = self._scheduler, RunLengths(1, 1)
        running = scheduler.running
        if len(running) == len(jobs) and all(job.tokens for job in jobs.values()):  # none has a prompt to prefill
            positions_left = scheduler.max_model_len - max(request.num_tokens for request in running)
            lengths = RunLengths.of(jobs.values(), self._max_run, positions_left, self._step_s)
            blocks = len(running) * sum(1 + lengths.plan // size for size in self._block_sizes)
            if scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < blocks:
                lengths = RunLengths(1, 1)  # no request is preempted for the cache of later steps
        scheduler.num_lookahead_tokens = lengths.plan - 1
        try:
            return scheduler.schedule(), lengths
        finally:
            scheduler.num_lookahead_tokens = 0

    def _single(self, scheduled: Any) -> list[NewTokens]:
        output = self._runner.execute_model(scheduled)
        if output is None:
            output = self._runner.sample_tokens(None)
        if hasattr(output, "get_output"):
            output = output.get_output()
        return _outputs(self._scheduler.update_from_output(scheduled, output))

    def _planned(self, scheduled: Any, lengths: RunLengths) -> DecodePlan:
        from vllm.v1.core.sched.output import CachedRequestData

        self._runner.execute_model(scheduled)  # of the first step; `_launch` samples
        again = replace(
            scheduled,
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            finished_req_ids=set(),
            preempted_req_ids=None,
            new_block_ids_to_zero=None,
        )
        batch = self._runner.execute_model_state.input_batch
        repeated = RepeatedStep.of(self._runner, batch)
        return DecodePlan(scheduled, again, batch.req_ids, batch.idx_mapping_np, repeated, lengths.run, lengths.plan)

    def _launch(self, plan: DecodePlan, first: bool = False) -> LaunchedRun:
        runner, outputs, started = self._runner, list[Any](), time.perf_counter()
        steps = min(plan.run, plan.left)
        plan.left -= steps
        if first:
            outputs.append(runner.sample_tokens(None))
        if plan.repeated is not None:
            return LaunchedRun(outputs, plan.repeated.launch(steps - len(outputs)), int(first), started)
        while len(outputs) < steps:
            runner.req_states.num_computed_tokens_np[plan.rows] += 1  # the host's copy; the GPU counts for itself
            runner.execute_model(plan.again)
            outputs.append(runner.sample_tokens(None))
        return LaunchedRun(outputs, None, int(first), started)

    def _read(self, plan: DecodePlan, run: LaunchedRun, jobs: Mapping[str, Job]) -> list[NewTokens]:
        tokens_RS, logprobs_RS = run.read()
        steps, requests = tokens_RS.shape[1], self._scheduler.requests
        now = time.perf_counter()
        self._step_s, self._last_read = (now - max(run.started, self._last_read)) / steps, now
        ending = _may_end([jobs.get(name) for name in plan.names], tokens_RS)
        new_tokens, ends = list[NewTokens](), list[str]()
        for name, tokens, logprobs, may_end in zip(
            plan.names, tokens_RS.tolist(), logprobs_RS.tolist(), ending, strict=True
        ):
            request = requests.get(name)
            if request is None or name not in jobs:  # ended in an earlier run, or aborted
                continue
            request.num_computed_tokens += steps - run.counted
            if may_end:
                ends.append(name)
            else:
                request.append_output_token_ids(tokens)
                new_tokens.append(NewTokens(name, tokens, logprobs, None))
        if ends:
            some = replace(plan.scheduled, num_scheduled_tokens=dict.fromkeys(ends, 1))
            new_tokens += _outputs(self._scheduler.update_from_output(some, _whole(plan.names, tokens_RS, logprobs_RS)))
        plan.ended = sum(name not in requests for name in plan.names)
        return new_tokens


def _only_decodes(scheduled: Any) -> bool:
    sizes = scheduled.num_scheduled_tokens
    starts = scheduled.scheduled_new_reqs or scheduled.scheduled_cached_reqs.resumed_req_ids
    return bool(sizes) and not starts and scheduled.total_num_scheduled_tokens == len(sizes)


def _may_end(jobs: list[Job | None], tokens_RS: np.ndarray[Any, Any]) -> list[bool]:
    """Of which requests vLLM must look at every token: they reach their limit, or have a stop token of any request."""
    steps = tokens_RS.shape[1]
    stops = {token for job in jobs if job for token in job.request.params.stop_tokens}
    stopped = np.isin(tokens_RS, list(stops)).any(1)
    limits = [job.request.params.max_tokens - len(job.tokens) if job else 0 for job in jobs]
    may_end: list[bool] = (stopped | (np.array(limits) <= steps)).tolist()
    return may_end


def _whole(names: list[str], tokens_RS: np.ndarray[Any, Any], logprobs_RS: np.ndarray[Any, Any]) -> Any:
    """As vLLM returns several tokens per request."""
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    rows, steps = tokens_RS.shape
    ranks = np.zeros(rows * steps, np.int64)  # not computed: nothing reads them
    starts = list(range(0, rows * steps + 1, steps))
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: row for row, name in enumerate(names)},
        sampled_token_ids=tokens_RS.tolist(),
        logprobs=LogprobsLists(tokens_RS.reshape(-1, 1), logprobs_RS.reshape(-1, 1), ranks, starts),
    )


def _outputs(groups: Mapping[int, Any]) -> list[NewTokens]:
    return [generated(output) for group in groups.values() for output in group.outputs]


def generated(output: Any) -> NewTokens:
    """Of one of the core's outputs."""
    tokens, logprobs = output.new_token_ids, list[float]()
    if len(tokens) == 1:  # slices of arrays would be most of the work
        logprobs = [output.new_logprobs.logprobs.item(0)]
    elif tokens:
        logprobs = output.new_logprobs.logprobs[: len(tokens), 0].tolist()
    return NewTokens(output.request_id, tokens, logprobs, output.finish_reason)


# ---- a step of the same requests as the last one, launched without vLLM's preparation of a batch


class Copied(NamedTuple):
    """On their way to the host."""

    tokens_SR: torch.Tensor
    logprobs_SR: torch.Tensor
    ready: torch.cuda.Event


class RepeatedStep:
    """vLLM's second model runner prepares a step in 1 to 1.5 ms of Python: with few sequences longer than the GPU
    computes it. If the requests are those of the last step, all that changes is on the GPU: positions, the last tokens,
    where keys and values go. The kernels that update them are called here, then the CUDA graph of the model, then the
    sampler. Tokens and logprobs of several steps are copied to the host together."""

    def __init__(self, runner: Any, batch: Any, graph: Any) -> None:
        from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens, prepare_pos_seq_lens

        from gcore.generation.vllm_sampler import sample

        self._runner, self._batch, self._graph, self._sample = runner, batch, graph, sample
        self._set_positions, self._set_tokens = prepare_pos_seq_lens, combine_sampled_and_draft_tokens
        self._block_tables = runner.block_tables.get_dummy_block_tables(batch.num_reqs_after_padding)  # persistent
        self._one = torch.ones(batch.num_reqs, dtype=torch.int32, device=runner.device)
        self._none = torch.zeros_like(self._one)

    @classmethod
    def of(cls, runner: Any, batch: Any) -> RepeatedStep | None:
        """For the batch of the last step. None: there is no CUDA graph of the whole model for it, or it needs more than
        this file does."""
        graph = runner.cudagraph_manager.dispatch(batch.num_reqs, batch.num_tokens, 1, num_active_loras=0)
        more = runner.lora_config or runner.use_dcp or runner.sampler.truncates(batch)
        if graph.cg_mode.name != "FULL" or more:
            return None
        return cls(runner, batch, graph)

    @torch.inference_mode()
    def launch(self, steps: int) -> Copied | None:
        if not steps:
            return None
        tokens, logprobs = zip(*(self._step() for _ in range(steps)), strict=True)
        tokens_SR, logprobs_SR = (torch.stack(part).to("cpu", non_blocking=True) for part in (tokens, logprobs))
        ready = torch.cuda.Event()
        ready.record()
        return Copied(tokens_SR, logprobs_SR, ready)

    def _step(self) -> tuple[torch.Tensor, torch.Tensor]:
        runner, batch = self._runner, self._batch
        states, buffers, size = runner.req_states, runner.input_buffers, batch.num_reqs
        computed = states.num_computed_tokens.gpu
        self._set_positions(batch.idx_mapping, batch.query_start_loc, computed, buffers.positions, buffers.seq_lens)
        self._set_tokens(
            buffers.input_ids,
            batch.idx_mapping,
            states.last_sampled_tokens,
            batch.query_start_loc,
            batch.seq_lens,
            states.prefill_len.gpu,
            states.draft_tokens,
            batch.cu_num_logits,
            size,
        )
        runner.model_state.prepare_inputs(batch, states)  # positions with several axes
        slots = runner.block_tables.compute_slot_mappings(
            batch.idx_mapping, batch.query_start_loc, batch.positions, num_tokens_padded=batch.num_tokens_after_padding
        )
        batch.seq_lens_cpu_upper_bound.add_(1)
        runner.model_state.prepare_attn(
            batch, self._graph.cg_mode, self._block_tables, slots, runner.attn_groups, runner.kv_cache_config
        )
        hidden = runner.cudagraph_manager.run_fullgraph(self._graph)
        logits = runner.sampler.allowed(runner.model.compute_logits(hidden[:size]))
        sampling = runner.sampler.sampling_states
        tokens, logprobs = self._sample(
            logits, batch.idx_mapping, sampling.temperature.gpu, sampling.seeds.gpu, batch.positions[:size]
        )
        runner.postprocess_sampled(batch.idx_mapping, tokens.view(-1, 1), self._one, self._none, batch.query_start_loc)
        return tokens, logprobs
