"""The start of a run, before its first step: makes the services of the training loop from a controller's setup.

load prompts ──> restore a checkpoint, or warm start and first evaluation ──> engines have weights ──> Services, step
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

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
from gcore.prompts.source import PromptSource, Templater, add_digests, measure
from gcore.types import UserError


async def open_run(setup: Setup) -> tuple[Services, int]:
    """The services, and the last completed step: 0, or the step of the checkpoint."""
    config, dispatcher = setup.config, setup.dispatcher
    source, held_out = await _load_prompts(setup)
    collector = Collector(
        setup.workflow,
        setup.sample_context(),
        setup.controllers,
        config.sampling,
        setup.group_filter,
        setup.status.report,
        source,
        lambda: dispatcher.version,
    )
    await dispatcher.open()
    checkpointer = Checkpointer(setup, source, collector)
    position = await _resume(setup, checkpointer, collector)  # sends the first weights too, if training was resumed
    recorder = _open_recorder(setup)
    services = Services(
        config=config,
        controllers=setup.controllers,
        collector=collector,
        rewarder=setup.rewarder,
        dispatcher=dispatcher,
        weight_resender=setup.weight_resender,
        placement=setup.placement,
        recorder=recorder,
        evaluator=Evaluator(setup, recorder, held_out),
        checkpointer=checkpointer,
        status=setup.status,
    )
    if position.before_training:
        await warm_start(services, source, position.warmed or 0)
        await dispatcher.begin()
        await _send_first_weights(setup, collector, version=0)
        await services.evaluator.evaluate(position.step)
    if config.run.steps == 0:  # `gcore sft`: the warm start is the whole run
        await checkpointer.save(RunPosition(position.step, warmed=None))
    return services, position.step


async def open_evaluation(setup: Setup) -> Evaluator:
    """`gcore eval`: no trainer, no output files. Controller 0 reads the weights and sends them to the engines."""
    _, held_out = await _load_prompts(setup)
    resume = setup.config.run.resume
    if setup.controllers.rank == 0 and resume not in ("never", "auto"):
        await _send_saved_weights(setup, Path(resume) / "weights")
    await setup.controllers.all_gather("weights to evaluate", None)
    return Evaluator(setup, Recorder(setup), held_out)


async def _send_saved_weights(setup: Setup, folder: Path) -> None:
    """From a checkpoint to the engines, one bucket in memory at a time."""
    import torch

    from gcore.checkpoint.tensors import read, shapes
    from gcore.weights.bucket import bucket_names

    sizes = {name: torch.empty(shape, device="meta") for name, shape in shapes(folder).items()}
    buckets = bucket_names(sizes, torch.float32)
    for index, names in enumerate(buckets):
        weights = {name: t.numpy() for name, t in (await asyncio.to_thread(read, folder, names)).items()}
        sent = (engine.load_weights(0, weights, (index, len(buckets))) for engine in setup.pool.replicas)
        await asyncio.gather(*sent)


# ---- prompts --------------------------------------------------------------------------------------------------------


async def _load_prompts(setup: Setup) -> tuple[PromptSource, PromptSource | None]:
    """The prompts to train on, and the held-out prompts."""
    data = setup.config.data
    setup.status.show("loading data")
    source = await _load(setup, data.train, "train", data.shuffle)
    return source, None if data.eval is None else await _load(setup, data.eval, "eval", shuffle=False)


async def _load(setup: Setup, dataset: Dataset, split: Literal["train", "eval"], shuffle: bool) -> PromptSource:
    """Each controller measures a part of the rows. The numbers of rows that fit are gathered."""
    key, limit = f"data.{split}", setup.config.data.max_prompt_length
    rows = load_rows(dataset, key)
    templater = Templater(setup.tokenizer, setup.config.data, split)
    mine = measure(rows, templater, limit, setup.controllers.rank, setup.controllers.size)
    parts = await setup.controllers.all_gather(f"prompts of {key}", mine)
    kept = sorted(i for part in parts for i in part.kept)
    too_long = sorted(i for part in parts for i in part.too_long)
    if too_long:
        setup.status.note(
            f"{key}: dropped {len(too_long)} of {len(rows)} prompts over data.max_prompt_length={limit} "
            f"(rows {', '.join(map(str, too_long[:5]))}{', ...' if len(too_long) > 5 else ''})"
        )
    if not kept:
        raise UserError(f"{key}: all {len(rows)} prompts are longer than data.max_prompt_length={limit}")
    digest = add_digests(part.digest for part in parts)
    return PromptSource(rows, kept, templater, setup.config.run.seed, shuffle, digest)


# ---- resume ---------------------------------------------------------------------------------------------------------


async def _resume(setup: Setup, checkpointer: Checkpointer, collector: Collector) -> RunPosition:
    """Restore the checkpoint that run.resume selects and return its position; START if there is none."""
    config, folder = setup.config, setup.config.run.folder
    checkpoint = await checkpointer.find()
    if checkpoint is None:
        if config.run.resume == "auto":
            again = ", with the warm start" if config.training.warm_start else ""
            setup.status.note(f"{folder}: no complete checkpoint; starting from the beginning{again}")
        if setup.controllers.rank == 0:  # after a rollback, files have rows of the lost steps
            _rewind_files(folder, START)
        return START
    setup.status.show(f"resuming from {checkpoint.name}")
    position = await checkpointer.restore(checkpoint)
    if position.warmed is None:
        await _send_first_weights(setup, collector, version=position.step)
    if setup.controllers.rank == 0:
        _rewind_files(folder, position)
        checkpointer.set_aside_later(position)
    setup.status.note(f"resumed from {checkpoint} at {position}")
    return position


def _rewind_files(folder: Path, position: RunPosition) -> None:
    """Drop what was written about later steps: the run makes these steps again."""
    rewind(folder, position.step, position.warmed)
    rewind_samples(folder, position.step, position.warmed)


async def _send_first_weights(setup: Setup, collector: Collector, version: int) -> None:
    """Choose the engines of the first rollout and send them weights, as the loop does after each step."""
    engines = await setup.placement.choose_engines(collector.rate)
    await setup.dispatcher.update_weights(version, engines)


def _open_recorder(setup: Setup) -> Recorder:
    """Call after `_resume`, which truncates the files that the recorder appends to."""
    config, rank, folder = setup.config, setup.controllers.rank, setup.config.run.folder
    writer = samples = None
    if per_step := config.observe.samples_per_step:
        samples = SampleLog(folder, rank, config.run.seed, per_step, config.run.steps)
    if rank == 0:
        writer = MetricsWriter(folder, config.observe, config.run.name, config.model_dump(mode="json"))
    return Recorder(setup, writer, samples)
