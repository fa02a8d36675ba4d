"""Makes what a controller has before its run starts: the connections to the other roles, and the user's code.

pools ──requests──> engines, judges, scorers       replicas: which of them are alive
dispatcher ──samples, calls──> trainer ranks       placement: which engines serve the next rollout

controller/start_run.py makes the services of the training loop from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gcore.config.tree import Config
from gcore.content.base import Modality
from gcore.controller.collect import Filter
from gcore.controller.dispatch import Dispatcher
from gcore.controller.placement import AllEngines, RolloutPlacement, SlotPlacement
from gcore.controller.replicas import Replicas, WeightResender
from gcore.controller.status import LiveStatus
from gcore.driver.on_step import StepGate
from gcore.generation.pool import EnginePool
from gcore.launch.build import Roles, load_filter, load_workflow, sleep_level, trace_folder
from gcore.launch.build_rewarder import build_rewarder
from gcore.launch.gpu_assignment import CRITIC, TRAINER
from gcore.launch.own_algorithm import make_scoring
from gcore.launch.plan import Plan
from gcore.modalities.base import PolicyKind
from gcore.modalities.table import kind_of
from gcore.observe.links import Links
from gcore.observe.trace import Tracer
from gcore.placement.grid import POLICY
from gcore.preparation.samples import Scoring
from gcore.protocols import Group, Rewarder
from gcore.workflows.context import SharedContext, Workflow, stored_answers

MEDIA = "media"  # folder of a run: the media of prompts, and what networks read of them


@dataclass(frozen=True, slots=True)
class Setup:
    config: Config
    controllers: Group
    kind: PolicyKind
    modality: Modality
    workflow: Workflow  # makes the group of a prompt in evaluations, and in training unless it is offline
    training_workflow: Workflow
    group_filter: Filter  # sampling.filter
    scoring: Scoring
    pool: EnginePool  # of the policy
    rewarder: Rewarder
    dispatcher: Dispatcher
    weight_resender: WeightResender
    placement: RolloutPlacement
    replicas: Replicas
    status: LiveStatus
    tracer: Tracer
    gate: StepGate = field(default_factory=StepGate)  # after a step, with run.on_step
    eval_modality: Modality | None = None  # with other sampling parameters in evaluations

    def sample_context(self) -> SharedContext:
        """The context that all workflows of this controller share."""
        return SharedContext(
            self.config, self.pool, self.rewarder, self.modality, version=lambda: self.dispatcher.version
        )

    def eval_contexts(self) -> list[SharedContext]:
        """Of evaluations: one greedy response per prompt, or one context per sampled response."""
        modality, evaluation = self.eval_modality or self.modality, self.config.evaluation
        parts = self.config, self.pool, self.rewarder, modality
        if not evaluation.sampled:
            return [SharedContext(*parts, greedy=True)]
        return [SharedContext(*parts, attempt=i) for i in range(evaluation.samples)]


def make_setup(config: Config, plan: Plan, roles: Roles, group: Group) -> Setup:
    grid, level = plan.grid, sleep_level(config, plan)
    kind = kind_of(config, config.run.folder / MEDIA)
    rewarder = build_rewarder(config, plan, roles, group.rank)
    tracer = Tracer(trace_folder(config), f"controller-{group.rank}")
    status = LiveStatus(group.rank, tracer)
    max_concurrent = config.generation.max_concurrent
    nodes, roam = plan.nodes_of_pool("engine"), grid is not None
    pool = EnginePool.for_controller(
        roles.engines,
        group.rank,
        group.size,
        max_concurrent,
        roam=roam,
        nodes=nodes,
        per_call=config.sampling.samples_per_prompt,
    )
    links = (
        Links(group.rank, plan.nodes_of_pool(TRAINER)),
        Links(group.rank, plan.nodes_of_pool(CRITIC)),
    )
    dispatcher = Dispatcher(config, group, pool, roles.trainers, level, plan.topology, links, roles.critics)
    weights = WeightResender(roles.trainers, lambda: dispatcher.version, dispatcher.transfer)
    modality, eval_modality = kind.modalities()
    slot_placement: SlotPlacement | None = None
    if grid is not None and roles.trainers:  # in an evaluation all replicas are awake
        pools = {POLICY: pool} | {
            p.role: p for p in rewarder.pools if isinstance(p, EnginePool) and p.role in grid.widths
        }
        slot_placement = SlotPlacement(config, grid, pools, group, level, weights.load, status.note)
    workflow = load_workflow(config.workflow)
    return Setup(
        config=config,
        controllers=group,
        kind=kind,
        modality=modality,
        workflow=workflow,
        training_workflow=stored_answers if config.is_offline else workflow,
        group_filter=load_filter(config.sampling.filter),
        scoring=make_scoring(config),
        pool=pool,
        rewarder=rewarder,
        dispatcher=dispatcher,
        weight_resender=weights,
        placement=slot_placement or AllEngines(dispatcher),
        replicas=Replicas(pool, rewarder.pools, weights, status.note, slot_placement, level > 0),
        status=status,
        tracer=tracer,
        eval_modality=eval_modality,
    )
