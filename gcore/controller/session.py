"""What surrounds the loop: opening (data, resume, warm start), evaluation, checkpoints, metrics, status."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file

from gcore.checkpoint import store
from gcore.checkpoint.pending_groups import load_pending_groups, save_pending_groups
from gcore.clients import EngineClient, TrainerClient
from gcore.config.tree import Config, Dataset
from gcore.controller import record
from gcore.controller.collect import Collected, Collector, Filter, answer_all, merge_places
from gcore.controller.dispatch import Dispatcher
from gcore.controller.placement import Placement
from gcore.controller.record import exact
from gcore.controller.replicas import Replicas
from gcore.controller.workflow import SharedContext, Workflow
from gcore.generation.pool import EnginePool
from gcore.observe.metrics import MetricsWriter, rewind
from gcore.observe.samples import SampleLog, rewind_samples
from gcore.observe.trace import Tracer
from gcore.placement.grid import POLICY, DeviceGrid
from gcore.placement.monitor import RolloutProgress
from gcore.prompts.rows import load_rows
from gcore.prompts.source import PromptSource, Templater, measure
from gcore.prompts.tokenizer import stop_tokens
from gcore.protocols import ControllerStatus, Group, Rewarder, UpdateStats
from gcore.types import Sample, SampleMeta, UserError


class Session:
    """State and services of one controller. Only controller 0 writes files; all controllers join the collectives."""

    def __init__(
        self,
        config: Config,
        group: Group,
        engines: Sequence[EngineClient],
        trainers: Sequence[TrainerClient],
        tokenizer: Any,
        rewarder: Rewarder,
        workflow: Workflow,
        keep: Filter,
        sleep_level: int,
        tracer: Tracer,
        grid: DeviceGrid | None = None,
    ) -> None:
        self.config, self.group, self.workflow, self.tracer = config, group, workflow, tracer
        self.folder: Path = config.run.folder
        self.step = 0
        most = config.generation.max_concurrent
        self.pool = pool = EnginePool.for_controller(engines, group.rank, group.size, most, roam=grid is not None)
        stops = stop_tokens(config.model, tokenizer)
        self.shared = SharedContext(config, pool, rewarder, tokenizer, stops)
        self.greedy = SharedContext(config, pool, rewarder, tokenizer, stops, greedy=True)
        self.collector = Collector(workflow, self.shared, group, config.sampling, keep, self.report)
        self.engines, self.trainers, self._tokenizer = engines, trainers, tokenizer
        self.dispatcher = Dispatcher(config, group, pool, trainers, sleep_level)
        self._writer: MetricsWriter | None = None
        self._samples: SampleLog | None = None
        self._rows: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._times: dict[str, float] = {}
        self._stage, self._detail = "starting", ""
        self._state_bytes = 0
        self._health: asyncio.Task[None] | None = None
        self.replicas = Replicas(pool, rewarder.pools, trainers, lambda: self.collector.version, self.note)
        self.placement: Placement | None = None
        if grid is not None and trainers:  # an evaluation has all replicas awake
            pools = {POLICY: pool} | {
                p.role: p for p in rewarder.pools if isinstance(p, EnginePool) and p.role in grid.widths
            }
            self.placement = Placement(config, grid, pools, group, sleep_level, self.replicas.load, self.note)
            self.replicas.placement = self.placement

    # ---- opening and closing --------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Everything before the first step: prompts measured, checkpoint or warm start, weights to the engines."""
        self._stage = "loading data"
        self._health = asyncio.create_task(self.replicas.watch())
        self.source = await self._load(self.config.data.train, "train", self.config.data.shuffle)
        self.collector.source = self.source
        self.held_out = None
        if self.config.data.eval is not None:
            self.held_out = await self._load(self.config.data.eval, "eval", shuffle=False)
        if not self.trainers:
            await self._load_engines()
            return
        info = await self.dispatcher.open()
        self._state_bytes = info.num_parameters * 4 * (4 if self.config.algorithm.kl_coef > 0 else 3)
        checkpoint = await self._find_checkpoint()
        warmed: int | None = 0  # steps of the warm start that are done; None: reinforcement learning has begun
        if checkpoint is not None:
            warmed = await self._resume(checkpoint)
        else:
            if self.config.run.resume == "auto":
                again = "; the warm start begins again" if self.config.training.warm_start else ""
                self.note(f"{self.folder}: no complete checkpoint; starting anew{again}")
            self._open_writer()
        if warmed is not None:
            await self._warm_start(warmed)
            await self.dispatcher.begin()
            await self._serve(version=0)
            await self.evaluate()
        if self.config.run.steps == 0:  # `gcore sft`: the warm start is the whole run
            await self.checkpoint()

    async def close(self) -> None:
        if self.group.rank == 0 and self._writer is not None:
            self._writer.close()
        self._stage = "done"
        if self._health is not None:
            self._health.cancel()
        self.collector.close()
        self.shared.rewarder.close()
        self.tracer.flush()
        await self.group.all_gather("end", None)

    async def _load(self, dataset: Dataset, split: Literal["train", "eval"], shuffle: bool) -> PromptSource:
        """Each controller measures its part of the rows; the kept row numbers are shared."""
        key = f"data.{split}"
        rows = load_rows(dataset, key)
        templater = Templater(self._tokenizer, self.config.data, split)
        limit = self.config.data.max_prompt_length
        mine = measure(rows, templater, limit, self.group.rank, self.group.size)
        parts = await self.group.all_gather(f"prompts of {key}", (mine.kept, mine.too_long))
        kept = sorted(i for part in parts for i in part[0])
        too_long = sorted(i for part in parts for i in part[1])
        if too_long:
            self.note(
                f"{key}: dropped {len(too_long)} of {len(rows)} prompts over data.max_prompt_length={limit} "
                f"(rows {', '.join(map(str, too_long[:5]))}{', ...' if len(too_long) > 5 else ''})"
            )
        if not kept:
            raise UserError(f"{key}: all {len(rows)} prompts are longer than data.max_prompt_length={limit}")
        return PromptSource(rows, kept, templater, self.config.run.seed, shuffle)

    async def _find_checkpoint(self) -> Path | None:
        """Controller 0 looks and verifies; all hear of the same one."""
        found = None
        if self.group.rank == 0:
            found = await asyncio.to_thread(store.find, self.config.run.resume, self.folder)
        return (await self.group.all_gather("checkpoint to resume from", found))[0]

    async def _resume(self, checkpoint: Path) -> int | None:
        """Take the state of a checkpoint. Returns the steps of the warm start that are done, None if it is over."""
        self._stage = f"resuming from {checkpoint.name}"
        state = store.read_state(checkpoint)
        if state["seed"] != self.config.run.seed:
            raise UserError(
                f"{checkpoint} was made with run.seed={state['seed']}, not {self.config.run.seed}; samples would repeat"
            )
        if state["prompts"] != len(self.source):
            raise UserError(
                f"{checkpoint} was made with {state['prompts']} prompts, data.train now has {len(self.source)}: the "
                "order would be another (keys: data.train, data.max_prompt_length)"
            )
        self.step = state["step"]
        warmed: int | None = state.get("warm_start")
        await self.dispatcher.load(checkpoint, begun=warmed is None)
        if warmed is None:
            pool = await asyncio.to_thread(load_pending_groups, checkpoint, self.source.at)
            self.collector.restore(state, pool)
            await self._serve(version=self.step)
        if self.group.rank == 0:
            rewind(self.folder, self.step, warmed)
            rewind_samples(self.folder, self.step, warmed)
            for later in store.complete(self.folder):
                if store.position(later) > (int(warmed is None), self.step if warmed is None else warmed):
                    store.set_aside(later)  # the run takes another course from here on
        self._open_writer()
        at = f"step {self.step}" if warmed is None else f"step {warmed} of the warm start"
        self.note(f"resumed from {checkpoint} at {at}")
        return warmed

    async def _load_engines(self) -> None:
        """Evaluation of a checkpoint: there is no trainer, so controller 0 reads the weights for the engines."""
        if self.group.rank == 0 and self.config.run.resume not in ("never", "auto"):
            weights = load_file(Path(self.config.run.resume) / "model.safetensors")
            await asyncio.gather(*(engine.load_weights(0, weights) for engine in self.engines))
        await self.group.all_gather("weights to evaluate", None)

    def _open_writer(self) -> None:
        config = self.config
        logged = config.observe.samples_per_step
        if logged:
            self._samples = SampleLog(self.folder, self.group.rank, config.run.seed, logged, config.run.steps)
        if self.group.rank == 0:
            self._writer = MetricsWriter(self.folder, config.observe, config.run.name, config.model_dump(mode="json"))

    async def _warm_start(self, done: int) -> None:
        """Supervised steps on the dataset's answers, through the same layout and the same trainer."""
        warm = self.config.training.warm_start
        if warm is None:
            return
        for i in range(done, warm.steps):
            self._stage, self._detail = "warm start", f"{i}/{warm.steps}"
            cursors = range(i * warm.batch_size, (i + 1) * warm.batch_size)
            samples = [self._demonstration(c) for c in cursors if c % self.group.size == self.group.rank]
            with self.timed("warm_start", i + 1):
                _, batches = await self.dispatcher.dispatch_samples(i + 1, samples, "imitation")
                ranks = await self.dispatcher.update(batches)
            loss = sum(rank.sums["loss"] for rank in ranks)
            self._write(
                {
                    "phase": "warm_start",
                    "step": i + 1,
                    "warm_start/loss": loss,
                    "warm_start/lr": ranks[0].lr,
                    "timing_s/step": self._times.pop("warm_start"),
                }
            )
            every = self.config.checkpoint.every
            if every and (i + 1 == warm.steps or (i + 1) % every == 0):
                await self.checkpoint(warm=i + 1)
                self._times.pop("checkpoint")  # it belongs to no step

    def _demonstration(self, cursor: int) -> Sample:
        prompt, answer_S = self.source.at(cursor), self.source.demonstration(cursor)
        return Sample(
            prompt_id=cursor,
            sibling=0,
            tokens_T=np.concatenate([prompt.tokens_P, answer_S]),
            mask_S=np.ones(len(answer_S), np.bool_),
            rollout_logprobs_S=np.zeros(len(answer_S), np.float32),
            advantages_S=np.ones(len(answer_S), np.float32),
        )

    # ---- evaluation and checkpoints -------------------------------------------------------------------------------

    async def evaluate_if_due(self) -> None:
        every = self.config.observe.eval_every
        if self.step == self.config.run.steps or (every and self.step % every == 0):
            await self.evaluate()

    async def evaluate(self) -> dict[str, Any]:
        """Greedy answers to the held-out prompts, each controller its share."""
        if self.held_out is None:
            return {}
        with self.timed("eval", self.step):
            size, rank = self.group.size, self.group.rank
            prompts = [self.held_out.at(i) for i in range(len(self.held_out)) if i % size == rank]
            async with self.placing(self.step, len(prompts)):
                collected = await answer_all(self.workflow, self.greedy, prompts, self.report)
            name = self.config.rewards.accuracy_name
            scored = [s for group in collected.groups for s in group]
            judged = [s.parts[name] for s in scored if name in s.parts]
            sums = (exact(judged), len(judged), exact(s.reward for s in scored), len(scored), collected.dropped.total())
            parts = await self.group.all_gather("evaluation", sums)
        accuracy, judged_count, reward, count, failed = (sum(part[i] for part in parts) for i in range(5))
        row = {
            "eval/accuracy": float(accuracy / judged_count) if judged_count else None,
            "eval/reward_mean": float(reward / count) if count else None,
            "eval/prompts": count,
            "eval/failed": failed,
            "timing_s/eval": self._times.pop("eval"),
        }
        self._write({"step": self.step, **row})
        if self._samples is not None:
            self._samples.write_eval(self.step, collected.groups)
        return row

    async def checkpoint_if_due(self) -> None:
        every = self.config.checkpoint.every
        if self.step == self.config.run.steps or (every and self.step % every == 0):
            await self.checkpoint()

    async def checkpoint(self, warm: int | None = None) -> None:
        """`warm`: steps of the warm start that are done, where reinforcement learning has not begun."""
        with self.timed("checkpoint", self.step):
            kind: store.Kind = "step" if warm is None else "warm"
            step = self.step if warm is None else warm
            partial = self.folder / f"{kind}_{step}.partial"
            if self.group.rank == 0:
                partial = store.begin(self.folder, step, self._state_bytes + (16 << 20), kind)
            await self.group.all_gather("checkpoint folder", None)
            place, groups = self.collector.place(), list(self.collector.ready.values())  # of one and the same moment
            places = await self.group.all_gather("places among the prompts", place)
            await asyncio.to_thread(save_pending_groups, partial, self.group.rank, groups)
            await self.dispatcher.save(partial)
            if self.group.rank == 0:
                state = {
                    "step": self.step,
                    **merge_places(places, self.config.sampling.strict),
                    "seed": self.config.run.seed,
                    "prompts": len(self.source),
                    **({} if warm is None else {"warm_start": warm}),
                }
                await asyncio.to_thread(store.commit, partial, state, self.config.checkpoint.keep)
            await self.group.all_gather("checkpoint sealed", None)

    # ---- metrics and status ---------------------------------------------------------------------------------------

    async def choose_placement(self) -> dict[int, EngineClient] | None:
        """The policy engines that serve the next rollout, awake. None: all engines, always."""
        return None if self.placement is None else await self.placement.begin(self.collector.rate)

    async def _serve(self, version: int) -> None:
        """Before the first step: the same as Controller.weights after a step."""
        await self.dispatcher.update_weights(version, await self.choose_placement())
        self.collector.version = version

    async def rest(self, step: int) -> None:
        """After the rollout, engines free their memory for the trainer. They wake for the new weights."""
        if self.placement is None:
            await self.dispatcher.rest()
        else:
            await self.placement.rest(step)

    @contextlib.asynccontextmanager
    async def placing(self, step: int, num_prompts: int | None = None) -> AsyncIterator[None]:
        """While samples are made, slots may change hands. `num_prompts`: of an evaluation, which draws no others."""
        if self.placement is None:
            yield
            return
        progress = self.collector.progress if num_prompts is None else _all_of(num_prompts)
        async with self.placement.during(progress, step):
            yield

    async def check_failures(self, step: int, metas: Sequence[SampleMeta], collected: Collected) -> None:
        """Prompts that failed are counted, and too many of them end the run. All controllers get the causes."""
        trained, wanted = len({meta.prompt_id for meta in metas}), self.config.sampling.prompts_per_step
        failed, decided = collected.failed_everywhere, collected.decided_everywhere
        if failed:
            causes = await self.group.all_gather(f"failures of step {step}", collected.cause)
            cause = next((c for c in causes if c is not None), "unknown")
            limit = self.config.rewards.max_error_frac
            if failed / decided > limit or failed == decided:
                raise UserError(
                    f"step {step}: {failed} of {decided} prompts failed (rewards.max_error_frac={limit}); "
                    f"first cause: {cause}"
                )
            self.note(f"step {step}: {failed} of {decided} prompts failed and were dropped; first cause: {cause}")
        if trained < wanted and not self.config.sampling.fixed:
            self.note(
                f"step {step}: trains on {trained} of {wanted} groups; the {self.config.sampling.window} prompts of "
                "sampling.max_draws are used up"
            )

    async def record(
        self, step: int, collected: Collected, metas: Sequence[SampleMeta], ranks: Sequence[UpdateStats]
    ) -> None:
        for stage in ("generation", "rewarding"):
            self._times[stage] = collected.stage_s.get(stage, 0.0)
        aborted = self.pool.take_aborted()
        if self.config.sampling.strict:
            aborted = 0, 0  # none of those is before the end of the step in prompt order
        sums = {
            **record.local_sums(collected, step - 1, aborted),
            **record.overlong_sum(collected, self.config),
            "counts": self.shared.rewarder.take_counts(),
            "bytes_out": self.dispatcher.bytes_out,
            "times": dict(self._times),
        }
        self.dispatcher.bytes_out = 0
        gathered = await self.group.all_gather(f"metrics of step {step}", sums)
        times = {name: max(part["times"].get(name, 0.0) for part in gathered) for name in sums["times"]}
        tokens = sum(part["tokens"] for part in gathered)
        row = {
            "step": step,
            **record.rollout_row(gathered, metas),
            **record.actor_row(ranks),
            **self.dispatcher.slept,
            **(self.placement.row() if self.placement is not None else {}),
            "perf/tokens_per_s": tokens / times["step"],
            "controller/bytes_in": max(part["tokens"] * 8 for part in gathered),
            "controller/bytes_out": max(part["bytes_out"] for part in gathered),
            **{f"timing_s/{name}": seconds for name, seconds in times.items()},
        }
        self._times.clear()
        self._write(row)
        if self._samples is not None:
            self._samples.write(step, {meta.prompt_id for meta in metas}, collected.groups)
        self.tracer.flush()

    def _write(self, row: dict[str, Any]) -> None:
        self._rows = [*self._rows[-50:], row]
        if self._writer is not None:
            self._writer.log(row)

    def note(self, text: str) -> None:
        if self.group.rank == 0:
            self._notes.append(text)

    def report(self, detail: str) -> None:
        self._detail = detail

    @contextlib.contextmanager
    def timed(self, name: str, step: int | None = None) -> Iterator[None]:
        if name != "step":
            self._stage, self._detail = name, ""
        started = time.perf_counter()
        with self.tracer.span(name, step=self.step + 1 if step is None else step):
            yield
        self._times[name] = time.perf_counter() - started

    async def status(self) -> ControllerStatus:
        """For the progress view, with the rows and notes that the driver has not seen yet."""
        rows, self._rows = self._rows, []
        notes, self._notes = self._notes, []
        rows = rows if self.group.rank == 0 else []
        return ControllerStatus(f"controller-{self.group.rank}", self._stage, self._detail, self.step, rows, notes)


def _all_of(num_prompts: int) -> Callable[[], RolloutProgress]:
    """The progress of an evaluation as placement sees it: everything is under way until it is over."""
    return lambda: RolloutProgress(float(num_prompts), 0, 0, num_prompts, 1.0)
