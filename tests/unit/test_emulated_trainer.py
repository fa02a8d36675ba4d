"""The emulated trainer in virtual time, and the configuration of emulation."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from bench.virtual_loop import VirtualLoop
from gcore.config.tree import Config
from gcore.content.tokens import Tokens
from gcore.cost.workload import CostModel
from gcore.emulate.trainer import EmulatedTrainer
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import meta_of
from gcore.protocols import Metric, Receivers, TrainerInfo, WeightPlan
from gcore.types import Sample, TrainBatch, UserError

ROOT = Path(__file__).parents[2]


def sample(prompt: int, length: int, sibling: int = 0) -> Sample:
    """`length` tokens, two of them the prompt's."""
    steps, numbers = length - 2, np.zeros(length - 2, np.float32)
    content = Tokens.split(np.zeros(length, np.int32), steps)
    return Sample(prompt, sibling, content, np.ones(steps, np.bool_), numbers)


def laid_out(samples: list[Sample], ranks: int, mini_batches: int = 1) -> list[TrainBatch]:
    return make_layout(
        [meta_of(s) for s in samples],
        step=1,
        num_ranks=ranks,
        cost=CostModel(crossover=768.0),
        objective="policy",
        mini_batches=mini_batches,
        max_tokens=64,
    )


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(asyncio.wait_for(main(), 1e6))


def now() -> float:
    return asyncio.get_running_loop().time()


def test_it_takes_a_third_of_its_time_to_prepare_and_the_whole_to_update():
    async def main() -> None:
        trainer = EmulatedTrainer(0.03, lr=0.5)
        samples = [sample(n, 10 + n) for n in range(5)]  # 60 tokens
        (batch,) = laid_out(samples, 1, mini_batches=2)
        await trainer.push(0, samples[:3])
        await trainer.push(1, samples[3:])
        await trainer.compute_logprobs(batch)
        assert now() == pytest.approx(0.6)  # 60 x 0.03 / 3
        stats = await trainer.update(batch)
        assert now() == pytest.approx(2.4)
        assert stats.metrics["rollout/importance_mean"] == Metric(50.0, 50.0)
        assert stats.metrics["actor/loss"].value == 0.0
        assert (stats.updates, stats.lr, stats.skipped) == (2, 1.0, 0)
        await trainer.push(0, samples)  # the update removed all samples

    run(main)


def test_ranks_share_the_tokens():
    async def main() -> list[float]:
        samples = [sample(n, 12) for n in range(8)]
        batches, took = laid_out(samples, 2), []
        for rank, batch in enumerate(batches):
            trainer, began = EmulatedTrainer(0.01, rank=rank), now()
            keys = {
                key for mini in batch.mini_batches for micro in mini.micro_batches for row in micro.rows for key in row
            }
            await trainer.push(0, [s for s in samples if s.key in keys])
            await trainer.update(batch)
            took.append(now() - began)
        return took

    assert run(main) == pytest.approx([0.48, 0.48])


def test_a_layout_with_samples_that_were_not_pushed_is_detected():
    async def main() -> None:
        trainer, samples = EmulatedTrainer(0.0), [sample(1, 5), sample(2, 5)]
        (batch,) = laid_out(samples, 1)
        await trainer.push(0, samples[:1])
        with pytest.raises(AssertionError, match=r"never received \[\(2, 0\)\] of its 2"):
            await trainer.update(batch)
        with pytest.raises(AssertionError, match="pushed twice"):
            await trainer.push(0, samples)

    run(main)


def test_rank_0_has_the_weights_and_a_checkpoint_restores_the_updates(tmp_path):
    async def main() -> None:
        ranks = [EmulatedTrainer(0.0, rank=rank) for rank in range(2)]
        batches = laid_out([sample(1, 5), sample(2, 5)], 2)
        for n, (trainer, batch) in enumerate(zip(ranks, batches, strict=True)):
            await trainer.end_warm_start()
            for key in [
                key for mini in batch.mini_batches for micro in mini.micro_batches for r in micro.rows for key in r
            ]:
                await trainer.push(n, [sample(key[0], 5)])
            await trainer.update(batch)
            await trainer.snapshot()
            await trainer.write(str(tmp_path))
        assert [p.name for p in tmp_path.iterdir()] == ["emulated_trainer.json"]
        to = Receivers(("engine-0",))
        assert await ranks[0].weight_plan() == WeightPlan(1, every_rank=False)
        assert {name: value.tolist() for name, value in (await ranks[0].weight_bucket(0, to)).items()} == {
            "emulated.updates": [1]
        }
        assert await ranks[1].weight_bucket(0, to) == {}
        others = [EmulatedTrainer(0.0, rank=rank) for rank in range(3)]
        for trainer in others:
            await trainer.load(str(tmp_path))
        assert [trainer.updates for trainer in others] == [1, 1, 1]
        with pytest.raises(UserError, match=r"training\.backend=emulated"):
            await ranks[0].load(str(tmp_path / "elsewhere"))
        assert await ranks[0].info() == TrainerInfo(num_parameters=1, hidden_size=128)

    run(main)


# ---- configuration


def recipe(**top: Any) -> dict[str, Any]:
    return {
        "model": {"build": {}},
        "data": {"train": {"task": "arithmetic"}, "max_prompt_length": 32},
        "generation": {"engine": "emulated", "emulated": {}, "max_response_length": 32},
        "rewards": {"functions": [{"name": "exact", "path": "gcore.rewarding.rules:exact_answer"}]},
        "training": {"backend": "emulated", "emulated": {}},
        **top,
    }


def test_a_recipe_may_emulate_all_roles_or_only_the_engines():
    assert Config.model_validate(recipe()).generation.emulated is not None
    assert Config.model_validate(recipe(training={})).training.backend == "fsdp"


@pytest.mark.parametrize(
    ("top", "words"),
    [
        (
            {"generation": {"engine": "emulated", "max_response_length": 32}},
            "engine=emulated, section `emulated` is not set",
        ),
        ({"generation": {"emulated": {}, "max_response_length": 32}}, "engine=embedded, section `emulated` is set"),
        ({"training": {"backend": "emulated"}}, "section `training.emulated` is not set"),
        ({"training": {"emulated": {}}}, "training.backend=fsdp, section `training.emulated` is set"),
        ({"generation": {"max_response_length": 32}}, "has no weights for engines, got generation.engine=embedded"),
    ],
)
def test_incompatible_settings_are_rejected(top, words):
    with pytest.raises(ValidationError, match=words):
        Config.model_validate(recipe(**top))


def test_emulated_roles_are_built_without_torch():
    """A laptop must be able to run a hundred such processes."""
    code = f"""
import sys
from gcore.config.tree import Config
from gcore.launch.build import build_engine, build_judge, build_trainer
from gcore.launch.machines import detect_machine
from gcore.launch.plan import make_plan
from gcore.protocols import Rendezvous
config = Config.model_validate({recipe()!r} | {{"rewards": {{"judges": [{{"name": "judge", "model": {{"build": {{}}}},
    "template": "{{{{ response }}}}", "engine": "emulated", "emulated": {{"mean_tokens": 7, "sigma": 0}}}}]}}}})
here = Rendezvous(1, 2, None)
plan = make_plan(config, detect_machine())
engine, judge = build_engine(config, plan, here), build_judge(config, plan, "judge", here)
trainer = build_trainer(config, plan, here)
print(engine.max_length, judge.speed.max_concurrent, trainer.rank, trainer.hidden_size)
print([m for m in ("torch", "ray", "transformers") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.split("\n")[:2], done.returncode) == (["64 256 1 128", "[]"], 0), done.stderr
