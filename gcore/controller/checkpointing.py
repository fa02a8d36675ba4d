"""Checkpoints of a run: the state of all controllers and trainer ranks, saved together and restored together.

controllers: place in the prompt order, ready groups ──┐
trainer ranks: weights, optimizer ─────────────────────┴──> step_N.partial/ ──commit (controller 0)──> step_N/

All controllers call `save` and `restore`; only controller 0 makes and commits the folder. The format of the folder is
in checkpoint/store.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from gcore.checkpoint import store
from gcore.checkpoint.pending_groups import load_pending_groups, save_pending_groups
from gcore.controller.collect import Collector, merge_places
from gcore.controller.setup import Setup
from gcore.prompts.source import PromptSource
from gcore.types import UserError

MARGIN_BYTES = 16 << 20  # for all files except the trainer's state


@dataclass(frozen=True, slots=True)
class RunPosition:
    """Progress of a run. `warmed`: completed steps of the warm start; None: the warm start is over."""

    step: int
    warmed: int | None

    @property
    def before_training(self) -> bool:
        """The warm start is not done, or there is none and the run is new."""
        return self.warmed is not None

    @property
    def kind(self) -> store.Kind:
        return "step" if self.warmed is None else "warm"

    @property
    def number(self) -> int:
        return self.step if self.warmed is None else self.warmed

    def __str__(self) -> str:
        return f"step {self.number}" + ("" if self.warmed is None else " of the warm start")


START = RunPosition(step=0, warmed=0)


class Checkpointer:
    def __init__(self, setup: Setup, source: PromptSource, collector: Collector, num_parameters: int) -> None:
        self._config, self._group, self._status = setup.config, setup.controllers, setup.status
        self._folder = setup.config.run.folder
        self._source, self._collector, self._dispatcher = source, collector, setup.dispatcher
        # weights and two moments of the optimizer; with a KL term also the reference model
        copies = 4 if setup.config.algorithm.kl_coef > 0 else 3
        self._state_bytes = num_parameters * 4 * copies

    # ---- saving ---------------------------------------------------------------------------------------------------

    async def save_if_due(self, step: int) -> None:
        every = self._config.checkpoint.every
        if step == self._config.run.steps or (every and step % every == 0):
            await self.save(RunPosition(step, warmed=None))

    async def save(self, position: RunPosition) -> None:
        with self._status.timed("checkpoint", position.step):
            partial = self._folder / f"{position.kind}_{position.number}.partial"
            if self._group.rank == 0:
                need_bytes = self._state_bytes + MARGIN_BYTES
                partial = store.begin(self._folder, position.number, need_bytes, position.kind)
            await self._group.all_gather("checkpoint folder", None)
            # No await between these two: they must be of the same moment.
            place, groups = self._collector.place(), list(self._collector.ready.values())
            places = await self._group.all_gather("places in the prompt order", place)
            await asyncio.to_thread(save_pending_groups, partial, self._group.rank, groups)
            await self._dispatcher.save(partial)
            if self._group.rank == 0:
                state = {
                    "step": position.step,
                    **merge_places(places, self._config.sampling.strict),
                    "seed": self._config.run.seed,
                    "prompts": len(self._source),
                    **({} if position.warmed is None else {"warm_start": position.warmed}),
                }
                await asyncio.to_thread(store.commit, partial, state, self._config.checkpoint.keep)
            await self._group.all_gather("checkpoint committed", None)

    # ---- restoring ------------------------------------------------------------------------------------------------

    async def find(self) -> Path | None:
        """The checkpoint to resume from, or None. Controller 0 finds and verifies it; all controllers return it."""
        found = None
        if self._group.rank == 0:
            found = await asyncio.to_thread(store.find, self._config.run.resume, self._folder)
        return (await self._group.all_gather("checkpoint to resume from", found))[0]

    async def restore(self, checkpoint: Path) -> RunPosition:
        """Load the checkpoint into the trainer ranks and the collector. The engines still need the weights."""
        state = store.read_state(checkpoint)
        seed, num_prompts = self._config.run.seed, len(self._source)
        if state["seed"] != seed:
            raise UserError(
                f"{checkpoint} was made with run.seed={state['seed']}, got run.seed={seed}; expected the same seed, "
                "else samples would repeat"
            )
        if state["prompts"] != num_prompts:
            raise UserError(
                f"{checkpoint} was made with {state['prompts']} prompts, data.train now has {num_prompts}: the "
                "prompt order would change (keys: data.train, data.max_prompt_length)"
            )
        position = RunPosition(state["step"], state.get("warm_start"))
        self._status.finished(position.step)
        in_training = position.warmed is None
        await self._dispatcher.load(checkpoint, in_training)
        if in_training:
            groups = await asyncio.to_thread(load_pending_groups, checkpoint, self._source.at)
            self._collector.restore(state, groups)
        return position

    def set_aside_later(self, position: RunPosition) -> None:
        """On controller 0: rename checkpoints after `position`. The resumed run makes these steps again."""
        reached = store.KINDS.index(position.kind), position.number
        for checkpoint in store.complete(self._folder):
            if store.position(checkpoint) > reached:
                store.set_aside(checkpoint)
