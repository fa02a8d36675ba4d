"""Three control planes behind one interface, for bench/controllers.py.

    Program.step(number, mode) ──> Report         one controller process; every controller of a plane runs the same one

    classic    one controller. Stages with barriers over the whole batch: all responses, all rewards, then logprobs and
               update. The batch is one padded array per column; every call of a rank carries its rows.
    metadata   one controller with the product's loop. Engines leave payloads in the object store of Ray; the controller
               passes references on, and rewards and ranks read them.
    parallel   N controllers with the product's loop: each has the payloads of its share of the prompts.

`metadata` and `parallel` run the product's Collector, SampleContext, EnginePool, Dispatcher and TreeGroup. `classic`
shares its prompts, contexts, pools, rewards, layout and advantages.
"""

from __future__ import annotations

import asyncio
import cProfile
import ctypes
import dataclasses
import gc
import os
import pstats
import random
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.control_roles import (
    ALPHABET,
    FIRST_TOKEN,
    Meter,
    MeteredGroup,
    MeteredHandle,
    Pictured,
    Piece,
    Remote,
    Workload,
    make_decoder,
    rule,
)
from gcore.clients import EngineClient, TrainerClient
from gcore.config.tree import Config
from gcore.content.tokens import NO_TOKENS, Tokens
from gcore.controller.collect import Collector, no_filter, spread
from gcore.controller.dispatch import Dispatcher
from gcore.cost.workload import CostModel
from gcore.generation.noise import noise_key
from gcore.generation.pool import EnginePool
from gcore.generation.routing import Router, limits_of, own_replicas
from gcore.launch.user_code import make_advantage_settings
from gcore.preparation.advantages import advantages_of, with_advantages
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import make_samples, meta_of
from gcore.protocols import Handle, Rendezvous
from gcore.types import Prompt, Request, Rollout, SamplingParams, Scored
from gcore.workflows.context import SampleContext, SharedContext

Kind = Literal["classic", "metadata", "parallel"]
# bytes are counted; memory and latencies are sampled; Python functions are counted; nothing of these
Mode = Literal["count", "observe", "profile", "plain"]
PROBE_S, MEMORY_S = 0.01, 0.002  # intervals in `observe`
KILLED = 137  # exit code of a process that a memory limit has killed


@dataclass(frozen=True, slots=True)
class Plane:
    """Plane("parallel", controllers=4)"""

    kind: Kind
    controllers: int = 1
    spill: bool = True  # a controller may use engines of others when its own are full
    media: bool = True  # images as files of content/media.py; else inline. For `parallel`

    @property
    def name(self) -> str:
        inline = "" if self.media else ", inline"
        return f"parallel N={self.controllers}{inline}" if self.kind == "parallel" else self.kind


@dataclass(slots=True)
class Report:
    """One controller in one step."""

    samples: int = 0  # that this controller made and that were trained on
    cpu_s: float = 0.0
    wall_s: float = 0.0
    calls: int = 0
    collectives: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    by_method: dict[str, list[int]] = field(default_factory=dict)
    private_mb: float = 0.0  # growth of private memory to its peak
    resident_mb: float = 0.0  # the same with pages of the object store that were read
    base_mb: float = 0.0  # private memory before the step
    probes_ms: list[float] = field(default_factory=list)
    last_sample: float = 0.0  # time.monotonic(): the last group was scored
    functions: int = 0  # Python functions that were called: does not depend on the load of the machine
    payload_bytes: int = 0  # tokens, logprobs, versions, mask and images of the own samples; 0: not known here


def make_config(workload: Workload) -> Config:
    dynamic = {"filter": "spread", "max_oversampling": 2.0} if workload.rejected else {}
    tree = {
        "model": {"build": {"alphabet": ALPHABET, "max_length": 64 + 4 * workload.most_tokens}},
        "data": {"train": {"task": "arithmetic", "args": {"max": 99, "eval_size": 0}}, "max_prompt_length": 64},
        "algorithm": {"adv_estimator": "grpo"},
        "generation": {"max_response_length": 4 * workload.most_tokens},
        "rewards": {"functions": [{"name": "rule", "path": "gcore.rewarding.rules:exact"}]},
        "training": {"max_tokens_per_gpu": 8 * workload.most_tokens},
        "runtime": "local",
        "sampling": {"samples_per_prompt": workload.siblings, "prompts_per_step": workload.prompts, **dynamic},
    }
    return Config.model_validate(tree)


