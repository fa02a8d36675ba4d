"""Everything before the first step, once per run: from a controller's setup to the services of its loop.

prompts measured ──> checkpoint restored, or warm start ──> first weights to the engines ──> first evaluation
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

from safetensors.numpy import load_file

from gcore.config.tree import Dataset
from gcore.controller.checkpointing import START, Checkpointer, RunPosition
from gcore.controller.collect import Collector
from gcore.controller.evaluation import Evaluator
from gcore.controller.record import Recorder
from gcore.controller.services import Services
from gcore.controller.setup import Setup
from gcore.controller.warm_start import warm_start
from gcore.observe.metrics import MetricsWriter, rewind
from gcore.observe.samples import SampleLog, rewind_samples
from gcore.prompts.rows import load_rows
from gcore.prompts.source import PromptSource, Templater, measure
from gcore.types import UserError


async def open_run(setup: Setup) -> tuple[Services, int]:
    """The services, and the last step that is done: 0, or the step of the checkpoint."""
    config, dispatcher = setup.config, setup.dispatcher
    source, held_out = await _load_prompts(setup)
    collector = Collector(
        setup.workflow,
        setup.sample_context(),
        setup.group,
        config.sampling,
        setup.keep,
        setup.status.report,
        source,
        lambda: dispatcher.version,
    )
    info = await dispatcher.open()
    checkpointer = Checkpointer(setup, source, collector, info.num_parameters)
    position = await _resume(setup, checkpointer, collector)
    recorder = _open_recorder(setup)
    services = Services(
        config=config,
        group=setup.group,
        collector=collector,
        rewarder=setup.rewarder,
        dispatcher=dispatcher,
        weights=setup.weights,
        placement=setup.placement,
        recorder=recorder,
        evaluator=Evaluator(setup, recorder, held_out),
        checkpointer=checkpointer,
        status=setup.status,
    )
    if position.warmed is not None:
        await warm_start(services, source, position.warmed)
        await dispatcher.begin()
        await _serve(setup, collector, version=0)
        await services.evaluator.evaluate(position.step)
    if config.run.steps == 0:  # `gcore sft`: the warm start is the whole run
        await checkpointer.save(RunPosition(position.step, warmed=None))
    return services, position.step


async def open_evaluation(setup: Setup) -> Evaluator:
    """`gcore eval`: there is no trainer and no file is written. Controller 0 reads the weights for the engines."""
    _, held_out = await _load_prompts(setup)
    resume = setup.config.run.resume
    if setup.group.rank == 0 and resume not in ("never", "auto"):
        weights = load_file(Path(resume) / "model.safetensors")
        await asyncio.gather(*(engine.load_weights(0, weights) for engine in setup.pool.replicas))
    await setup.group.all_gather("weights to evaluate", None)
    return Evaluator(setup, Recorder(setup), held_out)


# ---- prompts ---------------------------------------------------------------------------------------------------------


async def _load_prompts(setup: Setup) -> tuple[PromptSource, PromptSource | None]:
    """To train on, and held out."""
    data = setup.config.data
    setup.status.show("loading data")
    source = await _load(setup, data.train, "train", data.shuffle)
    return source, None if data.eval is None else await _load(setup, data.eval, "eval", shuffle=False)


async def _load(setup: Setup, dataset: Dataset, split: Literal["train", "eval"], shuffle: bool) -> PromptSource:
    """Each controller measures its part of the rows; the kept row numbers are shared."""
    key, limit = f"data.{split}", setup.config.data.max_prompt_length
    rows = load_rows(dataset, key)
    templater = Templater(setup.tokenizer, setup.config.data, split)
    mine = measure(rows, templater, limit, setup.group.rank, setup.group.size)
    parts = await setup.group.all_gather(f"prompts of {key}", (mine.kept, mine.too_long))
    kept = sorted(i for part in parts for i in part[0])
    too_long = sorted(i for part in parts for i in part[1])
    if too_long:
        setup.status.note(
            f"{key}: dropped {len(too_long)} of {len(rows)} prompts over data.max_prompt_length={limit} "
            f"(rows {', '.join(map(str, too_long[:5]))}{', ...' if len(too_long) > 5 else ''})"
        )
    if not kept:
        raise UserError(f"{key}: all {len(rows)} prompts are longer than data.max_prompt_length={limit}")
    return PromptSource(rows, kept, templater, setup.config.run.seed, shuffle)


# ---- where the run goes on -------------------------------------------------------------------------------------------


async def _resume(setup: Setup, checkpointer: Checkpointer, collector: Collector) -> RunPosition:
    """The position of the checkpoint that run.resume means, restored; START without one."""
    config, folder = setup.config, setup.config.run.folder
    checkpoint = await checkpointer.find()
    if checkpoint is None:
        if config.run.resume == "auto":
            again = "; the warm start begins again" if config.training.warm_start else ""
            setup.status.note(f"{folder}: no complete checkpoint; starting anew{again}")
        return START
    setup.status.show(f"resuming from {checkpoint.name}")
    position = await checkpointer.restore(checkpoint)
    if position.warmed is None:
        await _serve(setup, collector, version=position.step)
    if setup.group.rank == 0:
        rewind(folder, position.step, position.warmed)
        rewind_samples(folder, position.step, position.warmed)
        checkpointer.set_aside_later(position)
    setup.status.note(f"resumed from {checkpoint} at {position}")
    return position


async def _serve(setup: Setup, collector: Collector, version: int) -> None:
    """Engines for the first rollout, and their weights: as the loop does it after each step."""
    engines = await setup.placement.begin(collector.rate)
    await setup.dispatcher.update_weights(version, engines)


def _open_recorder(setup: Setup) -> Recorder:
    """After a resume has shortened the files that it appends to."""
    config, rank, folder = setup.config, setup.group.rank, setup.config.run.folder
    writer = samples = None
    if per_step := config.observe.samples_per_step:
        samples = SampleLog(folder, rank, config.run.seed, per_step, config.run.steps)
    if rank == 0:
        writer = MetricsWriter(folder, config.observe, config.run.name, config.model_dump(mode="json"))
    return Recorder(setup, writer, samples)
