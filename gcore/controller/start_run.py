"""The start of a run, before its first step: makes the services of the training loop from a controller's setup.

load prompts ──> restore a checkpoint, or warm start and first evaluation ──> engines have weights ──> Services, step
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gcore.config.secrets import learn, redacted
from gcore.controller.checkpointing import START, Checkpointer, RunPosition
from gcore.controller.collect import Collector
from gcore.controller.evaluation import Evaluator
from gcore.controller.record import Recorder
from gcore.controller.services import Services
from gcore.controller.setup import Setup
from gcore.controller.warm_start import warm_start
from gcore.observe.metrics import MetricsWriter, rewind
from gcore.observe.placement_log import rewind_placement
from gcore.observe.samples import SampleLog, rewind_samples
from gcore.prompts.curriculum import make_curriculum
from gcore.prompts.source import PromptSource, Templater, add_digests, check_bad_rows, measure, rows_of
from gcore.types import UserError


async def open_run(setup: Setup) -> tuple[Services, int]:
    """The services, and the last completed step: 0, or the step of the checkpoint."""
    config, dispatcher = setup.config, setup.dispatcher
    source, held_out = await _load_prompts(setup)
    curriculum = make_curriculum(config.sampling.curriculum, source.rows, source.kept, config.run.seed)
    collector = Collector(
        setup.training_workflow,
        setup.sample_context(),
        setup.controllers,
        config.sampling,
        setup.group_filter,
        setup.status.report,
        source,
        lambda: dispatcher.version,
        curriculum,
    )
    async with setup.weight_resender.training():  # engines that die in this block are restarted after it
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
            scoring=setup.scoring,
            placement=setup.placement,
            recorder=recorder,
            evaluator=Evaluator(setup, recorder, held_out),
            checkpointer=checkpointer,
            status=setup.status,
            gate=setup.gate,
        )
        if position.before_training:
            await warm_start(services, source, position.warmed or 0)
            await dispatcher.begin()
            await _send_first_weights(setup, collector, version=0)
    if position.before_training:
        await services.evaluator.evaluate(position.step)
    if config.run.total_steps == 0:  # `gcore sft`: the warm start is the whole run
        async with setup.weight_resender.trainers_in_use:
            await checkpointer.save(RunPosition(position.step, warmed=None))
    return services, position.step


async def open_evaluation(setup: Setup) -> tuple[Evaluator, int]:
    """`gcore eval`: no trainer, no output files. Controller 0 reads the weights and sends them to the engines. Also
    returns the step of the checkpoint, or 0."""
    if setup.config.trains_on_answers("eval"):
        raise UserError(
            f"gcore eval generates answers and scores them, and this recipe has no rewards: the metrics of objective="
            f"{setup.config.objective} are logged in training (key: rewards)"
        )
    _, held_out = await _load_prompts(setup)
    resume, pool, missed = setup.config.run.resume, setup.pool, list[str]()
    async with setup.weight_resender.trainers_in_use:
        if setup.controllers.rank == 0 and resume not in ("never", "auto"):
            served = await setup.weight_resender.load_saved(Path(resume) / "weights", dict(enumerate(pool.replicas)))
            missed = [engine.name for engine in pool.replicas if engine.name not in served]
        for name in (await setup.controllers.all_gather("weights to evaluate", missed))[0]:
            pool.mark_dead(name)  # until it is restarted
    kind, _, number = Path(resume).name.partition("_")
    return Evaluator(setup, Recorder(setup), held_out), int(number) if kind == "step" and number.isdigit() else 0


# ---- prompts --------------------------------------------------------------------------------------------------------


async def _load_prompts(setup: Setup) -> tuple[PromptSource, dict[str, PromptSource]]:
    """The prompts to train on, and the held-out prompts of each evaluation set."""
    data = setup.config.data
    setup.status.show("loading data")
    source = await _load(setup, "train", setup.kind.templater("train"), data.shuffle)
    templaters = {name: setup.kind.templater("eval", name) for name in data.eval_sets}
    return source, {name: await _load(setup, "eval", found, shuffle=False) for name, found in templaters.items()}


async def _load(setup: Setup, split: Literal["train", "eval"], templater: Templater, shuffle: bool) -> PromptSource:
    """Each controller measures a part of the rows. The numbers of rows that fit are gathered."""
    config, key, limit = setup.config, templater.key, setup.config.data.max_prompt_length
    rows, answers = rows_of(config, split, templater)
    part = setup.controllers.rank, setup.controllers.size
    mine = measure(rows, templater, limit, *part, answers, setup.rewarder.check if answers is None else None)
    parts = await setup.controllers.all_gather(f"prompts of {key}", mine)
    kept = sorted(i for part in parts for i in part.kept)
    too_long = sorted(i for part in parts for i in part.too_long)
    if equal := sorted(i for part in parts for i in part.equal):
        setup.status.note(f"{key}: dropped {len(equal)} of {len(rows)} pairs whose two answers are equal{_some(equal)}")
    longest = config.generation.max_response_length
    over = "" if answers is None else f" or answers over generation.max_response_length={longest}"
    if too_long:
        setup.status.note(
            f"{key}: dropped {len(too_long)} of {len(rows)} prompts over data.max_prompt_length={limit}{over}"
            f"{_some(too_long)}"
        )
    bad = {index: why for part in parts for index, why in part.bad.items()}
    if message := check_bad_rows(bad, len(rows), setup.config.data.media.max_bad_rows, key):
        setup.status.note(message)
    if not kept:
        what = "pairs have two equal answers or prompts" if equal else "prompts are"
        raise UserError(f"{key}: all {len(rows)} {what} longer than data.max_prompt_length={limit}{over}")
    digest = add_digests(part.digest for part in parts)
    return PromptSource(rows, kept, templater, setup.config.run.seed, shuffle, digest)


def _some(rows: list[int]) -> str:
    return f" (rows {', '.join(map(str, rows[:5]))}{', ...' if len(rows) > 5 else ''})"


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
    rewind_placement(folder, position.step, position.warmed)


async def _send_first_weights(setup: Setup, collector: Collector, version: int) -> None:
    """Choose the engines of the first rollout and send them weights, as the loop does after each step."""
    engines = await setup.placement.choose_engines(collector.rate)
    await setup.dispatcher.update_weights(version, engines)


def _open_recorder(setup: Setup) -> Recorder:
    """Call after `_resume`, which truncates the files that the recorder appends to."""
    config, rank, folder = setup.config, setup.controllers.rank, setup.config.run.folder
    writer = samples = None
    learn(config.model_dump(mode="json"))
    if per_step := config.observe.samples_per_step:
        hidden = setup.modality.hidden_steps
        samples = SampleLog(folder, rank, config.run.seed, per_step, config.run.total_steps, hidden)
    if rank == 0:
        writer = MetricsWriter(folder, config.observe, config.run.name, redacted(config.model_dump(mode="json")))
    return Recorder(setup, writer, samples)
