"""Histograms of rewards and lengths: exact counts, bins that do not depend on the order of controllers, the charts."""

from __future__ import annotations

import numpy as np

from gcore.observe.histograms import MAX_VALUES, counted, histogram_charts


def test_few_values_are_counted_exactly():
    assert counted([1, 0, 1, 0.25]) == {"values": [0, 0.25, 1], "counts": [1, 1, 2]}
    assert counted([]) is None


def test_many_values_are_counted_in_equal_bins():
    values = np.random.default_rng(0).normal(size=500)
    one, other = counted(values), counted(values[::-1])
    assert one == other and sum(one["counts"]) == 500 and len(one["values"]) <= MAX_VALUES
    assert one["values"][0] > values.min() and one["values"][-1] < values.max()


def rows(*histograms):
    return [
        {"step": i, "reward/mean": 0.5, "histogram/reward": found, "histogram/response_length": None}
        for i, found in enumerate(histograms, start=1)
    ]


def test_the_first_and_the_last_steps_are_compared():
    early, late = {"values": [0, 1], "counts": [3, 1]}, {"values": [0, 0.5, 1], "counts": [1, 1, 2]}
    (chart,) = histogram_charts({"run": rows(*[early] * 10, *[late] * 10)})  # no lengths: no chart
    assert chart["title"] == "Rewards" and chart["edges"] == [-0.25, 0.25, 0.75, 1.25]
    assert chart["series"] == [
        {"name": "steps 1 to 2", "y": [0.75, 0.0, 0.25]},
        {"name": "steps 19 to 20", "y": [0.25, 0.25, 0.5]},
    ]


def test_runs_are_compared_by_their_last_steps():
    early, late = {"values": [3], "counts": [4]}, {"values": [5], "counts": [2]}
    (chart,) = histogram_charts({"a": rows(early, late), "b": rows(late, early)})
    assert [(one["name"], one["y"]) for one in chart["series"]] == [("a", [0.0, 1.0]), ("b", [1.0, 0.0])]


def test_values_of_uneven_distance_get_equal_bars():
    (chart,) = histogram_charts({"run": rows({"values": [0, 0.1, 7.3], "counts": [1, 1, 2]})})
    assert len(chart["edges"]) == MAX_VALUES + 1
    assert [sum(one["y"]) for one in chart["series"]] == [1.0]


def test_rows_of_older_runs_have_no_histograms():
    assert histogram_charts({"run": [{"step": 1, "reward/mean": 0.5}], "other": []}) == []
