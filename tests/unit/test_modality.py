"""A policy that is not a language model on the unchanged training loop: it pushes a point by real numbers.

Only this file knows its content. Its engine and its trainer read it; collector, pools, dispatcher, recorder and
checkpoints pass it on. The track of the point stands for large data (pixels, latents): the engine stores it in a file,
and the controllers carry a reference that only the trainer reads."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import typing
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from gcore.checkpoint import store as checkpoints
from gcore.checkpoint.pending_groups import load_pending_groups
from gcore.clients import EngineClient, TrainerClient
from gcore.config.tree import Config
from gcore.content import media
from gcore.controller import loop
from gcore.controller.checkpointing import Checkpointer
from gcore.controller.collect import Collector, no_filter, spread
from gcore.controller.dispatch import Dispatcher
from gcore.controller.engine_weights import EngineWeights
from gcore.controller.evaluation import Evaluator
from gcore.controller.placement import RolloutPlacement
from gcore.controller.record import Recorder
from gcore.controller.replicas import Replicas
from gcore.controller.services import Services
from gcore.controller.status import LiveStatus
from gcore.generation.noise import uniforms
from gcore.generation.pool import EnginePool
from gcore.launch.user_code import make_advantage_settings
from gcore.modalities.table import kind_of
from gcore.observe.metrics import MetricsWriter
from gcore.observe.trace import Tracer
from gcore.placement.replica_switch import ReplicaSwitch
from gcore.protocols import (
    EngineStats,
    MemoryChange,
    Metric,
    Receivers,
    Rendezvous,
    TrainerInfo,
    UpdateStats,
    WeightPlan,
)
from gcore.rewarding.rewarder import WeightedRewarder
from gcore.rewarding.source import Answer
from gcore.runtime.local import Hub, LocalGroup, LocalHandle
from gcore.types import (
    Completion,
    Finish,
    Prompt,
    Request,
    Rollout,
    Sample,
    SampleWork,
    SamplingParams,
    TrainBatch,
    Written,
)
from gcore.workflows.context import ForAgents, generate_and_reward
from gcore.workflows.endpoint import Endpoint

GOAL, STEPS, SIGMA = 6.0, 6, 0.5  # the best policy pushes by GOAL / STEPS
NO_PUSHES = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Pushes:
    """Implements content.base.Content."""

    goal: float
    pushes_S: np.ndarray
    tracks: tuple[media.ArrayRef, ...] = ()  # one for each piece that an engine made

    @property
    def num_steps(self) -> int:
        return len(self.pushes_S)

    @property
    def actions_S(self) -> np.ndarray:
        return np.ones(self.num_steps, np.bool_)

    @property
    def size(self) -> int:
        return 1 + self.num_steps

    @property
    def work(self) -> SampleWork:
        return SampleWork(self.size)

    @property
    def nbytes(self) -> int:
        return self.pushes_S.nbytes + 8

    def extended(self, *pieces: Pushes) -> Pushes:
        pushes = np.concatenate([self.pushes_S, *(piece.pushes_S for piece in pieces)])
        return replace(self, pushes_S=pushes, tracks=(*self.tracks, *(t for piece in pieces for t in piece.tracks)))

    def end(self, params: SamplingParams) -> Finish | None:
        return "length" if self.num_steps >= params.max_tokens else None

    def digest(self) -> bytes:
        return hashlib.blake2b(self.pushes_S.tobytes(), digest_size=16).digest()

    def step_arrays(self) -> dict[str, np.ndarray]:
        return {"pushes": self.pushes_S, "track_paths": np.frombuffer(self._paths().encode(), np.uint8)}

    def with_steps(self, arrays: Mapping[str, np.ndarray]) -> Pushes:
        paths = bytes(arrays["track_paths"]).decode().split()
        tracks = tuple(media.ArrayRef(path, np.load(path).shape, "float32") for path in paths)
        return replace(self, pushes_S=arrays["pushes"], tracks=tracks)

    def reward_columns(self) -> dict[str, Any]:
        return {}

    def _paths(self) -> str:
        return "\n".join(track.path for track in self.tracks)


class PushModality:
    """Implements content.base.Modality. The output is where the point ends."""

    def params(self, given: Mapping[str, Any], *, greedy: bool) -> SamplingParams:
        return SamplingParams(STEPS, 0.0 if greedy else 1.0)

    def next_params(
        self, given: Mapping[str, Any], *, greedy: bool, temperature: float, num_steps: int
    ) -> SamplingParams | None:
        return None

    def between_turns(self, content: Any, feedback: Any) -> Any:
        raise NotImplementedError

    async def outputs(self, contents: Sequence[Any]) -> list[float]:
        return [float(content.pushes_S.sum()) for content in contents]


class PushEngine:
    """Implements protocols.Engine: pushes are normal around the only parameter of the policy."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._mean, self._version = folder, 0.0, 0
        self._awake, self._running, self._aborted = asyncio.Event(), Counter[str](), set[str]()
        self._awake.set()
        self.cut = 0  # requests that were given back unfinished, with steps

    async def generate(self, requests: Sequence[Request], ticket: str = "") -> list[Completion]:
        self._running[ticket] += 1
        try:
            return list(await asyncio.gather(*(self._one(request, ticket) for request in requests)))
        finally:
            self._running[ticket] -= 1

    async def _one(self, request: Request, ticket: str) -> Completion:
        pushes, logprobs, versions = list[float](), list[float](), list[int]()
        while len(pushes) < request.params.max_tokens and ticket not in self._aborted:
            await self._awake.wait()
            await asyncio.sleep(0.0005 * (1 + request.noise_key % 7))  # some are slow
            if ticket in self._aborted:
                break
            where = np.array([request.position + len(pushes)])
            (uniform,) = uniforms(np.array([request.noise_key], np.uint64), where)
            noise = NormalDist().inv_cdf(min(max(float(uniform), 1e-9), 1 - 1e-9)) if request.params.temperature else 0
            pushes.append(self._mean + SIGMA * noise)
            logprobs.append(-(noise**2) / 2 - math.log(SIGMA * math.sqrt(2 * math.pi)))
            versions.append(self._version)
        finish: Finish = "length" if len(pushes) == request.params.max_tokens else "abort"
        self.cut += finish == "abort" and len(pushes) > 0
        steps = np.array(pushes, np.float32)
        tracks = (media.store(np.cumsum(steps), self._folder),) if len(steps) else ()
        content = Pushes(0.0, steps, tracks)
        return Completion(content, np.array(logprobs, np.float32), np.array(versions, np.int32), finish)

    async def abort(self, ticket: str) -> None:
        self._aborted.add(ticket)

    async def load_weights(self, version: int, weights: Any, bucket: tuple[int, int] = (0, 1)) -> int:
        self._mean, self._version = float(weights["mean"][0]), version
        return version

    async def sleep(self, level: int) -> MemoryChange:
        assert not self._running.total()
        self._awake.clear()
        return MemoryChange(0.0, 0.0)

    async def wake(self, *tags: str) -> MemoryChange:
        self._awake.set()
        return MemoryChange(0.0, 0.0)

    async def stats(self) -> EngineStats:
        return EngineStats(self._running.total(), 0, 0.0, 0)


