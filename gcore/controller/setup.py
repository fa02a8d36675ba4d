"""Makes what a controller has before its run starts: the connections to the other roles, and the user's code.

pools ──requests──> engines, judges, scorers       replicas: which of them are alive
dispatcher ──samples, calls──> trainer ranks       placement: which engines serve the next rollout

controller/start_run.py makes the services of the training loop from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gcore.config.tree import Config
from gcore.content.base import Modality
from gcore.content.text import TextModality
from gcore.controller.build import Roles, load_filter, load_workflow, sleep_level, trace_folder
from gcore.controller.build_rewarder import build_rewarder
from gcore.controller.collect import Filter
from gcore.controller.dispatch import Dispatcher
from gcore.controller.placement import AllEngines, RolloutPlacement, SlotPlacement
from gcore.controller.plan import Plan
from gcore.controller.replicas import Replicas, WeightResender
from gcore.controller.status import LiveStatus
from gcore.controller.workflow import SharedContext, Workflow
from gcore.generation.pool import EnginePool
from gcore.observe.trace import Tracer
from gcore.placement.grid import POLICY
from gcore.prompts.tokenizer import load_tokenizer, stop_tokens
from gcore.protocols import Group, Rewarder


@dataclass(frozen=True, slots=True)
class Setup:
    config: Config
    controllers: Group
    tokenizer: Any
    modality: Modality
    workflow: Workflow
    group_filter: Filter  # sampling.filter
    pool: EnginePool  # of the policy
    rewarder: Rewarder
    dispatcher: Dispatcher
    weight_resender: WeightResender
    placement: RolloutPlacement
    replicas: Replicas
    status: LiveStatus
    tracer: Tracer

    def sample_context(self, *, greedy: bool = False) -> SharedContext:
        """The context that all workflows of this controller share. `greedy`: for evaluations."""
        return SharedContext(self.config, self.pool, self.rewarder, self.modality, greedy=greedy)


def make_setup(config: Config, plan: Plan, roles: Roles, group: Group) -> Setup:
    grid, level = plan.grid, sleep_level(config, plan)
    tokenizer = load_tokenizer(config.model)
    rewarder = build_rewarder(config, plan, roles, group.rank)
    tracer = Tracer(trace_folder(config), f"controller-{group.rank}")
    status = LiveStatus(group.rank, tracer)
    max_concurrent = config.generation.max_concurrent
    pool = EnginePool.for_controller(roles.engines, group.rank, group.size, max_concurrent, roam=grid is not None)
    dispatcher = Dispatcher(config, group, pool, roles.trainers, level, plan.tensor_parallel)
    weights = WeightResender(roles.trainers, lambda: dispatcher.version)
    slot_placement: SlotPlacement | None = None
    if grid is not None and roles.trainers:  # in an evaluation all replicas are awake
        pools = {POLICY: pool} | {
            p.role: p for p in rewarder.pools if isinstance(p, EnginePool) and p.role in grid.widths
        }
        slot_placement = SlotPlacement(config, grid, pools, group, level, weights.load, status.note)
    return Setup(
        config=config,
        controllers=group,
        tokenizer=tokenizer,
        modality=TextModality(config.generation, tokenizer, stop_tokens(config.model, tokenizer)),
        workflow=load_workflow(config.workflow),
        group_filter=load_filter(config.sampling.filter),
        pool=pool,
        rewarder=rewarder,
        dispatcher=dispatcher,
        weight_resender=weights,
        placement=slot_placement or AllEngines(dispatcher),
        replicas=Replicas(pool, rewarder.pools, weights, status.note, slot_placement),
        status=status,
        tracer=tracer,
    )