# ---- the parts that a controller gives to the product's code ---------------------------------------------------------


class LabModality:
    """Implements content.base.Modality for the contents of bench/control_roles.py."""

    def __init__(self, workload: Workload, stop_tokens: tuple[int, ...], decode: bool = True) -> None:
        self._params = SamplingParams(workload.most_tokens, stop_tokens=stop_tokens)
        self._feedback = np.full(workload.feedback, FIRST_TOKEN, np.int32)
        self._decoder = make_decoder() if decode else None

    def params(self, given: Any, *, greedy: bool) -> SamplingParams:
        return self._params.override(given, "ctx.generate")

    def next_params(self, given: Any, *, greedy: bool, temperature: float, num_steps: int) -> SamplingParams:
        return self._params.override(given, "ctx.proceed")

    def between_turns(self, content: Any, feedback: Any) -> Any:
        tokens = Tokens.steps(self._feedback)
        match content:
            case Remote():
                return Remote(Tokens(NO_TOKENS), (Piece(tokens.num_steps, tokens.digest(), inline=tokens),))
            case Pictured():
                return Pictured(tokens)
            case _:
                return tokens

    def hidden_steps(self, content: Any, output: Any) -> list[tuple[int, str]]:
        return []

    async def outputs(self, contents: Sequence[Any]) -> list[str]:
        if self._decoder is None or isinstance(contents[0], Remote):
            return [""] * len(contents)
        tokens = [c.tokens if isinstance(c, Pictured) else c for c in contents]
        return await self._decoder.texts([t.tokens_S for t in tokens])


class LabSource:
    """The product's PromptSource, with the content that the plane uses."""

    def __init__(self, source: Any, kind: Kind, workload: Workload) -> None:
        self._source, self._kind, self._images = source, kind, workload.images

    def at(self, number: int) -> Prompt:
        prompt = self._source.at(number)
        if self._kind == "metadata":
            return dataclasses.replace(prompt, content=Remote(prompt.content))
        return dataclasses.replace(prompt, content=Pictured(prompt.content)) if self._images else prompt


class LabRewarder:
    """Implements protocols.Rewarder: a rule, or the mean of several judges. A fraction of prompts has no spread."""

    def __init__(self, workload: Workload, judges: Sequence[EnginePool], hosts: Sequence[Handle], meter: Meter) -> None:
        self.pools, self._workload, self._hosts, self._meter = judges, workload, hosts, meter
        self._verdict = SamplingParams(workload.verdict)

    async def reward(self, group: Sequence[Rollout]) -> list[Scored]:
        if self.pools:
            asked = [self._judge(j, rollout) for rollout in group for j in range(len(self.pools))]
            verdicts = np.array(await asyncio.gather(*asked)).reshape(len(group), len(self.pools))
            scores = verdicts.mean(axis=1).tolist()
        elif isinstance(group[0].content, Remote):
            scores = await self._score_remote(group)
        else:
            scores = [rule(rollout.text) for rollout in group]
        prompt = group[0].prompt.id
        if noise_key("no spread", prompt) < self._workload.rejected * 2**64:
            scores = [1.0] * len(group)
        return [Scored(rollout, score) for rollout, score in zip(group, scores, strict=True)]

    async def _judge(self, judge: int, rollout: Rollout) -> float:
        """The judge reads the whole conversation."""
        content, key = rollout.content, noise_key("judge", judge, rollout.prompt.id, rollout.sibling)
        if isinstance(content, Tokens):
            content = Tokens(content.tokens_T)
        request = Request(content, self._verdict, key)
        completion = (await self.pools[judge].generate([request], priority=rollout.prompt.id))[0]
        return completion.content.digest()[0] / 255

    async def _score_remote(self, group: Sequence[Rollout]) -> list[float]:
        contents = [rollout.content for rollout in group]
        self._meter.sent(contents, "score")
        scores: list[float] = await random.choice(self._hosts).call("score", contents)
        self._meter.received(scores, "score")
        return scores


# ---- a controller ----------------------------------------------------------------------------------------------------