class PushTrainer:
    """Implements protocols.Trainer: one rank, plain gradient ascent."""

    def __init__(self) -> None:
        self.mean, self._samples = 0.0, dict[tuple[int, int], Sample]()
        self.means = [self.mean]  # after each update
        self.write_s = 0.0

    async def info(self) -> TrainerInfo:
        return TrainerInfo(num_parameters=1, hidden_size=1)

    async def end_warm_start(self) -> None: ...

    async def push(self, source: int, samples: Sequence[Sample]) -> None:
        self._samples |= {sample.key: sample for sample in samples}

    async def compute_logprobs(self, batch: TrainBatch) -> dict[Any, Any]:
        return {}

    async def update(self, batch: TrainBatch) -> UpdateStats:
        stats = UpdateStats()
        for mini in batch.mini_batches:
            keys = [key for micro in mini.micro_batches for row in micro.rows for key in row]
            gradient = sum(self._gradient(self._samples[key], batch.advantages[key]) for key in keys) / mini.num_actions
            self.mean += 0.1 * gradient
            stats += UpdateStats(1, 0, abs(gradient), 0.1, {"actor/loss": Metric(-gradient)})
        self._samples.clear()
        self.means.append(self.mean)
        return stats

    def _gradient(self, sample: Sample, advantage: float) -> float:
        content: Any = sample.content
        tracks = np.concatenate([track.read() for track in content.tracks])  # read here, and nowhere else
        pieces = [np.diff(track.read(), prepend=np.float32(0)) for track in content.tracks]
        assert len(tracks) == content.num_steps and np.allclose(np.concatenate(pieces), content.pushes_S, atol=1e-5)
        return float((advantage * sample.mask_S * (content.pushes_S - self.mean)).sum() / SIGMA**2)

    async def weight_plan(self) -> WeightPlan:
        return WeightPlan(1, every_rank=False)

    async def weight_bucket(self, index: int, receivers: Receivers) -> dict[str, np.ndarray]:
        return {"mean": np.array([self.mean])}

    async def snapshot(self) -> int:
        self._staged = json.dumps(self.mean).encode()
        return len(self._staged)

    async def write(self, folder: str) -> Written:
        await asyncio.sleep(self.write_s)
        return Written({"mean.json": checkpoints.write_file(Path(folder) / "mean.json", [self._staged])})

    async def abandon(self) -> None: ...

    async def load(self, folder: str, after_warm_start: bool = True) -> None:
        self.mean = json.loads((Path(folder) / "mean.json").read_text())


