"""The objects that the training loop (controller/loop.py) uses. controller/start_run.py makes them once per run."""

from __future__ import annotations

from dataclasses import dataclass, field

from gcore.config.tree import Config
from gcore.controller.checkpointing import Checkpointer
from gcore.controller.collect import Collector
from gcore.controller.dispatch import Dispatcher
from gcore.controller.evaluation import Evaluator
from gcore.controller.placement import RolloutPlacement
from gcore.controller.record import Recorder
from gcore.controller.replicas import WeightResender
from gcore.controller.status import LiveStatus
from gcore.driver.on_step import StepGate
from gcore.preparation.samples import Scoring
from gcore.protocols import Group, Rewarder


@dataclass(frozen=True, slots=True)
class Services:
    """One per controller. All controllers join the collectives; only controller 0 writes the files of the run."""

    config: Config
    controllers: Group  # the controllers
    collector: Collector  # prompts -> groups of scored samples
    rewarder: Rewarder
    dispatcher: Dispatcher  # samples -> trainer ranks; weights -> engines
    weight_resender: WeightResender  # current weights -> engines that missed an update
    scoring: Scoring  # rewards -> advantages
    placement: RolloutPlacement  # which engines serve the next rollout
    recorder: Recorder  # rows of metrics, sample log
    evaluator: Evaluator
    checkpointer: Checkpointer
    status: LiveStatus  # for the progress view
    gate: StepGate = field(default_factory=StepGate)  # to the driver, with run.on_step

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
        """Call after the last step."""
        await self.checkpointer.close()
        self.status.show("done")
        self.collector.close()
        self.rewarder.close()
        self.recorder.close()
        await self.controllers.barrier("end")