class Program:
    """One controller. `hosts`: handles of the hosts and the names of their roles.
    `virtual`: time of the emulated engines only, without threads."""

    def __init__(
        self,
        plane: Plane,
        workload: Workload,
        hosts: Sequence[tuple[Handle, Sequence[str]]],
        virtual: bool,
        rendezvous: Rendezvous,
    ) -> None:
        from gcore.launch.build_controller import build_group
        from gcore.prompts.rows import load_rows
        from gcore.prompts.source import PromptSource, Templater
        from gcore.prompts.tokenizer import load_tokenizer, stop_tokens

        self.plane, self.workload, self.config, self.meter = plane, workload, make_config(workload), Meter()
        self._hosts = [handle for handle, _ in hosts]
        found = {name: MeteredHandle(name, host, self.meter) for host, names in hosts for name in names}
        rank, size = rendezvous.rank, rendezvous.size
        engines = [EngineClient(handle) for handle in of_kind(found, "engine-")]
        judges = [
            [EngineClient(handle) for handle in of_kind(found, f"judge-{judge}-")] for judge in range(workload.judges)
        ]
        self.trainers = [TrainerClient(handle) for handle in of_kind(found, "rank-")]
        self.group = MeteredGroup(build_group(rendezvous), self.meter)
        pool = self._pool(engines, rank, size)
        tokenizer = load_tokenizer(self.config.model)
        rows = load_rows(self.config.data.train)
        source = PromptSource(rows, range(len(rows)), Templater(tokenizer, self.config.data), self.config.run.seed)
        self.source = cast(Any, LabSource(source, plane.kind, workload))
        stops = stop_tokens(self.config.model, tokenizer)
        judge_pools = [self._pool(clients, rank, size) for clients in judges]
        # The source and the rewarder have what is called here, not all of what the product's have.
        self.rewarder = cast(Any, LabRewarder(workload, judge_pools, self._hosts, self.meter))
        self.shared = SharedContext(self.config, pool, self.rewarder, LabModality(workload, stops, not virtual))
        self.dispatcher = Dispatcher(self.config, self.group, self.trainers)
        pool.cost_of = self.dispatcher.cost.of
        keep = spread if workload.rejected else no_filter
        self.collector = Collector(
            self._workflow,
            self.shared,
            self.group,
            self.config.sampling,
            keep,
            lambda _: None,
            self.source,
            lambda: 0,
        )
        self.collector.rate = 1.0 - workload.rejected  # the value after some steps
        self._keep, self._cursor, self._last_sample = keep, 0, 0.0
        self._own_bytes, self._own_process = 0, rendezvous.address is not None

    def _pool(self, engines: Sequence[EngineClient], rank: int, size: int) -> EnginePool:
        own, slots = own_replicas(rank, size, len(engines)), self.workload.slots
        if not self.plane.spill and own is not None:
            limit, _ = limits_of(slots, self.workload.siblings)
            return EnginePool([engines[i] for i in sorted(own)], Router(len(own), limit=limit))
        return EnginePool.for_controller(engines, rank, size, slots, per_call=self.workload.siblings)

    async def step(self, number: int, mode: Mode) -> Report:
        """One training step; all controllers are called at the same time."""
        if self._own_process:
            gc.collect()
            trim_memory()
        meter, watch = self.meter, Observer(self._hosts)
        meter.counting = mode == "count"
        meter.calls = meter.collectives = meter.bytes_in = meter.bytes_out = 0
        meter.by_method = {}
        base = memory_bytes()
        observing = mode == "observe"
        if observing:
            watch.start()
        clock = asyncio.get_running_loop().time  # virtual in a VirtualLoop
        cpu, wall, profile = time.process_time(), clock(), cProfile.Profile()
        if mode == "profile":
            profile.enable()
        samples = await (self._classic(number) if self.plane.kind == "classic" else self._product(number))
        profile.disable()
        cpu, wall = time.process_time() - cpu, clock() - wall
        if observing:
            await watch.stop()
        return Report(
            samples,
            cpu,
            wall,
            meter.calls,
            meter.collectives,
            meter.bytes_in,
            meter.bytes_out,
            meter.by_method,
            private_mb=max(0, watch.private - base[0]) / 2**20,
            resident_mb=max(0, watch.resident - base[1]) / 2**20,
            base_mb=base[0] / 2**20,
            probes_ms=watch.probes_ms,
            last_sample=self._last_sample,
            functions=pstats.Stats(profile).total_calls if mode == "profile" else 0,  # type: ignore[attr-defined]
            payload_bytes=self._own_bytes,
        )

    async def _workflow(self, ctx: Any, prompt: Prompt) -> list[Scored]:
        group = await ctx.generate(prompt, max_tokens=self.workload.max_tokens(prompt.id))
        if self.workload.feedback:
            await ctx.reward(group)
            group = list(await asyncio.gather(*(ctx.proceed(rollout, "feedback") for rollout in group)))
        scored = await ctx.reward(group)
        self._last_sample = time.monotonic()
        return scored

    # ---- metadata and parallel: the product's loop ---------------------------------------------------------------

    async def _product(self, number: int) -> int:
        """The calls of controller/loop.py, without weights and record."""
        algorithm = self.config.algorithm
        collected = await self.collector.step(number)
        assert collected.cause is None, collected.cause
        samples = make_samples(collected.groups, algorithm, 0)
        self._own_bytes = sum(
            s.content.nbytes + s.rollout_logprobs_S.nbytes + s.mask_S.nbytes + 4 * s.num_steps for s in samples
        )
        _, batches = await self.dispatcher.dispatch_samples(number, samples)
        kl = await self.dispatcher.compute_logprobs(batches) if self.config.needs_passes else []
        batches, _ = await with_advantages(
            batches, collected.groups, make_advantage_settings(self.config), self.group, kl
        )
        await self.dispatcher.update(batches)
        return len(samples)

    # ---- classic ---------------------------------------------------------------------------------------------------

    async def _classic(self, number: int) -> int:
        """Every stage for the whole batch, then the next one."""
        groups: list[list[Scored]] = []
        target = self.workload.prompts
        while len(groups) < target:
            wave = [self.source.at(self._cursor + i) for i in range(target)]
            contexts = [SampleContext(self.shared) for _ in wave]
            rollouts = await asyncio.gather(*(ctx.generate(p) for ctx, p in zip(contexts, wave, strict=True)))
            if self.workload.feedback:
                await asyncio.gather(*(self.rewarder.reward(group) for group in rollouts))
                again = [ctx.proceed(r, "feedback") for ctx, g in zip(contexts, rollouts, strict=True) for r in g]
                flat = await asyncio.gather(*again)
                size = self.workload.siblings
                rollouts = [list(flat[i : i + size]) for i in range(0, len(flat), size)]
            scored = await asyncio.gather(*(self.rewarder.reward(group) for group in rollouts))
            for prompt, group in zip(wave, scored, strict=True):
                if len(groups) < target:
                    self._cursor = prompt.id + 1
                    if self._keep(group)[0]:
                        groups.append(group)
            del rollouts, scored
        self._last_sample = time.monotonic()
        return await self._train_columns(number, groups)

    async def _train_columns(self, number: int, groups: list[list[Scored]]) -> int:
        algorithm = self.config.algorithm
        advantages, _ = advantages_of(groups, make_advantage_settings(self.config), {})
        samples = make_samples(groups, algorithm, 0)
        batches = make_layout(
            [meta_of(s) for s in samples],
            step=number,
            num_ranks=len(self.trainers),
            mini_batches=algorithm.mini_batches,
            max_tokens=self.config.training.max_tokens_per_gpu,
            cost=CostModel(crossover=768.0),
        )
        groups.clear()
        columns, row_of = make_columns(samples), {sample.key: i for i, sample in enumerate(samples)}
        count = len(samples)
        self._own_bytes = sum(
            s.content.nbytes + s.rollout_logprobs_S.nbytes + s.mask_S.nbytes + 4 * s.num_steps for s in samples
        )
        del samples
        used = [(rank, batch) for rank, batch in enumerate(batches) if batch.keys]
        rows = {rank: [row_of[key] for key in batch.keys] for rank, batch in used}
        for name in ("old_logprobs", "reference_logprobs"):
            calls = [self.trainers[r].handle.call("logprobs", take_rows(columns, rows[r])) for r, _ in used]
            column = np.zeros(columns["tokens"].shape, np.float32)
            for (rank, _), found in zip(used, await asyncio.gather(*calls), strict=True):
                column[rows[rank]] = found
            columns[name] = column
        final = [dataclasses.replace(b, advantages={key: advantages[key] for key in b.keys}) for _, b in used]
        calls = [
            self.trainers[r].handle.call("update_columns", batch, take_rows(columns, rows[r]))
            for (r, _), batch in zip(used, final, strict=True)
        ]
        await asyncio.gather(*calls)
        return count


