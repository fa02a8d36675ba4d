"""No mode of sampling that is called unbiased prefers short responses: see bench/bias.py for the whole table."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import random
import statistics
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from bench.virtual_loop import VirtualLoop
from gcore.config.advice import warnings
from gcore.config.sampling import Sampling
from gcore.config.tree import Config
from gcore.controller.record import rollout_row
from tests.unit.rollouts import World, numbers, run

BENCH = Path(__file__).parents[2] / "bench" / "bias.py"


@pytest.fixture(scope="module")
def bias() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bias", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained_length(sampling: Sampling, size: int, drop: float, seed: int) -> float:
    """Mean seconds that the groups took that were trained on, over the mean of all groups there are. A group that is
    made again takes another time, as with engines without seeds; whether it has spread does not depend on that."""
    took: dict[int, float] = {}

    def delay(prompt: int, attempt: int) -> float:
        took[prompt] = random.Random(f"{seed}/{prompt}/{attempt}").lognormvariate(-0.5, 1.0) / 10  # mean 0.1
        return took[prompt]

    def outcome(prompt: int, version: int) -> bool:
        return random.Random(f"{seed}/{prompt}").random() >= drop

    world = World(sampling, size, delay, outcome, train_s=0.05)
    run(world.train(60))
    return 10 * statistics.mean(took[number] for found in world.steps[5:] for number in numbers(found))


MODES = {
    "deterministic": {"filter": "spread"},
    "keep": {"filter": "spread", "surplus": "keep"},
    "first come": {"filter": "spread", "deterministic": False, "oversampling": 1.5},  # that keeps, too
    "keep, no filter": {"filter": "none", "surplus": "keep"},
    "staleness 1": {"filter": "spread", "max_staleness": 1},
    "staleness 2": {"filter": "spread", "max_staleness": 2},
    "staleness 1, no filter": {"filter": "none", "max_staleness": 1},
}


@pytest.mark.parametrize("size", [4, *(pytest.param(size, marks=pytest.mark.release) for size in (1, 8))])
@pytest.mark.parametrize("mode", MODES)
def test_trained_lengths_are_those_of_the_population(mode, size):
    sampling = Sampling(prompts_per_step=16, samples_per_prompt=2, **MODES[mode])
    found = [trained_length(sampling, size, 0.5 if sampling.filter == "spread" else 0.0, seed) for seed in range(3)]
    assert statistics.mean(found) == pytest.approx(1.0, abs=0.06)


def test_the_mode_that_is_called_biased_is():
    """Else the measure could not see it."""
    sampling = Sampling(
        prompts_per_step=16, samples_per_prompt=2, filter="spread", deterministic=False, surplus="abort"
    )
    assert sampling.prefers_short
    assert statistics.mean(trained_length(sampling, 4, 0.5, seed) for seed in range(3)) < 0.75


def small(bias: ModuleType) -> argparse.Namespace:
    size = "--groups 8 --siblings 2 --engines 1 --slots 32 --train-s 3 --most-tokens 1024 --oversampling 1.5"
    args: argparse.Namespace = bias.parse(size.split())
    return args


@pytest.mark.parametrize(("mode", "low", "high"), [("first come, abort", 0.0, 0.9), ("keep", 0.9, 1.1)])
def test_the_logged_length_bias_tells_them_apart(bias, mode, low, high):
    async def run() -> float:
        team = bias.Team(mode, "spread", 2, False, 0, small(bias))
        steps = [await team.step(number) for number in range(1, 16)]
        team.close()
        trained = sum(sum(step["lengths"]) for step in steps), sum(len(step["lengths"]) for step in steps)
        eligible = [sum(step["eligible"][i] for step in steps) for i in (0, 1)]
        return trained[0] / trained[1] / (eligible[0] / eligible[1])

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert low <= runner.run(run()) <= high


def test_the_row_has_the_ratio_of_the_means():
    part = {
        **dict.fromkeys(["samples", "groups", "reward", "no_spread", "clipped", "reward_drawn"], 1),
        **dict.fromkeys(["samples_drawn", "drawn", "pending", "age", "max_age", "max_length", "peak_rss_mb"], 1),
        **{"dropped": {}, "counts": {}, "parts": {}, "tokens": 30, "tokens_eligible": 160, "samples_eligible": 4},
        **{"rewards": np.ones(1), "lengths": np.full(1, 30), "tool_calls": {}},
    }
    assert rollout_row([part], [])["rollout/length_bias"] == 0.75
    assert "rollout/length_bias" not in rollout_row([{**part, "tokens": 0, "tokens_eligible": 0}], [])


def test_the_biased_mode_is_warned_of():
    def said(**sampling: object) -> list[str]:
        tree = {"model": {"build": {}}, "data": {"train": {"task": "arithmetic"}, "max_prompt_length": 64}}
        tree |= {"rewards": {"functions": [{"name": "f", "path": "x:f"}]}, "generation": {"max_response_length": 64}}
        return [line for line in warnings(Config.model_validate({**tree, "sampling": sampling})) if "short" in line]

    (line,) = said(filter="spread", deterministic=False, surplus="abort")
    assert "surplus=abort prefers short responses" in line
    for sampling in ({}, {"filter": "spread"}, {"filter": "spread", "deterministic": False}, {"max_staleness": 1}):
        assert said(**sampling) == []