class Closeness:
    """Implements rewarding.source.Source."""

    name, weight, attempts = "closeness", 1.0, 1

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    async def answer(self, group: Sequence[Rollout]) -> Answer:
        await asyncio.sleep(0.001)
        return Answer([-abs(rollout.output - GOAL) for rollout in group])

    def check(self, columns: Collection[str]) -> None: ...

    def close(self) -> None: ...


class Goals:
    """Prompts, in place of prompts.source.PromptSource."""

    digest = "goals"
    rows: typing.ClassVar[list[dict[str, Any]]] = [{}] * 64

    def __len__(self) -> int:
        return 64

    def at(self, number: int) -> Prompt:
        return Prompt(number, number % 64, (), "", Pushes(GOAL, NO_PUSHES), {})


def config_of(folder: Path, steps: int, sampling: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "push", "dir": str(folder), "steps": steps},
            "model": {"build": {"alphabet": "01"}},  # of a language model; nothing here reads it
            "data": {"train": {"task": "arithmetic"}, "max_prompt_length": 8},
            "generation": {"max_response_length": STEPS},
            "rewards": {"functions": [{"name": "exact", "path": "gcore.rewarding.rules:exact_answer"}]},
            "sampling": {"prompts_per_step": 8, "samples_per_prompt": 4, **sampling},
            "checkpoint": {"every": 2, "keep_last": 9},
        }
    )