class Seat:
    """A process that is a controller of one plane after another: to start a process takes longer than a step."""

    def __init__(self, *_: Any) -> None:
        import torch  # noqa: F401

        from gcore.launch.build import quiet

        quiet()
        make_decoder()  # imports
        gc.freeze()  # as in build_controller of the product
        gc.set_threshold(50_000, 20, 100)
        self._listener: socket.socket | None = None
        self._program: Program | None = None

    async def address(self) -> str:
        self._listener = socket.create_server(("127.0.0.1", 0))
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    async def open(self, plane: Plane, workload: Workload, places: Any, rank: int, address: str) -> None:
        rendezvous = Rendezvous(rank, plane.controllers, address, listener=self._listener)
        self._program = await asyncio.to_thread(Program, plane, workload, places, False, rendezvous)
        self._listener = None

    async def step(self, number: int, mode: Mode) -> Report:
        assert self._program is not None
        return await self._program.step(number, mode)

    async def limit_memory(self, limit_mb: float) -> None:
        """Die when the private memory has grown by more than this, as in a container with a limit."""
        most = memory_bytes()[0] + limit_mb * 2**20

        def watch() -> None:
            while memory_bytes()[0] < most:
                time.sleep(MEMORY_S)
            os._exit(KILLED)

        threading.Thread(target=watch, daemon=True).start()

    async def close(self) -> None:
        self._program = None
        gc.collect()


