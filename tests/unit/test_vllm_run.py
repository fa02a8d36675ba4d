"""Runs of decoding steps with a stand-in for vLLM's scheduler and model runner: what is scheduled, launched and read.

The stand-in makes token k of request r a function of r and k, so that every order of calls can be compared with one
step after another. On a GPU the same is compared with vLLM itself: bench/gpu_decode.py --only exact."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from gcore.content.tokens import Tokens
from gcore.generation import vllm_run
from gcore.generation.engine_shell import Job
from gcore.generation.vllm_core import takes_images
from gcore.generation.vllm_run import PLANNED_STEPS, DecodeRuns, RunLengths
from gcore.types import Request, SamplingParams

STOP, BLOCK = 7, 16
REPEATED = vllm_run.RepeatedStep.of  # the fixture below replaces it


def token(name: str, position: int) -> int:
    """Of request `name`, after `position` tokens. About one in 50 is a stop token."""
    return (int(name) * 31 + position * position * 7 + position) % 50


# ---- a stand-in for vLLM -----------------------------------------------------------------------------------------


@dataclass
class Scheduled:
    num_scheduled_tokens: dict[str, int]
    scheduled_cached_reqs: Any
    scheduled_new_reqs: list[str] = field(default_factory=list)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: Any = None
    new_block_ids_to_zero: Any = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass
class RunnerOutput:
    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]
    logprobs: Any


class Lists(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    cu_num_generated_tokens: Any = None


class OneRequest:
    """In the scheduler: its prompt has 3 tokens."""

    def __init__(self, job: Job) -> None:
        self.job, self.output, self.num_computed_tokens, self.cache = job, list[int](), 0, 0

    @property
    def num_tokens(self) -> int:
        return 3 + len(self.output)

    def append_output_token_ids(self, tokens: list[int]) -> None:
        self.output += tokens


class Scheduler:
    def __init__(self, runner: Runner, blocks: int, sizes: tuple[int, ...]) -> None:
        self.num_lookahead_tokens, self.max_model_len, self.calls = 0, 500, 0
        self.requests, self.running, self.waiting = dict[str, OneRequest](), list[OneRequest](), list[OneRequest]()
        self.finished, self.runner = set[str](), runner
        pool = SimpleNamespace(get_num_free_blocks=lambda: blocks)
        coordinator = SimpleNamespace(single_type_managers=[SimpleNamespace(block_size=size) for size in sizes])
        self.kv_cache_manager = SimpleNamespace(block_pool=pool, coordinator=coordinator)

    def add(self, job: Job) -> None:
        self.waiting.append(OneRequest(job))
        self.requests[job.name] = self.waiting[-1]

    def abort(self, name: str) -> None:
        self.running = [request for request in self.running if request.job.name != name]
        self.requests.pop(name)
        self.finished.add(name)

    def schedule(self) -> Scheduled:
        self.calls += 1
        new, self.waiting = self.waiting, []
        self.running += new
        sizes = {}
        for request in self.running:
            size = request.num_tokens - request.num_computed_tokens
            request.num_computed_tokens += size
            request.cache = request.num_computed_tokens + self.num_lookahead_tokens
            sizes[request.job.name] = size
        finished, self.finished = self.finished, set()
        names = [request.job.name for request in new]
        return Scheduled(sizes, SimpleNamespace(resumed_req_ids=set()), names, finished)

    def update_from_output(self, scheduled: Scheduled, output: RunnerOutput) -> dict[int, Any]:
        found = []
        for name in scheduled.num_scheduled_tokens:
            request, row = self.requests[name], output.req_id_to_index[name]
            kept, reason = list[int](), None
            for value in output.sampled_token_ids[row]:
                kept.append(value)
                request.output.append(value)
                ended = "stop" if value == STOP else "length"
                if value == STOP or len(request.output) == request.job.request.params.max_tokens:
                    reason = ended
                    break
            lists = output.logprobs
            start = row if lists.cu_num_generated_tokens is None else lists.cu_num_generated_tokens[row]
            own = Lists(None, lists.logprobs[start : start + len(kept)], None)
            found.append(SimpleNamespace(request_id=name, new_token_ids=kept, new_logprobs=own, finish_reason=reason))
            if reason:
                self.abort(name)
        return {0: SimpleNamespace(outputs=found)}


class Runner:
    """Keeps how many tokens of each request are computed, as vLLM's does on the GPU."""

    num_speculative_steps = 0

    def __init__(self) -> None:
        self.computed: dict[str, int] = {}
        self.names: list[str] = []
        self.req_states = SimpleNamespace(num_computed_tokens_np=np.zeros(64, np.int64))
        self.execute_model_state: Any = None
        self.requests: dict[str, OneRequest] = {}

    def execute_model(self, scheduled: Scheduled) -> None:
        for name in scheduled.finished_req_ids:
            self.computed.pop(name, None)
        for name in scheduled.scheduled_new_reqs:
            self.computed[name] = 0
        self.names = list(scheduled.num_scheduled_tokens)
        for name, size in scheduled.num_scheduled_tokens.items():
            self.computed[name] += size
            request = self.requests.get(name)
            if request is not None:  # not ended: its cache must hold what is computed
                assert self.computed[name] <= request.cache, f"{name}: {self.computed[name]} > {request.cache}"
        batch = SimpleNamespace(req_ids=self.names, idx_mapping_np=np.arange(len(self.names)))
        self.execute_model_state = SimpleNamespace(input_batch=batch)

    def sample_tokens(self, grammar: None) -> Any:
        tokens = [[token(name, self.computed[name] - 3)] for name in self.names]
        logprobs = np.array([[-0.01 * self.computed[name] - int(name)] for name in self.names], np.float32)
        index = {name: row for row, name in enumerate(self.names)}
        output = RunnerOutput(self.names, index, tokens, Lists(None, logprobs, None))
        return SimpleNamespace(get_output=lambda: output)


