"""Checkpoints of a run: the state of all controllers and trainer ranks of one moment, written while the run goes on.

    save     controllers: place in the prompt order, ready groups ──by value──┐
             trainer ranks: weights, optimizer ──copy in host memory──────────┤
    task     each process writes its files, in the background <───────────────┘
             all files reported ──> commit (controller 0) ──> old checkpoints deleted ──> export, if asked for

All controllers call `save` and `restore`; only controller 0 makes and commits the folder. One save is in flight: the
next one and the end of the run wait for it. The format of the folder is in checkpoint/store.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore import __version__
from gcore.checkpoint import memory, store
from gcore.checkpoint.pending_groups import load_pending_groups, pending_bytes, write_pending_groups
from gcore.checkpoint.remote import Remote
from gcore.config.load import dump_config, parse_yaml
from gcore.config.resume import changes, refusal
from gcore.controller.prompt_ledger import merge_places
from gcore.prompts.source import PromptSource, sample_digest
from gcore.types import Scored, UserError, Written

if TYPE_CHECKING:
    from gcore.controller.services import Services

MARGIN_BYTES = 16 << 20  # for texts of ready groups and small files
Groups = Sequence[Sequence[Scored]]


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


@dataclass(frozen=True, slots=True)
class _Save:
    """A save in flight: all that belongs to its moment, by value."""

    position: RunPosition
    partial: Path
    groups: Groups  # of this controller
    state: Mapping[str, Any]
    about: Mapping[str, Any]  # for the manifest
    started: float
    stall_s: float = 0.0  # of this controller


class Checkpointer:
    def __init__(self, services: Services, source: PromptSource) -> None:
        self._config, self._group, self._status = services.config, services.controllers, services.status
        self._background = services.controllers.subgroup()  # for the collectives of saves in flight
        self._folder = services.config.run.folder
        self._source, self._collector, self._dispatcher = source, services.collector, services.dispatcher
        self._placement, self._trainers_in_use = services.placement, services.weights.trainers_in_use
        self._num_engines = len(services.pool.replicas)
        self._sampled = sample_digest(source.rows)
        self._tree = parse_yaml(dump_config(services.config))  # without secrets
        self._in_flight: asyncio.Task[str] | None = None  # result: why it failed, or ""
        self._failure = ""  # of the last save
        self._parent: str | None = None  # name of the checkpoint before the next one

    # ---- saving ---------------------------------------------------------------------------------------------------

    async def save_if_due(self, step: int, score: float | None = None, last: bool = False) -> None:
        """`score`: of the evaluation of this step, for checkpoint.keep_best; `last`: the run ends after it."""
        keys, folder = self._config.checkpoint, None
        if last or step == self._config.run.total_steps or (keys.every and step % keys.every == 0):
            folder = self._folder
        elif keys.memory_every and step % keys.memory_every == 0:
            folder = self._folder / memory.LINK
        if folder is not None:
            async with self._trainers_in_use:  # a snapshot is a collective of the trainer ranks
                await self.save(RunPosition(step, warmed=None), score, folder)
        elif self._in_flight is not None and self._in_flight.done():
            await self.drain()

    async def save(self, position: RunPosition, score: float | None = None, folder: Path | None = None) -> None:
        """Returns when everything that belongs to the checkpoint is copied or protected from changes. `folder`: default
        is that of the run. The caller holds the lock `trainers_in_use`."""
        folder = folder or self._folder
        with self._status.timed("checkpoint", position.step):
            started = time.perf_counter()
            await self.drain()
            await self._group.barrier(f"save at {position}")  # controller 0 may still send weights to an engine
            # No await between these lines: they must be of the same moment.
            prompts = self._collector.prompts
            place, groups = prompts.place(self._collector.rate), [list(group) for group in prompts.ready.values()]
            collector_state = self._collector.saved()
            num_bytes = await self._dispatcher.snapshot()
            gathered = await self._group.all_gather("places in the prompt order", (place, pending_bytes(groups)))
            places = [part[0] for part in gathered]
            num_bytes += sum(part[1] for part in gathered) + MARGIN_BYTES
            partial, error = await self._begin(folder, position, num_bytes)
            if error:
                await asyncio.gather(*(rank.abandon() for rank in self._dispatcher.my_ranks))
                self._note(error)
                self._report(error)
                return
            state = {
                "step": position.step,
                **merge_places(places, self._config.sampling.strict),
                "prompts": len(self._source),
                "data": self._source.digest,
                "rows": len(self._source.rows),
                "sampled": self._sampled,
                "version": __version__,
                "config": self._tree,
                "placement": self._placement.saved(),
                **collector_state,
                **({} if position.warmed is None else {"warm_start": position.warmed}),
            }
            about = {
                "kind": position.kind,
                "step": position.number,
                "parent": self._parent,
                "score": score,
                "topology": {**self._dispatcher.topology, "engines": self._num_engines},
                "version": __version__,
                "config": hashlib.sha256(json.dumps(self._tree, sort_keys=True).encode()).hexdigest(),
                "data": self._source.digest,
            }
            stall_s = time.perf_counter() - started
            save = _Save(position, partial, groups, state, about, started, stall_s)
            self._in_flight = asyncio.create_task(self._finish(save))
            if not self._config.checkpoint.asynchronous:
                await self.drain()

    async def drain(self) -> None:
        """Wait for the save in flight. Not a collective."""
        if self._in_flight is not None:
            task, self._in_flight = self._in_flight, None
            self._report(await task)

    async def close(self) -> None:
        """The end of the run. UserError if its last checkpoint was not written."""
        await self.drain()
        if self._failure:
            raise UserError(f"the last checkpoint of the run was not written: {self._failure}")

    def _report(self, error: str) -> None:
        self._failure = error
        if error and self._config.checkpoint.on_failure == "stop":
            raise UserError(f"{error} (checkpoint.on_failure=stop)")

    def _note(self, error: str) -> None:
        then = "ends" if self._config.checkpoint.on_failure == "stop" else "goes on"
        self._status.note(f"checkpoint not written, the run {then}: {error}")

    async def _begin(self, folder: Path, position: RunPosition, num_bytes: int) -> tuple[Path, str]:
        """Controller 0 makes the folder. Returns it, and why that failed, on every controller."""
        partial, why = Path(), ""
        if self._group.rank == 0:
            try:
                partial = await asyncio.to_thread(store.begin, folder, position.number, num_bytes, position.kind)
            except (OSError, UserError) as error:
                why = str(error)
        begun: tuple[Path, str] = (await self._group.all_gather("checkpoint folder", (partial, why)))[0]
        return begun

    # ---- the task -------------------------------------------------------------------------------------------------

    async def _finish(self, save: _Save) -> str:
        """Write all files, then commit. Returns why it failed, the same on all controllers."""
        own = await asyncio.gather(
            asyncio.to_thread(self._write_groups, save),
            *(rank.write(str(save.partial)) for rank in self._dispatcher.my_ranks),
        )
        gathered = await self._background.all_gather("files of a checkpoint", (save.stall_s, own))
        written: list[Written] = [each for _, part in gathered for each in part]
        error = next((each.error for each in written if each.error), "")
        if self._group.rank == 0:
            files = {name: entry for each in written for name, entry in each.files.items()}
            error = error or await asyncio.to_thread(self._commit, save, files)
            if error:
                await asyncio.to_thread(store.remove, save.partial)
        error = str((await self._background.all_gather("checkpoint committed", error))[0])
        if error:
            self._note(error)
        else:
            self._parent = save.partial.stem
            self._status.measured(
                {
                    "checkpoint/stall_s": max(stall_s for stall_s, _ in gathered) + max(w.waited_s for w in written),
                    "checkpoint/copy_s": max(each.copied_s for each in written),
                    "checkpoint/write_s": time.perf_counter() - save.started,
                    "checkpoint/bytes": sum(e["bytes"] for each in written for e in each.files.values()),
                }
            )
        return error

    def _write_groups(self, save: _Save) -> Written:
        try:
            return Written(write_pending_groups(save.partial, self._group.rank, save.groups))
        except OSError as error:
            return Written({}, error=str(error))

    def _commit(self, save: _Save, files: Mapping[str, Any]) -> str:
        """On controller 0. Returns why it failed."""
        keep = self._config.checkpoint
        try:
            final = store.commit(save.partial, files, save.state, save.about)
            if memory.is_in_memory(final):
                store.retain(final, last=1)
                return ""
            store.retain(final, keep.keep_last, keep.keep_every, keep.keep_best)
            memory.drop(self._folder)
        except (OSError, UserError) as error:
            return str(error)
        if keep.export and save.position.kind == "step":
            self._export(final)
        if keep.copy_to is not None:
            self._copy_out(final, keep.copy_to)
        return ""

    def _copy_out(self, checkpoint: Path, url: str) -> None:
        try:
            Remote(url, self._config.run.name).copy_out(checkpoint)
        except Exception as error:  # of any driver; the checkpoint itself is complete
            self._status.note(f"{checkpoint.name} is saved, but not copied to {url}: {type(error).__name__}: {error}")

    def _export(self, checkpoint: Path) -> None:
        """In a process of its own: the controller neither imports torch nor waits for its interpreter."""
        target = self._folder / store.EXPORTS
        partial = target / ".partial"
        store.remove(partial)
        command = [sys.executable, "-m", "gcore.cli", "export", str(checkpoint), str(partial / checkpoint.name)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError("".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]))
            for folder in partial.iterdir():  # with model.lora also that of the adapters
                store.remove(target / folder.name)
                folder.rename(target / folder.name)
        except OSError as error:  # the checkpoint itself is complete
            self._status.note(f"{checkpoint.name} is saved, but not exported: {error}")

    # ---- restoring ------------------------------------------------------------------------------------------------

    async def find(self) -> Path | None:
        """The checkpoint to resume from, or None; the same on all controllers. Each verifies a share of the files. With
        run.resume=auto, damaged checkpoints are renamed and an older one is used."""
        resume, group = self._config.run.resume, self._group
        own = memory.candidates(resume, self._folder) if group.rank == 0 else []
        candidates: list[Path] = (await group.all_gather("checkpoints to resume from", own))[0]
        for checkpoint in candidates:
            damage = await asyncio.to_thread(store.first_damaged_file, checkpoint, group.rank, group.size)
            name = next(filter(None, await group.all_gather(f"{checkpoint.name} verified", damage)), None)
            if name is None:
                self._parent = checkpoint.name
                return checkpoint
            if resume != "auto":
                raise store.damage_error(checkpoint, name)
            self._status.note(
                f"{checkpoint / name} is damaged or missing: {checkpoint.name} is renamed to "
                f"{checkpoint.name}.damaged, and an older checkpoint is used"
            )
            if group.rank == 0:
                store.set_aside(checkpoint, "damaged")
        if candidates:
            raise UserError(
                f"{self._folder}: all checkpoints are damaged; start a new run (run.resume=never), or restore one "
                "from a copy"
            )
        return None

    async def restore(self, checkpoint: Path) -> RunPosition:
        """Load the checkpoint into the trainer ranks and the collector. The engines still need the weights."""
        state = store.read_state(checkpoint)
        self._check_unchanged(checkpoint, state)
        position = RunPosition(state["step"], state.get("warm_start"))
        self._status.finished(position.step)
        in_training = position.warmed is None
        await self._dispatcher.load(checkpoint, in_training)
        if in_training:
            groups = await asyncio.to_thread(load_pending_groups, checkpoint, self._source.at)
            self._collector.restore(state, groups)
            self._placement.restore(state.get("placement", {}))
        return position

    def _check_unchanged(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """UserError if the resumed run would not be the one that was saved."""
        changed = changes(state["config"], self._tree)
        if state["prompts"] != len(self._source):
            changed.append(f"data.train now has {len(self._source)} prompts that fit, before {state['prompts']}")
        elif state["data"] != self._source.digest:
            changed.append("data.train: the content of the prompts, answers or columns")
        if state["version"] != __version__:
            changed.append(f"the version of G-Core: {state['version']} -> {__version__}")
        if not changed:
            return
        if not self._config.run.resume_anyway:
            raise refusal(checkpoint, changed)
        self._status.note(f"resumed although this changed (run.resume_anyway): {'; '.join(changed)}")

    def set_aside_later(self, position: RunPosition) -> None:
        """On controller 0: rename checkpoints after `position`. The resumed run makes these steps again."""
        reached = store.KINDS.index(position.kind), position.number
        for checkpoint in memory.complete_checkpoints(self._folder):
            if store.position(checkpoint) > reached:
                if memory.is_in_memory(checkpoint):
                    memory.drop(self._folder)
                else:
                    store.set_aside(checkpoint)
