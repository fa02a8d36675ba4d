"""Rows of metrics from the sums of controllers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from gcore.controller.record import exact_sum, rollout_row

COUNTS = ["groups", "no_spread", "clipped", "reward_drawn", "samples_drawn", "drawn", "pending", "age", "max_age"]


def part_of(rewards: np.ndarray) -> dict[str, object]:
    return {
        **dict.fromkeys([*COUNTS, "max_length", "peak_rss_mb", "samples_eligible"], 1),
        **{"dropped": {}, "counts": {}, "tool_calls": {}, "parts": {}, "lengths": np.ones(len(rewards))},
        **dict.fromkeys(["samples", "tokens", "tokens_eligible"], len(rewards)),
        **{"reward": exact_sum(rewards.tolist()), "rewards": rewards},
    }


def test_tool_calls_of_all_controllers_are_counted():
    one, other = part_of(np.ones(2)), {**part_of(np.ones(2)), "tool_calls": {"calls": 3, "unparsed_calls": 1}}
    row = rollout_row([other, one, other], [])
    assert (row["tools/calls"], row["tools/unparsed_calls"]) == (6, 2)
    assert "tools/calls" not in rollout_row([one], [])


@pytest.mark.parametrize(("mean", "spread"), [(1e6, 1.0), (1e8, 1.0), (1e3, 1e-3), (0.5, 0.5), (-1e29, 1e20)])
def test_the_spread_of_rewards_is_exact_for_any_number_of_controllers(mean, spread):
    """A difference of squares is 0 or noise for N(1e8, 1)."""
    rewards = np.random.default_rng(0).normal(mean, spread, 96)
    exact = [Fraction(value) for value in rewards.tolist()]
    center = sum(exact) / 96
    variance = float(sum((value - center) ** 2 for value in exact) / 96)
    found = [
        rollout_row([part_of(part) for part in np.split(rewards[::step], num)], [])["reward/std"]
        for num in (1, 2, 4)
        for step in (1, -1)
    ]
    assert len(set(found)) == 1 and found[0] ** 2 == pytest.approx(variance, rel=1e-9)
    assert rollout_row([part_of(rewards[:0])], [])["reward/std"] == 0.0