# ---- the engine around it ----------------------------------------------------------------------------------------


class Engine:
    """What VllmBackend does with the runs."""

    def __init__(self, max_run: int, blocks: int = 10_000, sizes: tuple[int, ...] = (BLOCK,)) -> None:
        self.runner = Runner()
        self.scheduler = Scheduler(self.runner, blocks, sizes)
        self.runner.requests = self.scheduler.requests
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=self.runner))
        core = SimpleNamespace(scheduler=self.scheduler, model_executor=SimpleNamespace(driver_worker=worker))
        core.vllm_config, core.batch_queue = SimpleNamespace(cache_config=SimpleNamespace()), None
        self.core, self.runs = core, DecodeRuns(core, max_run)
        self.jobs: dict[str, Job] = {}
        self.done: dict[str, tuple[Job, str]] = {}

    def add(self, name: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens, stop_tokens=(STOP,))
        job = Job(Request(Tokens(np.zeros(3, np.int32)), params, name), "", 0, None, name=str(name))  # type: ignore[arg-type]
        self.jobs[job.name] = job
        self.scheduler.add(job)

    def take(self, found: list[Any]) -> None:
        for name, tokens, logprobs, reason in found:
            job = self.jobs[name]
            job.tokens += tokens
            job.logprobs += logprobs
            if reason is not None:
                self.done[name] = (self.jobs.pop(name), reason)

    def step(self) -> None:
        self.take(self.runs.step(self.jobs))

    def finish(self) -> None:
        for _ in range(2000):
            if not self.jobs:
                return
            self.step()
        raise AssertionError(f"{len(self.jobs)} requests did not end")


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """Modules of vLLM that the runs import."""
    empty = SimpleNamespace(make_empty=lambda: SimpleNamespace(resumed_req_ids=set()))
    names = ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched", "vllm.v1.core.sched.output", "vllm.v1.outputs")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.v1.core.sched.output"].CachedRequestData = empty  # type: ignore[attr-defined]
    sys.modules["vllm.v1.outputs"].LogprobsLists = Lists  # type: ignore[attr-defined]
    sys.modules["vllm.v1.outputs"].ModelRunnerOutput = RunnerOutput  # type: ignore[attr-defined]
    monkeypatch.setattr(vllm_run.RepeatedStep, "of", classmethod(lambda *_: None))


def expected(name: int, max_tokens: int) -> list[int]:
    found = list[int]()
    while len(found) < max_tokens and STOP not in found:
        found.append(token(str(name), len(found)))
    return found


def check(engine: Engine, limits: dict[int, int]) -> None:
    for name, limit in limits.items():
        job, reason = engine.done[str(name)]
        assert job.tokens == expected(name, limit) and len(job.logprobs) == len(job.tokens)
        assert reason == ("stop" if job.tokens[-1] == STOP else "length")
        wanted = [-0.01 * (3 + k) - name for k in range(len(job.tokens))]
        np.testing.assert_allclose(job.logprobs, wanted, rtol=1e-5)
    assert not engine.scheduler.requests


