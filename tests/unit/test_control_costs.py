"""The cost model of the control plane: what it counts, and that a fit finds the costs that made the measurements."""

from __future__ import annotations

import itertools

import pytest

from bench.control_costs import ControlCosts, Observation, Step, fit, fit_layout, predict


def test_calls_of_a_step():
    """128 groups of 8 on 64 ranks, as in the text workload of bench/controllers.py."""
    alone = Step(samples=1024, ranks=64, controllers=1)
    assert alone.calls == pytest.approx(128 + 64 + 64, rel=1e-6)  # every rank gets samples
    many = Step(samples=1024, ranks=64, controllers=16)
    assert 16 * many.calls == pytest.approx(128 + 16 * 64 * (1 - (63 / 64) ** 64) + 64)
    assert 800 < 16 * many.calls < 900  # the bench counted 850


def test_more_controllers_share_calls_samples_and_parts_of_the_layout():
    costs = ControlCosts(0.01, 0.001, 0.0005, 1e-5, deal_s=5e-6, layout_s=6e-5)
    one, four = (predict(Step(4096, 64, n), costs) for n in (1, 4))
    assert four.own_s == one.own_s / 4 and four.layout_s == one.layout_s == 4096 * 6e-5  # one part
    assert (one.known_s, four.known_s) == (0.0, pytest.approx(1e-5 * 3072))
    assert four.busiest_s == pytest.approx(four.each_s + 4096 * 6e-5)
    alone, few, many = (predict(Step(65536, 4096, n, parts=16), costs).layout_s for n in (1, 4, 64))
    assert alone == pytest.approx(65536 * (5e-6 + 6e-5))
    assert few == pytest.approx(65536 * (5e-6 + 6e-5 / 4)) and many == pytest.approx(65536 * (5e-6 + 6e-5 / 16))
    assert predict(Step(65536, 4096, 64, parts=16), costs).largest == "calls"


def test_a_fit_finds_the_costs():
    costs = ControlCosts(0.02, 0.0015, 0.0004, 2e-5)
    steps = [
        Step(s, r, n, calls_per_group=c)
        for s, r, n, c in itertools.product((256, 1024), (64, 512), (1, 4, 16), (1, 40))
    ]
    seen = [Observation(s.calls, s.own_samples, s.samples - s.own_samples, predict(s, costs).each_s) for s in steps]
    found, error = fit(seen)
    assert error < 1e-9 and found.call_s == pytest.approx(costs.call_s) and found.known_s == pytest.approx(2e-5)
    none = [Observation(1.0, float(own), 0.0, 0.1 - 0.001 * own) for own in range(3)]  # would need a negative cost
    assert min(fit(none)[0].own_s, fit(none)[0].call_s) >= 0
    layouts = [(s, parts, (5e-6 * s if parts > 1 else 0) + 6e-5 * s / parts) for s, parts in ((1024, 1), (8192, 4))]
    assert fit_layout(found, layouts).deal_s == pytest.approx(5e-6)
    assert fit_layout(found, layouts).layout_s == pytest.approx(6e-5)
