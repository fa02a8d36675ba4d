"""What one controller uses: the connections to the other roles, the user's code, and the objects of the loop.

pools ──requests──> engines, judges, scorers       replicas: which of them are alive
dispatcher ──samples, calls──> trainer ranks       placement: which engines serve the next rollout
collector: prompts -> groups of scored samples     recorder, evaluator, checkpointer: after a step

launch/build_controller.py makes the connections when the process starts. start_run.py adds what needs the prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gcore.config.tree import Config
from gcore.content.base import Modality
from gcore.controller.checkpointing import Checkpointer
from gcore.controller.collect import Collector
from gcore.controller.dispatch import Dispatcher
from gcore.controller.engine_weights import EngineWeights
from gcore.controller.evaluation import Evaluator
from gcore.controller.placement import RolloutPlacement
from gcore.controller.record import Recorder
from gcore.controller.replicas import Replicas
from gcore.controller.run_prompts import Filter
from gcore.controller.status import LiveStatus, StepGate
from gcore.environments.hosts import Hosts
from gcore.generation.pool import EnginePool
from gcore.modalities.base import PolicyKind
from gcore.preparation.advantages import AdvantageSettings
from gcore.protocols import ControllerGroup, Rewarder
from gcore.sandbox.pool import SandboxPool
from gcore.types import UserError
from gcore.workflows.context import SharedContext, Workflow
from gcore.workflows.endpoint import Endpoint


@dataclass(slots=True)
class Services:
    """One per controller. All controllers join the collectives; only controller 0 writes the files of the run."""

    config: Config
    controllers: ControllerGroup
    kind: PolicyKind
    modality: Modality
    workflow: Workflow  # makes the group of a prompt in evaluations, and in training unless it is offline
    group_filter: Filter  # sampling.filter
    advantage_settings: AdvantageSettings  # rewards -> advantages
    pool: EnginePool  # of the policy
    rewarder: Rewarder
    dispatcher: Dispatcher  # samples -> trainer ranks
    weights: EngineWeights  # trainer ranks -> engines
    placement: RolloutPlacement  # which engines serve the next rollout
    replicas: Replicas
    status: LiveStatus  # for the progress view
    gate: StepGate = field(default_factory=StepGate)  # to the driver after a step, with run.on_step
    eval_modality: Modality | None = None  # with other sampling parameters in evaluations
    sandboxes: SandboxPool | None = None
    environment: Hosts | None = None  # processes of `environment`
    endpoint: Endpoint = field(init=False)  # the policy by HTTP, of workflows that call `serve`
    # Made by start_run.py. An evaluation has neither collector nor checkpointer.
    collector: Collector = field(init=False)
    recorder: Recorder = field(init=False)
    evaluator: Evaluator = field(init=False)
    checkpointer: Checkpointer = field(init=False)

    def __post_init__(self) -> None:
        self.endpoint = Endpoint(self.config.endpoint)

    @property
    def _parts(self) -> dict[str, Any]:
        """Of all contexts."""
        return {"environment": self.environment, "endpoint": self.endpoint, "sandboxes": self.sandboxes}

    def sample_context(self) -> SharedContext:
        """The context that all workflows of this controller share."""
        parts = self.config, self.pool, self.rewarder, self.modality
        return SharedContext(*parts, version=lambda: self.weights.version, **self._parts)

    def eval_contexts(self) -> list[SharedContext]:
        """Of evaluations: one greedy response per prompt, or one context per sampled response."""
        modality, evaluation = self.eval_modality or self.modality, self.config.evaluation
        parts = self.config, self.pool, self.rewarder, modality
        if not evaluation.sampled:
            return [SharedContext(*parts, greedy=True, **self._parts)]
        return [SharedContext(*parts, attempt=i, **self._parts) for i in range(evaluation.samples)]

    async def ends_by_user(self, step: int) -> bool:
        """Whether the user's function (run.on_step) ends the run after this step."""
        if self.config.run.on_step is None:
            return False
        self.status.show("on_step")
        stop = await self.gate.wait(self.recorder.last_row if self.controllers.rank == 0 else None)
        if stop:
            self.status.note(f"run.on_step ended the run after step {step}")
        return stop

    async def close(self) -> None:
        """Call after the last step. UserError if the model did not learn until the end."""
        await self.checkpointer.close()
        self.status.show("done")
        self.collector.close()
        self.rewarder.close()
        if self.sandboxes is not None:
            await self.sandboxes.close()
        if self.environment is not None:
            self.environment.close()
        self.recorder.close()
        await self.endpoint.close()
        await self.controllers.barrier("end")
        if bad := self.dispatcher.bad_in_a_row:
            raise UserError(
                f"the last {bad} update(s) of the run were skipped, because their gradients were NaN or infinite: the "
                "model may be ruined; lower training.lr or the coefficients of the loss, or use an earlier checkpoint"
            )