# ---- tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_run", [2, 5, 8])
def test_runs_give_what_single_steps_give(max_run):
    """Requests end by a stop token or by their limit, at different times; others start while runs are in flight."""
    engine, limits = Engine(max_run), {name: 20 + 13 * name for name in range(12)}
    for name, limit in limits.items():
        if name < 8:
            engine.add(name, limit)
    for step in range(6):
        engine.step()
        if step >= 2:
            engine.add(6 + step, limits[6 + step])
    engine.finish()
    check(engine, limits)


def test_the_scheduler_is_called_rarely():
    engine = Engine(8)
    for name in (3, 12):  # neither has a stop token early
        engine.add(name, 400)
    engine.finish()
    tokens = max(len(job.tokens) for job, _ in engine.done.values())
    assert tokens > 100 and engine.scheduler.calls < tokens / 5


def test_a_run_in_flight_is_read_by_flush():
    """Before weights change: afterwards no token of the old weights is outstanding."""
    engine = Engine(4)
    engine.add(3, 300)
    while engine.runs._in_flight is None:
        engine.step()
    before = len(engine.jobs["3"].tokens)
    for found in engine.runs.flush(engine.jobs):
        engine.take(found)
    job = engine.jobs["3"]
    assert len(job.tokens) > before and job.tokens == expected(3, len(job.tokens))
    assert engine.runs._in_flight is None and not list(engine.runs.flush(engine.jobs))
    engine.finish()
    check(engine, {3: 300})


def test_an_aborted_request_is_dropped_from_runs_in_flight():
    engine = Engine(4)
    for name in (3, 12):
        engine.add(name, 300)
    while engine.runs._in_flight is None:
        engine.step()
    engine.jobs.pop("12")
    engine.scheduler.abort("12")
    engine.finish()
    check(engine, {3: 300})


def test_without_free_cache_every_step_is_scheduled():
    """A run never makes the scheduler preempt a request for the cache of later steps."""
    engine = Engine(8, blocks=1)
    for name in (3, 12):
        engine.add(name, 100)
    engine.finish()
    check(engine, {3: 100, 12: 100})
    assert engine.scheduler.calls == max(len(expected(name, 100)) for name in (3, 12))


def test_no_position_beyond_the_longest_that_the_model_has():
    engine = Engine(8)
    engine.scheduler.max_model_len = 3 + 40
    engine.add(3, 40)
    engine.finish()
    check(engine, {3: 40})


@pytest.mark.parametrize(
    ("sizes", "free", "planned"),
    [
        ((BLOCK,), 6, 40),
        ((BLOCK,), 5, 1),
        ((500, BLOCK), 5, 1),
        ((500, BLOCK), 6, 40),  # the first keeps one state per request, whatever its length
        ((BLOCK, BLOCK), 11, 1),
        ((BLOCK, BLOCK), 12, 40),
        ((500,), 0, 40),
    ],
)
def test_the_cache_of_each_kind_of_layers_is_counted(sizes, free, planned):
    """Two requests with 40 tokens each: 40 more need up to three blocks of 16."""
    engine = Engine(8, free, sizes)
    for name in (3, 12):
        engine.add(name, 300)
        engine.jobs[str(name)].tokens = [0] * 40
    engine.scheduler.schedule()
    assert engine.runs._schedule(engine.jobs)[1].plan == planned


def test_the_end_of_a_prompt_is_no_decoding_step():
    """A prompt that is prefilled in chunks may end with a chunk of one token."""
    engine = Engine(8)
    for name in (3, 12):
        engine.add(name, 300)
    engine.jobs["3"].tokens = [0] * 100
    engine.scheduler.schedule()
    assert engine.runs._schedule(engine.jobs)[1] == (1, 1)
    engine.jobs["12"].tokens = [0]
    assert engine.runs._schedule(engine.jobs)[1] == (50, 8)


def test_states_at_the_ends_of_blocks_are_left_to_vllm(caplog):
    engine = Engine(8)
    engine.core.vllm_config.cache_config.mamba_cache_mode = "align"
    assert DecodeRuns.of(engine.core, 8) is None and "mamba_cache_mode=align" in caplog.text


