"""The trainer ranks of a reward model, driven by `gcore train-rm`: one controller, several ranks, no engines.

    pairs of tokens ──samples, layout (dispatch.py)──> ranks ──update ("reward_model")──> metrics, checkpoints

The ranks, the layout, the checkpoints and their format are those of `gcore train`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from gcore import __version__
from gcore.checkpoint import store
from gcore.clients import TrainerClient
from gcore.config import dump_config
from gcore.config.reward_model import RewardModelConfig
from gcore.config.tree import Config
from gcore.content.tokens import Tokens
from gcore.controller.build import build_runtime, see_cluster
from gcore.controller.build_ranks import build_trainer
from gcore.controller.dispatch import Dispatcher
from gcore.controller.plan import make_plan
from gcore.generation.pool import EnginePool
from gcore.protocols import Group, Metric, UpdateStats, add_metrics
from gcore.types import Ints, Sample, UserError

T = TypeVar("T")
Pair = tuple[Ints, Ints]  # (chosen_T, rejected_T): the tokens of two conversations, the first is preferred
OBJECTIVE: Final = "reward_model"


class Alone:
    """Implements protocols.Group for the only controller."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1

    async def all_gather(self, name: str, value: Any) -> list[Any]:
        return [value]

    async def reduce(self, name: str, value: T, merge: Callable[[T, T], T]) -> T:
        return value

    async def barrier(self, name: str) -> None:
        """There is no other member."""

    def subgroup(self) -> Group:
        return self


def run_config(config: RewardModelConfig, longest: int) -> Config:
    """The configuration of the ranks. `longest`: tokens of a conversation."""
    training, names = config.training, ("lr", "schedule", "warmup_steps", "weight_decay", "weight_decay_norms", "betas")
    given = {name: getattr(training, name) for name in (*names, "max_grad_norm", "max_bad_updates", "device", "dtype")}
    tree = {
        "run": {"name": config.run.name, "dir": config.run.dir, "seed": config.run.seed, "steps": training.steps},
        "objective": OBJECTIVE,
        "model": config.model.model_dump(),
        "data": {"train": {"path": config.data.train.path}, "max_prompt_length": max(1, longest - 1)},
        "generation": {"max_response_length": 1},
        "sampling": {"prompts_per_step": training.batch_size},
        "training": {**given, "max_tokens_per_gpu": max(training.max_tokens_per_batch, 2 * longest)},
        "placement": {"trainer": {"ranks": training.ranks, "threads": training.threads}},
        "runtime": "local" if training.ranks == 1 else "ray",
        "controllers": 1,
        "checkpoint": {"asynchronous": False},
        "observe": {"trace": False, "logs": training.ranks > 1},
    }
    return Config.model_validate(tree)


@asynccontextmanager
async def started(config: RewardModelConfig, longest: int) -> AsyncIterator[ScoreRanks]:
    """The ranks, until the end of the block."""
    inner = run_config(config, longest)
    plan = make_plan(inner, see_cluster(inner))
    runtime = build_runtime(inner, plan)
    try:
        handles = await runtime.start_group("trainer", build_trainer, [(inner, plan)] * plan.trainers)
        ranks = ScoreRanks(config, inner, [TrainerClient(handle) for handle in handles])
        await ranks.open()
        yield ranks
    finally:
        runtime.stop()


class ScoreRanks:
    """Update, evaluate, save and load on all ranks."""

    def __init__(self, config: RewardModelConfig, inner: Config, trainers: Sequence[TrainerClient]) -> None:
        self._tree, self._folder, self._keep = dump_config(config), config.run.folder, config.training.keep_last
        pool = EnginePool.for_controller((), 0, 1, 1)
        self._dispatcher = Dispatcher(inner, Alone(), pool, trainers)
        self.num_parameters = 0

    async def open(self) -> None:
        self.num_parameters = (await self._dispatcher.open()).num_parameters
        await self._dispatcher.begin()

    async def update(self, step: int, pairs: Sequence[Pair]) -> dict[str, float]:
        """One optimizer step. It is skipped if the gradient is not finite."""
        _, batches = await self._dispatcher.dispatch_samples(step, _samples(pairs), OBJECTIVE)
        ranks: list[UpdateStats] = await self._dispatcher.update(batches)
        first, metrics = ranks[0], add_metrics(*(rank.metrics for rank in ranks))
        found = {"grad_norm": first.grad_norm, "lr": first.lr, "skipped": float(first.skipped)}
        return {**_summary(metrics), **found}

    async def evaluate(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Means over the pairs: `loss`, `accuracy` (how often chosen scores higher), `margin` (by how much)."""
        _, batches = await self._dispatcher.dispatch_samples(0, _samples(pairs), OBJECTIVE)
        return _summary(await self._dispatcher.evaluate(batches))

    async def save(self, step: int) -> Path:
        """Write a checkpoint and delete older ones."""
        num_bytes = await self._dispatcher.snapshot()
        try:
            partial = store.begin(self._folder, step, num_bytes, "step")
            written = await self._dispatcher.write(partial)
            if error := next((each.error for each in written if each.error), ""):
                raise UserError(f"run.dir: a checkpoint of step {step} was not written: {error}")
            files = {name: entry for each in written for name, entry in each.files.items()}
            state = {"step": step, "train_rm": self._tree, "version": __version__}
            about = {"kind": "step", "step": step, "topology": self._dispatcher.topology, "version": __version__}
            final = store.commit(partial, files, state, about)
        except OSError as error:
            raise UserError(f"run.dir: cannot write {self._folder}: {error.strerror or error}") from None
        store.retain(final, store.Retention(self._keep, 0, 0))
        return final

    async def load(self, checkpoint: Path) -> int:
        """The step of the checkpoint. UserError if another recipe wrote it."""
        state = store.read_state(store.verify(checkpoint))
        changed = _changes(str(state.get("train_rm", "")), self._tree)
        if changed:
            raise UserError(
                f"{checkpoint} was made by a recipe that differs: {changed} (change it back, or run.resume=never)"
            )
        await self._dispatcher.load(checkpoint, True)
        return int(state["step"])


def _samples(pairs: Sequence[Pair]) -> list[Sample]:
    """The last token of a conversation is its only step: see training/score_model.py."""
    one, zero = np.ones(1, np.bool_), np.zeros(1, np.float32)
    return [
        Sample(i, sibling, Tokens.split(tokens, 1), one, zero, reward=1.0 - sibling)
        for i, pair in enumerate(pairs)
        for sibling, tokens in enumerate(pair)
    ]


def _summary(metrics: dict[str, Metric]) -> dict[str, float]:
    return {name: metrics[f"preference/{name}"].value for name in ("loss", "accuracy", "margin")}


FREE = (
    "name:",
    "dir:",
    "resume:",
    "ranks:",
    "device:",
    "threads:",
    "checkpoint_every:",
    "keep_last:",
    "max_tokens_per",
)


def _changes(before: str, after: str) -> str:
    """Lines of the recipe that differ, without those that do not change the result."""
    old, new = ({line.strip() for line in text.splitlines()} for text in (before, after))
    return "; ".join(sorted(line for line in old ^ new if not line.startswith(FREE)))
