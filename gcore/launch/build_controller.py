"""Builds a controller: its connections to the other roles, the user's code, and the objects of the training loop.

config, plan, roles ──> pools of engines and judges, rewarder, dispatcher, weights, placement ──> Services ──> loop
"""

from __future__ import annotations

import gc

from gcore.config.tree import Config
from gcore.controller.dispatch import Dispatcher
from gcore.controller.engine_weights import EngineWeights
from gcore.controller.loop import TrainingLoop
from gcore.controller.placement import RolloutPlacement, SlotPlacement
from gcore.controller.replicas import Replicas
from gcore.controller.services import Services
from gcore.controller.status import LiveStatus
from gcore.environments.hosts import Hosts
from gcore.generation.pool import EnginePool
from gcore.launch.build import Roles, arm_faults, log_folder, quiet, trace_folder
from gcore.launch.build_rewarder import build_rewarder, engine_pool
from gcore.launch.gpu_assignment import CRITIC, TRAINER
from gcore.launch.plan import Plan, first_split
from gcore.launch.user_code import load_filter, load_workflow, make_advantage_settings
from gcore.modalities.table import kind_of
from gcore.observe.links import Links
from gcore.observe.trace import Tracer
from gcore.placement.baselines import ColocatedRule, StaticRule
from gcore.placement.grid import POLICY
from gcore.placement.guard import DynamicRule
from gcore.placement.lending import ContinuedRule
from gcore.placement.monitor import Monitor
from gcore.placement.placer import Placer
from gcore.placement.replica_switch import ReplicaSwitch
from gcore.placement.rules import Rule
from gcore.protocols import Controller, ControllerGroup, Rendezvous
from gcore.sandbox.pool import SandboxPool, make_kind
from gcore.workflows.context import ForAgents
from gcore.workflows.endpoint import Endpoint

MEDIA = "media"  # folder of a run: the media of prompts, and what networks read of them


def import_controller() -> None:
    """What `build_controller` imports: this module, and those of `quiet`. Called while other roles load models."""
    quiet()


def build_controller(config: Config, plan: Plan, roles: Roles, rendezvous: Rendezvous) -> Controller:
    quiet()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # thousands of live samples make collections slow, and free nothing
    arm_faults(config, f"controller-{rendezvous.rank}", rendezvous)
    return TrainingLoop(make_services(config, plan, roles, build_group(rendezvous)))


def build_group(rendezvous: Rendezvous) -> ControllerGroup:
    if rendezvous.address is None:
        from gcore.runtime.local import LocalGroup

        return LocalGroup(rendezvous)
    from gcore.runtime.tree import TreeGroup

    return TreeGroup(rendezvous)


def make_services(config: Config, plan: Plan, roles: Roles, group: ControllerGroup) -> Services:
    kind = kind_of(config, config.run.folder / MEDIA)
    modality, eval_modality = kind.modalities()
    status = LiveStatus(group.rank, Tracer(trace_folder(config), f"controller-{group.rank}"))
    per_call = config.sampling.samples_per_prompt
    pool = engine_pool(plan, group.rank, "engine", roles.engines, config.generation, per_call=per_call)
    rewarder = build_rewarder(config, plan, roles, group.rank)
    links = (
        Links(group.rank, plan.nodes_of_pool(TRAINER)),
        Links(group.rank, plan.nodes_of_pool(CRITIC)),
    )
    dispatcher = Dispatcher(config, group, roles.trainers, plan.topology, links, roles.critics)
    pool.cost_of = lambda length: dispatcher.cost.of(length)  # requests are routed by the costs of training
    switch, placer, placement = None, None, None
    if plan.grid is None and plan.sleep_level:
        switch = ReplicaSwitch(pool.replicas, plan.sleep_level, on_death=pool.mark_dead)
    weights = EngineWeights(group, pool, roles.trainers, switch)
    if plan.grid is not None and roles.trainers:  # in an evaluation all replicas are awake
        pools = {POLICY: pool} | {p.role: p for p in rewarder.pools if isinstance(p, EnginePool)}
        dynamic = DynamicRule()
        placer = _make_placer(config, plan, pools, group, weights, dynamic, status)
        placement = SlotPlacement(config, group, pools, placer, dynamic, plan.sleep_level > 0)
    return Services(
        config=config,
        controllers=group,
        kind=kind,
        modality=modality,
        workflow=load_workflow(config.workflow),
        group_filter=load_filter(config.sampling.filter),
        advantage_settings=make_advantage_settings(config),
        pool=pool,
        rewarder=rewarder,
        agents=ForAgents(
            Endpoint(config.endpoint),
            SandboxPool(config.sandbox, make_kind(config.sandbox)) if config.sandbox else None,
            build_environment(config, plan, group.rank),
        ),
        dispatcher=dispatcher,
        weights=weights,
        placement=placement or RolloutPlacement(group, pool, switch),
        replicas=Replicas(pool, rewarder.pools, weights, status.note, placer, plan.sleep_level > 0),
        status=status,
        eval_modality=eval_modality,
    )


def build_environment(config: Config, plan: Plan, rank: int) -> Hosts | None:
    """Its processes start with the first episodes."""
    logs = log_folder(config)
    log = None if logs is None else logs / f"environment-{rank}.log"
    return None if config.environment is None else Hosts(config.environment, plan.environment_processes, log)


def _make_placer(
    config: Config,
    plan: Plan,
    pools: dict[str, EnginePool],
    group: ControllerGroup,
    weights: EngineWeights,
    dynamic: DynamicRule,
    status: LiveStatus,
) -> Placer:
    assert plan.grid is not None
    split, policy = first_split(config, plan.grid), pools[POLICY]
    rules: dict[str, Rule] = {"static": StaticRule(split), "colocated": ColocatedRule(), "dynamic": dynamic}
    if config.sampling.max_staleness:
        rules["dynamic"] = ContinuedRule()
    # Level 1: judges keep their weights.
    switches = {role: ReplicaSwitch(pool.replicas, 1, on_death=pool.mark_dead) for role, pool in pools.items()}
    switches[POLICY] = ReplicaSwitch(policy.replicas, max(1, plan.sleep_level), weights.load, policy.mark_dead)
    serving = {POLICY: config.generation} | {judge.name: judge for judge in config.rewards.engine_judges}
    return Placer(
        plan.grid,
        rules[config.placement.mode],
        split,
        pools,
        switches,
        group,
        Monitor(plan.grid, {role: spec.max_concurrent for role, spec in serving.items()}),
        timeout_s=config.run.hang_s,
        note=status.note,
    )