def job_with(tokens: int, limit: int = 10_000) -> Job:
    request = Request(Tokens(np.zeros(3, np.int32)), SamplingParams(limit), 0)
    return Job(request, "", 0, None, tokens=[0] * tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("have", "left", "positions", "step_s", "lengths"),
    [
        ([0, 0], 100, 100, 0.0, (1, 1)),  # nothing is known about the lengths
        ([16, 16], 100, 100, 0.0, (16, 4)),
        ([1000, 0], 10_000, 9000, 0.0, (PLANNED_STEPS, 8)),
        ([1000, 1000], 5, 9000, 0.0, (5, 5)),  # no request needs more
        ([1000, 1000], 5000, 3, 0.0, (3, 3)),
        ([1000, 1000], 5000, 9000, 0.01, (PLANNED_STEPS, 4)),  # aborts wait for two runs
        ([1000, 1000], 5000, 9000, 1.0, (PLANNED_STEPS, 1)),
    ],
)
def test_lengths(have, left, positions, step_s, lengths):
    jobs = [job_with(count, count + left) for count in have]
    assert RunLengths.of(jobs, 8, positions, step_s) == lengths


def test_a_repeated_step_sets_all_positions_before_the_graph_and_forbids_tokens_after_it(monkeypatch):
    calls = list[str]()

    def note(name: str, result: Any = None) -> Any:
        return lambda *args, **options: calls.append(name) or result

    logits, forbidden = torch.zeros(2, 5), torch.tensor([[0.0, 0, -1, 0, 0]])
    batch = SimpleNamespace(num_reqs=2, num_reqs_after_padding=2, num_tokens=2, num_tokens_after_padding=2)
    names = ("idx_mapping", "query_start_loc", "seq_lens", "cu_num_logits", "seq_lens_cpu_upper_bound", "positions")
    vars(batch).update({name: torch.zeros(2) for name in names})
    graph = SimpleNamespace(cg_mode=SimpleNamespace(name="FULL"))
    value = SimpleNamespace(gpu=None)
    runner = SimpleNamespace(
        device="cpu",
        lora_config=None,
        use_dcp=False,
        attn_groups=None,
        kv_cache_config=None,
        cudagraph_manager=SimpleNamespace(
            dispatch=lambda *_, **__: graph, run_fullgraph=note("graph", torch.zeros(2, 3))
        ),
        block_tables=SimpleNamespace(get_dummy_block_tables=note("tables"), compute_slot_mappings=note("slots")),
        req_states=SimpleNamespace(
            num_computed_tokens=value, last_sampled_tokens=None, prefill_len=value, draft_tokens=None
        ),
        input_buffers=SimpleNamespace(positions=None, seq_lens=None, input_ids=None),
        model_state=SimpleNamespace(prepare_inputs=note("axes"), prepare_attn=note("attention"), rope_state=object()),
        model=SimpleNamespace(compute_logits=note("logits", logits)),
        sampler=SimpleNamespace(
            truncates=lambda batch: False,
            allowed=lambda given: given + forbidden,
            sampling_states=SimpleNamespace(temperature=value, seeds=value),
        ),
        postprocess_sampled=note("postprocess"),
    )
    sampled: list[Any] = []
    kernels = ModuleType("vllm.v1.worker.gpu.input_batch")
    vars(kernels).update(prepare_pos_seq_lens=note("positions"), combine_sampled_and_draft_tokens=note("tokens"))
    own = ModuleType("gcore.generation.vllm_sampler")
    vars(own)["sample"] = lambda given, *rest: (
        sampled.append(given) or (torch.zeros(2, dtype=torch.long), torch.zeros(2))
    )
    for module in (kernels, own):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("vllm.v1.worker", "vllm.v1.worker.gpu"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    step = REPEATED(runner, batch)
    assert step is not None
    step._step()
    expected = ["tables", "positions", "tokens", "axes", "slots", "attention", "graph", "logits", "postprocess"]
    assert calls == expected and torch.equal(sampled[0], forbidden.expand(2, 5))
    runner.sampler.truncates = lambda batch: True
    assert REPEATED(runner, batch) is None


def test_a_model_with_towers_and_no_processor_is_one_of_text(tmp_path):
    model = SimpleNamespace(is_multimodal_model=True)
    assert not takes_images(model, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert takes_images(model, tmp_path) and not takes_images(SimpleNamespace(is_multimodal_model=False), tmp_path)
