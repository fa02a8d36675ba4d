"""Builds the rewards of a recipe: the sources, and the pools of the judges and scalar models that they call.

config, plan, roles ──> sources: functions, scalar models, judges, HTTP ──> WeightedRewarder (in each controller)
"""

from __future__ import annotations

from collections.abc import Sequence

from gcore.clients import EngineClient
from gcore.config.base import Serving
from gcore.config.judges import RemoteJudge, Teacher
from gcore.config.tree import Config
from gcore.content.base import Content
from gcore.generation.noise import noise_key
from gcore.generation.pool import EnginePool, ScorerPool
from gcore.generation.routing import Router
from gcore.launch.build import Roles, log_folder
from gcore.launch.plan import Plan
from gcore.prompts.processor import load_processor
from gcore.prompts.tokenizer import load_tokenizer, stop_tokens
from gcore.rewarding.functions import FunctionSource
from gcore.rewarding.http import HttpSource
from gcore.rewarding.judge import JudgeSource
from gcore.rewarding.judge_backend import EngineBackend, RemoteBackend
from gcore.rewarding.rewarder import WeightedRewarder
from gcore.rewarding.scalar import ScalarSource
from gcore.rewarding.source import Source
from gcore.rewarding.teacher import TeacherSource, check_tokenizers
from gcore.rewarding.workers import WorkerPool
from gcore.types import Completion, Request, SamplingParams


def build_rewarder(config: Config, plan: Plan, roles: Roles, rank: int = 0) -> WeightedRewarder:
    """All rewards of the recipe. Without roles, before the run, it can only check them."""
    from gcore.workflows.context import least_siblings

    rewards = config.rewards
    sources: list[Source] = []
    if plan.reward_workers:
        logs = log_folder(config)
        log = None if logs is None else logs / f"rewards-{rank}.log"
        sources += WorkerPool(rewards, plan.reward_workers, log).sources
    else:
        functions = enumerate(rewards.functions)
        sources += [FunctionSource(f, rewards.attempts, f"rewards.functions.{i}") for i, f in functions]
    scorers = {}
    for spec in rewards.models:
        replicas = roles.scorers.get(spec.name, ())
        scorers[spec.name] = ScorerPool(replicas, Router(len(replicas), (rank, plan.controllers)))
    judges = {
        spec.name: engine_pool(plan, rank, f"judge-{spec.name}", roles.judges.get(spec.name, ()), spec, spec.name)
        for spec in rewards.engine_judges
    }
    sources += [_scalar_source(config, i, scorers[spec.name]) for i, spec in enumerate(rewards.models)]
    sources += [_judge_source(config, i, judges.get(spec.name)) for i, spec in enumerate(rewards.judges)]
    sources += [HttpSource(spec, f"rewards.http.{i}") for i, spec in enumerate(rewards.http)]
    least = least_siblings(config) if rewards.unscored == "drop_sample" else None
    return WeightedRewarder(sources, pools=[*scorers.values(), *judges.values()], least_scored=least)


def engine_pool(
    plan: Plan, rank: int, kind: str, engines: Sequence[EngineClient], spec: Serving, role: str = "", per_call: int = 1
) -> EnginePool:
    """A controller's pool of the policy's engines, or of those of a judge. `kind`: of their processes."""
    nodes, roam = plan.nodes_of_pool(kind), plan.grid is not None
    most = spec.max_concurrent
    return EnginePool.for_controller(engines, rank, plan.controllers, most, roam, role, nodes, per_call)


def _scalar_source(config: Config, index: int, pool: ScorerPool) -> Source:
    spec = config.rewards.models[index]
    tokenizer = load_tokenizer(spec.model, f"rewards.models.{index}.model", chat=True)
    return ScalarSource(spec, tokenizer, pool.score, config.rewards.attempts)


def _judge_source(config: Config, index: int, pool: EnginePool | None) -> Source:
    """`pool`: the replicas of the judge; None for a judge behind a URL."""
    spec, place = config.rewards.judges[index], f"rewards.judges.{index}"

    def noise(key: tuple[object, ...]) -> int:
        return noise_key(config.run.seed, "judge", *key)

    if isinstance(spec, RemoteJudge):
        return JudgeSource(spec, RemoteBackend(spec, noise, place), place)
    assert pool is not None
    if isinstance(spec, Teacher):
        return _teacher_source(config, spec, place, pool)

    async def ask(question: Content, params: SamplingParams, key: tuple[object, ...]) -> Completion:
        _, prompt, *_ = key  # the prompt's number, or "ask" if a workflow calls ctx.ask: see JudgeSource
        priority, replica_key = (prompt, key[:2]) if isinstance(prompt, int) else (0, None)
        return (await pool.generate([Request(question, params, noise(key))], priority, replica_key))[0]

    tokenizer = load_tokenizer(spec.model, f"{place}.model", chat=True)
    processor = load_processor(spec.model, tokenizer, config.run.folder / "media", f"{place}.model")
    backend = EngineBackend(spec, tokenizer, stop_tokens(spec.model, tokenizer), ask, place, processor)
    return JudgeSource(spec, backend, place)


def _teacher_source(config: Config, spec: Teacher, place: str, pool: EnginePool) -> Source:
    check_tokenizers(load_tokenizer(config.model), load_tokenizer(spec.model, f"{place}.model"), f"{place}.model")

    async def ask(requests: Sequence[Request], prompt: int) -> list[Completion]:
        return await pool.generate(requests, prompt, (spec.name, prompt))

    return TeacherSource(spec.name, spec.weight, ask)