class World:
    """Two controllers, two engines and one trainer rank in one process."""

    def __init__(self, config: Config, filters: bool) -> None:
        self.config, self.filters = config, filters
        self.engines = [PushEngine(config.run.folder / "media") for _ in range(2)]
        self.trainer = PushTrainer()

    def services(self, rank: int, hub: Hub) -> Services:
        config, group = self.config, LocalGroup(Rendezvous(rank, 2, None, hub))
        engines = [EngineClient(LocalHandle(f"engine-{i}", engine)) for i, engine in enumerate(self.engines)]
        trainers = [TrainerClient(LocalHandle("trainer-0", self.trainer))]
        status, rewarder = LiveStatus(rank, Tracer(None, f"controller-{rank}")), WeightedRewarder([Closeness()])
        pool = EnginePool.for_controller(engines, rank, 2, max_concurrent=16)
        dispatcher = Dispatcher(config, group, trainers)
        switch = ReplicaSwitch(engines, 1, on_death=pool.mark_dead)
        weights = EngineWeights(group, pool, trainers, switch)
        return Services(
            config=config,
            controllers=group,
            kind=kind_of(config),
            modality=PushModality(),
            workflow=generate_and_reward,
            advantage_settings=make_advantage_settings(config),
            group_filter=spread if self.filters else no_filter,
            pool=pool,
            rewarder=rewarder,
            agents=ForAgents(Endpoint(config.endpoint)),
            dispatcher=dispatcher,
            weights=weights,
            placement=RolloutPlacement(group, pool, switch),
            replicas=Replicas(pool, (), weights, status.note),
            status=status,
        )

    async def open(self, services: Services) -> int:
        """In place of start_run.open_run, which reads a dataset of text."""
        config, source, dispatcher = services.config, Goals(), services.dispatcher
        rest = config.sampling, services.group_filter, services.status.report, source, lambda: services.weights.version
        services.collector = Collector(
            services.workflow,
            services.sample_context(),
            services.controllers,
            *rest,  # type: ignore[arg-type]
        )
        await dispatcher.open()
        services.checkpointer = Checkpointer(services, source)  # type: ignore[arg-type]
        found, step = await services.checkpointer.find(), 0
        if found is not None:
            step = (await services.checkpointer.restore(found)).step
        await services.weights.update(step)
        writer = None
        if services.controllers.rank == 0:
            writer = MetricsWriter(config.run.folder, config.observe, config.run.name, {})
        services.recorder = Recorder(services, writer)
        services.evaluator = Evaluator(services, {"": source})  # type: ignore[dict-item]
        return step

    def run(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        monkeypatch.setattr(loop, "open_run", self.open)

        async def controllers() -> None:
            hub = Hub(2)
            await asyncio.gather(*(loop.TrainingLoop(self.services(rank, hub)).run() for rank in range(2)))

        asyncio.run(asyncio.wait_for(controllers(), 120))
        return [json.loads(line) for line in (self.config.run.folder / "metrics.jsonl").read_text().splitlines()]


KEEP = {"deterministic": False, "surplus": "keep", "filter": "spread", "oversampling": 1.5}


def test_it_learns_and_requests_continue_after_a_weight_update(tmp_path, monkeypatch):
    world = World(config_of(tmp_path, 30, KEEP), filters=True)
    rows = world.run(monkeypatch)
    trained = [row for row in rows if "samples_digest" in row]
    assert len(trained) == 30 and trained[-1]["reward/closeness"] > trained[0]["reward/closeness"] + 3
    assert abs(world.trainer.mean - GOAL / STEPS) < 0.2
    assert sum(engine.cut for engine in world.engines) > 0  # responses that went on with newer weights
    assert max(row["staleness/max"] for row in trained) >= 1
    assert rows[-1]["eval/prompts"] == 64 and rows[-1]["eval/reward_mean"] > -1.5  # greedy: the mean itself


@pytest.mark.parametrize("sampling", [{}, {"filter": "spread"}])
def test_a_resumed_run_has_the_same_samples(tmp_path, monkeypatch, sampling):
    whole = World(config_of(tmp_path / "whole", 6, sampling), bool(sampling)).run(monkeypatch)
    World(config_of(tmp_path / "parts", 4, sampling), bool(sampling)).run(monkeypatch)
    config = config_of(tmp_path / "parts", 6, sampling)
    config = config.model_copy(update={"run": config.run.model_copy(update={"resume": "auto"})})
    rows = World(config, bool(sampling)).run(monkeypatch)
    digests = [
        {row["step"]: row["samples_digest"] for row in part if "samples_digest" in row} for part in (whole, rows)
    ]
    assert len(digests[0]) == 6 and digests[0] == digests[1]


def test_groups_that_wait_are_saved_with_their_references(tmp_path, monkeypatch):
    world = World(config_of(tmp_path, 4, {**KEEP, "max_staleness": 1}), filters=True)
    world.run(monkeypatch)
    newest = checkpoints.complete_checkpoints(world.config.run.folder)[-1]
    groups = load_pending_groups(newest, Goals().at)
    assert groups and all(scored.rollout.num_steps == STEPS for group in groups for scored in group)
    for content in (scored.rollout.content for group in groups for scored in group):
        assert np.allclose(sum(track.read()[-1] for track in content.tracks), content.pushes_S.sum(), atol=1e-4)


def test_a_save_waits_for_the_one_in_flight_and_the_end_of_the_run_for_the_last(tmp_path, monkeypatch):
    """The writes take longer than the steps. Without the wait, the next snapshot would replace what is written."""
    config = config_of(tmp_path, 5, {})
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": 1})})
    world = World(config, filters=False)
    world.trainer.write_s = 0.3
    world.run(monkeypatch)
    found = checkpoints.complete_checkpoints(config.run.folder)
    assert [path.name for path in found] == [f"step_{step}" for step in range(1, 6)]
    assert [json.loads((path / "mean.json").read_text()) for path in found] == world.trainer.means[1:]
    assert len(set(world.trainer.means)) == 6
    cursors = [checkpoints.read_state(path)["cursor"] for path in found]
    assert cursors == [8, 16, 24, 32, 40]
