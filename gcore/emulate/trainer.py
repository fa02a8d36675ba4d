"""An emulated trainer rank: it takes time but trains nothing. Controllers lay out, push, update and save as usual.

    push ──> samples by key ──update: every key of the batch must be present──> sleep: seconds_per_token x its tokens

Its weights are one number, the count of its updates: enough to test versions, checkpoints and their order.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from gcore.checkpoint.store import write_file
from gcore.config.training import EmulatedTraining
from gcore.config.tree import Config
from gcore.hub import model_folder
from gcore.protocols import ExchangedColumn, Metric, Receivers, TrainerInfo, UpdateStats, WeightPlan, Weights
from gcore.types import Floats, Key, Sample, TrainBatch, UserError, Written

FILE = "emulated_trainer.json"
ZERO_METRICS = (  # those of training/objective.py that readers of metrics.jsonl expect
    *(f"actor/{name}" for name in ("loss", "pg_loss", "entropy", "clip_frac", "approx_kl")),
    *(f"rollout/{name}" for name in ("logprob_diff_mean", "importance_capped_frac", "importance_floored_frac")),
)


class EmulatedTrainer:
    """Implements protocols.Trainer, without torch. EmulatedTrainer(seconds_per_token=1e-4, hidden_size=4096)"""

    def __init__(self, seconds_per_token: float, *, hidden_size: int = 128, lr: float = 0.0, rank: int = 0) -> None:
        self.seconds_per_token, self.hidden_size, self.lr, self.rank = seconds_per_token, hidden_size, lr, rank
        self.updates = 0
        self._samples: dict[Key, Sample] = {}
        self._staged = b""  # the content of a checkpoint

    async def info(self) -> TrainerInfo:
        return TrainerInfo(num_parameters=1, hidden_size=self.hidden_size)

    async def end_warm_start(self) -> None:
        self.updates = 0

    async def push(self, source: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            assert sample.key not in self._samples, f"sample {sample.key} pushed twice (now by controller {source})"
            self._samples[sample.key] = sample

    async def compute_logprobs(self, batch: TrainBatch) -> Mapping[Key, float]:
        """A forward pass: a third of the time of an update. The KL is 0: the policy always equals the reference."""
        await self._work(self._of(batch.keys), 1 / 3)
        return dict.fromkeys(batch.keys, 0.0)

    async def column(self, name: ExchangedColumn, keys: Sequence[Key]) -> Mapping[Key, Floats]:
        return {sample.key: np.zeros(sample.num_steps, np.float32) for sample in self._of(keys)}

    async def take_column(self, name: ExchangedColumn, values: Mapping[Key, Floats]) -> None:
        pass

    async def load_policy(self, weights: Weights) -> None:
        pass

    async def update(self, batch: TrainBatch) -> UpdateStats:
        samples = self._of(batch.keys)
        await self._work(samples, 1.0)
        self._samples.clear()
        updates = len(batch.mini_batches)
        self.updates += updates
        actions = float(sum(int(sample.mask_S.sum()) for sample in samples))
        zeros = dict.fromkeys(ZERO_METRICS, Metric(0.0, actions))
        metrics = {**zeros, "rollout/importance_mean": Metric(actions, actions)}
        return UpdateStats(updates, lr=self.lr * updates, metrics=metrics)

    async def evaluate(self, batch: TrainBatch) -> Mapping[str, Metric]:
        await self._work(self._of(batch.keys), 1 / 3)
        self._samples.clear()
        return {}

    async def weight_plan(self) -> WeightPlan:
        return WeightPlan(num_buckets=1, every_rank=False)

    async def weight_bucket(self, index: int, receivers: Receivers) -> Weights:
        return {"emulated.updates": np.array([self.updates])} if self.rank == 0 else {}

    async def snapshot(self) -> int:
        self._staged = json.dumps({"updates": self.updates}).encode()
        return len(self._staged)

    async def write(self, folder: str) -> Written:
        try:
            return Written({FILE: write_file(Path(folder) / FILE, [self._staged])} if self.rank == 0 else {})
        except OSError as error:
            return Written({}, error=str(error))

    async def abandon(self) -> None:
        self._staged = b""

    async def load(self, folder: str, after_warm_start: bool = True) -> None:
        file = Path(folder) / FILE
        if not file.is_file():
            raise UserError(f"{folder} has no {FILE}; expected a checkpoint written with training.backend=emulated")
        self.updates = json.loads(file.read_text())["updates"]
        self._samples.clear()

    def _of(self, keys: Iterable[Key]) -> list[Sample]:
        """The samples of a batch. All must have been pushed: otherwise the layout and the pushes disagree."""
        wanted = list(keys)
        missing = [key for key in wanted if key not in self._samples]
        assert not missing, f"trainer-{self.rank} never received {missing[:3]} of its {len(wanted)} samples"
        assert len(set(wanted)) == len(wanted), f"trainer-{self.rank} would train on a sample twice"
        return [self._samples[key] for key in wanted]

    async def _work(self, samples: Sequence[Sample], share: float) -> None:
        await asyncio.sleep(share * self.seconds_per_token * sum(sample.content.size for sample in samples))


def trainer_of(config: Config, section: EmulatedTraining, rank: int) -> EmulatedTrainer:
    model = config.model
    if model.build is not None:
        width = model.build.hidden_size
    else:
        width = json.loads((model_folder(model) / "config.json").read_text()).get("hidden_size", 4096)
    return EmulatedTrainer(section.seconds_per_token, hidden_size=width, lr=config.training.lr, rank=rank)
