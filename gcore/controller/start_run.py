"""The start of a run, before its first step: makes those services of the training loop that need the prompts.

load prompts ──> restore a checkpoint, or warm start and first evaluation ──> engines have weights ──> step
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from gcore.config.secrets import learn, redacted
from gcore.controller.checkpointing import START, Checkpointer, RunPosition
from gcore.controller.collect import Collector
from gcore.controller.evaluation import Evaluator
from gcore.controller.record import Recorder, values_of
from gcore.controller.services import Services
from gcore.observe.metrics import MetricsWriter, rewind
from gcore.observe.samples import SampleLog
from gcore.prompts.curriculum import make_curriculum
from gcore.prompts.source import PromptSource, Templater, add_digests, check_bad_rows, measure, rows_of
from gcore.types import Sample, UserError
from gcore.workflows.context import stored_answers


async def open_run(services: Services) -> int:
    """Returns the last completed step: 0, or the step of the checkpoint."""
    config, dispatcher = services.config, services.dispatcher
    await services.endpoint.join(services.controllers)
    source, held_out = await _load_prompts(services)
    curriculum = make_curriculum(config.sampling.curriculum, source.rows, source.kept, config.run.seed)
    services.collector = Collector(
        stored_answers if config.is_offline else services.workflow,
        services.sample_context(),
        services.controllers,
        config.sampling,
        services.group_filter,
        services.status.report,
        source,
        lambda: services.weights.version,
        curriculum,
    )
    async with services.weights.training():  # engines that die in this block are restarted after it
        await dispatcher.open()
        services.checkpointer = Checkpointer(services, source)
        position = await _resume(services)  # sends the first weights too, if training was resumed
        services.recorder = _open_recorder(services)
        services.evaluator = Evaluator(services, held_out)
        if position.before_training:
            await _warm_start(services, source, position.warmed or 0)
            await dispatcher.end_warm_start()
            await _send_first_weights(services, version=0)
    if position.before_training:
        await services.evaluator.evaluate(position.step)
    if config.run.total_steps == 0:  # `gcore sft`: the warm start is the whole run
        async with services.weights.trainers_in_use:
            await services.checkpointer.save(RunPosition(position.step, warmed=None))
    return position.step


async def open_evaluation(services: Services) -> int:
    """`gcore eval`: no trainer, no output files. Controller 0 reads the weights and sends them to the engines. Returns
    the step of the checkpoint, or 0."""
    if services.config.trains_on_answers("eval"):
        raise UserError(
            f"gcore eval generates answers and scores them, and this recipe has no rewards: the metrics of objective="
            f"{services.config.objective} are logged in training (key: rewards)"
        )
    await services.endpoint.join(services.controllers)
    _, held_out = await _load_prompts(services)
    resume, pool, missed = services.config.run.resume, services.pool, list[str]()
    async with services.weights.trainers_in_use:
        if services.controllers.rank == 0 and resume not in ("never", "auto"):
            served = await services.weights.load_saved(Path(resume) / "weights", dict(enumerate(pool.replicas)))
            missed = [engine.name for engine in pool.replicas if engine.name not in served]
        for name in (await services.controllers.all_gather("weights to evaluate", missed))[0]:
            pool.mark_dead(name)  # until it is restarted
    services.recorder = Recorder(services)
    services.evaluator = Evaluator(services, held_out)
    kind, _, number = Path(resume).name.partition("_")
    return int(number) if kind == "step" and number.isdigit() else 0


# ---- prompts --------------------------------------------------------------------------------------------------------


async def _load_prompts(services: Services) -> tuple[PromptSource, dict[str, PromptSource]]:
    """The prompts to train on, and the held-out prompts of each evaluation set."""
    data = services.config.data
    services.status.show("loading data")
    source = await _load(services, "train", services.kind.templater("train"), data.shuffle)
    templaters = {name: services.kind.templater("eval", name) for name in data.eval_sets}
    return source, {
        name: await _load(services, "eval", templater, shuffle=False) for name, templater in templaters.items()
    }


async def _load(
    services: Services, split: Literal["train", "eval"], templater: Templater, shuffle: bool
) -> PromptSource:
    """Each controller measures a part of the rows. The numbers of rows that fit are gathered."""
    config, key, limit = services.config, templater.key, services.config.data.max_prompt_length
    rows, answers = rows_of(config, split, templater)
    part = services.controllers.rank, services.controllers.size
    mine = measure(rows, templater, limit, *part, answers, services.rewarder.check if answers is None else None)
    parts = await services.controllers.all_gather(f"prompts of {key}", mine)
    kept = sorted(i for part in parts for i in part.kept)
    too_long = sorted(i for part in parts for i in part.too_long)
    if equal := sorted(i for part in parts for i in part.equal):
        services.status.note(
            f"{key}: dropped {len(equal)} of {len(rows)} pairs whose two answers are equal{_some(equal)}"
        )
    longest = config.generation.max_response_length
    over = "" if answers is None else f" or answers over generation.max_response_length={longest}"
    if too_long:
        services.status.note(
            f"{key}: dropped {len(too_long)} of {len(rows)} prompts over data.max_prompt_length={limit}{over}"
            f"{_some(too_long)}"
        )
    bad = {index: why for part in parts for index, why in part.bad.items()}
    if message := check_bad_rows(bad, len(rows), services.config.data.media.max_bad_rows, key):
        services.status.note(message)
    if not kept:
        what = "pairs have two equal answers or prompts" if equal else "prompts are"
        raise UserError(f"{key}: all {len(rows)} {what} longer than data.max_prompt_length={limit}{over}")
    digest = add_digests(part.digest for part in parts)
    return PromptSource(rows, kept, templater, services.config.run.seed, shuffle, digest)


def _some(rows: list[int]) -> str:
    return f" (rows {', '.join(map(str, rows[:5]))}{', ...' if len(rows) > 5 else ''})"


# ---- warm start -----------------------------------------------------------------------------------------------------


async def _warm_start(services: Services, source: PromptSource, done: int) -> None:
    """Supervised steps on the answers of the dataset, dispatched and computed as in training. `done`: those that the
    restored checkpoint has completed."""
    config, group, status = services.config, services.controllers, services.status
    warm, every = config.training.warm_start, config.checkpoint.every
    if warm is None:
        return
    for step in range(done + 1, warm.steps + 1):
        status.show("warm start", f"{step - 1}/{warm.steps}")
        cursors = range((step - 1) * warm.batch_size, step * warm.batch_size)
        samples = [_demonstration(source, c) for c in cursors if c % group.size == group.rank]
        with status.timed("warm_start", step):
            _, batches = await services.dispatcher.dispatch_samples(step, samples, "warm_start")
            ranks = await services.dispatcher.update(batches)
        services.recorder.write(
            {
                "phase": "warm_start",
                "step": step,
                **values_of(ranks),
                "warm_start/lr": ranks[0].lr,
                "timing_s/step": status.take_seconds("warm_start"),
            }
        )
        if every and (step == warm.steps or step % every == 0):
            await services.checkpointer.save(RunPosition(step=0, warmed=step))
            status.take_seconds("checkpoint")  # not part of a step of reinforcement learning


def _demonstration(source: PromptSource, cursor: int) -> Sample:
    answer = source.demonstration(cursor)
    ones = np.ones(answer.num_steps, np.float32)
    return Sample(
        prompt_id=cursor,
        sibling=0,
        content=source.at(cursor).content.extended(answer),
        mask_S=ones > 0,
        rollout_logprobs_S=0 * ones,
    )


# ---- resume ---------------------------------------------------------------------------------------------------------


async def _resume(services: Services) -> RunPosition:
    """Restore the checkpoint that run.resume selects and return its position; START if there is none."""
    config, folder, checkpointer = services.config, services.config.run.folder, services.checkpointer
    checkpoint = await checkpointer.find()
    if checkpoint is None:
        if config.run.resume == "auto":
            again = ", with the warm start" if config.training.warm_start else ""
            services.status.note(f"{folder}: no complete checkpoint; starting from the beginning{again}")
        if services.controllers.rank == 0:  # after a rollback, files have rows of the lost steps
            rewind(folder, START.step, START.warmed)
        return START
    services.status.show(f"resuming from {checkpoint.name}")
    position = await checkpointer.restore(checkpoint)
    if position.warmed is None:
        await _send_first_weights(services, version=position.step)
    if services.controllers.rank == 0:
        rewind(folder, position.step, position.warmed)
        checkpointer.set_aside_later(position)
    begun = services.collector.begun_again
    begins = f"; {begun} prompts that were in progress begin again" if begun else ""
    services.status.note(f"resumed from {checkpoint} at {position}{begins}")
    return position


async def _send_first_weights(services: Services, version: int) -> None:
    """Choose the engines of the first rollout and send them weights, as the loop does after each step."""
    engines = await services.placement.choose_engines(services.collector.rate)
    await services.weights.update(version, engines)


def _open_recorder(services: Services) -> Recorder:
    """Call after `_resume`, which truncates the files that the recorder appends to."""
    config, rank, folder = services.config, services.controllers.rank, services.config.run.folder
    writer = samples = None
    learn(config.model_dump(mode="json"))
    if per_step := config.observe.samples_per_step:
        hidden = services.modality.hidden_steps
        samples = SampleLog(folder, rank, config.run.seed, per_step, config.run.total_steps, hidden)
    if rank == 0:
        writer = MetricsWriter(folder, config.observe, config.run.name, redacted(config.model_dump(mode="json")))
    return Recorder(services, writer, samples)