def of_kind(found: dict[str, MeteredHandle], prefix: str) -> list[MeteredHandle]:
    return [found[f"{prefix}{i}"] for i in range(sum(name.startswith(prefix) for name in found))]


def make_columns(samples: Sequence[Any]) -> dict[str, Any]:
    """One array per column, padded to the longest response of the batch."""
    contents = [s.content for s in samples]
    tokens = [c.tokens if isinstance(c, Pictured) else c for c in contents]
    steps = np.array([t.num_steps for t in tokens])
    shape = (len(samples), int(steps.max()))
    columns: dict[str, Any] = {
        "keys": np.array([s.key for s in samples]),
        "steps": steps,
        "rewards": np.array([s.reward for s in samples], np.float64),
        "prompts": [t.tokens_P for t in tokens],
        "images": [c.made for c in contents] if isinstance(contents[0], Pictured) else [],
        "tokens": np.zeros(shape, np.int32),
        "mask": np.zeros(shape, np.bool_),
        "logprobs": np.zeros(shape, np.float32),
    }
    for i, (sample, own) in enumerate(zip(samples, tokens, strict=True)):
        columns["tokens"][i, : steps[i]] = own.tokens_S
        columns["mask"][i, : steps[i]] = sample.mask_S
        columns["logprobs"][i, : steps[i]] = sample.rollout_logprobs_S
    return columns


def take_rows(columns: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    return {
        name: [column[i] for i in rows] if isinstance(column, list) and column else column[rows] if len(column) else []
        for name, column in columns.items()
    }


# ---- measurement in the process of a controller ----------------------------------------------------------------------


class Observer:
    """Samples the memory of this process in a thread, and the latency of an empty call in a task."""

    def __init__(self, hosts: Sequence[Handle]) -> None:
        self._hosts, self._ended = hosts, threading.Event()
        self.private = self.resident = 0
        self.probes_ms: list[float] = []
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        self._task = asyncio.ensure_future(self._probe())

    async def stop(self) -> None:
        self._ended.set()
        assert self._task is not None and self._thread is not None
        self._task.cancel()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(MEMORY_S):
            private, resident = memory_bytes()
            self.private, self.resident = max(self.private, private), max(self.resident, resident)

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            began = time.monotonic()
            await random.choice(self._hosts).call("ping")
            self.probes_ms.append(1000 * (time.monotonic() - began))


def memory_bytes() -> tuple[int, int]:
    """Private and resident memory of this process."""
    _, resident, shared = map(int, Path("/proc/self/statm").read_text().split()[:3])
    return 4096 * (resident - shared), 4096 * resident


def trim_memory() -> None:
    """Give freed memory back, so that every step starts from the same size."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


if __name__ == "__main__":  # a part of other benches
    print(__doc__)
