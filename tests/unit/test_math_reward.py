"""The math reward: what counts as the final answer, what counts as equal, and references that cannot be read."""

import asyncio
import logging
import signal
import threading

import pytest

from gcore.config.rewards import RewardFunction, Rewards
from gcore.rewarding import math
from gcore.rewarding.math import math_answer
from gcore.rewarding.rewarder import WeightedRewarder
from gcore.rewarding.workers import WorkerPool
from gcore.types import UserError
from tests.unit.test_reward_workers import group_of

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so \boxed{\frac12}", "0.5", 1),
        (r"\boxed{\dfrac{3}{4}}", "3/4", 1),
        (r"Thus $x = \frac{1}{2}$.", "1/2", 1),
        ("the result is 3/4", r"\frac{3}{4}", 1),
        ("The answer is 18.", "She has 9 + 9 = 18\n#### 18", 1),
        ("first 18, then 19", "18", 0),
        ("1,234", 1234, 1),
        (r"\boxed{-7}", "7", 0),
        (r"\boxed{\{2, 1\}}", "{1,2}", 1),
        (r"\boxed{\{1, 2, 3\}}", "{1,2}", 0),
        (r"$\boxed{1}$ and $\boxed{2}$", r"\{2,1\}", 1),
        (r"\boxed{1} wait no \boxed{2}", "2", 1),
        (r"\boxed{1} wait no \boxed{2}", "1", 0),
        (r"\boxed{5}, \boxed{5}", "5", 1),
        (r"\boxed{(1,2)}", "(1,2)", 1),
        (r"\boxed{[1,2]}", "(1,2)", 0),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1),
        (r"\boxed{1+x^2}", "x^2+1", 1),
        (r"\boxed{5}", r"It is \boxed{5} apples", 1),
        ("<answer>42</answer>", "42", 1),
        ("3 <answer>x^2+1</answer> 4", "1+x^2", 1),
        ("<answer>the answer is 42</answer>", "42", 1),
        ("<answer>41</answer> <answer>42</answer>", "41", 0),
        ([{"role": "assistant", "content": r"\boxed{42}"}], "42", 1),
        (r"\boxed{5", "5", 0),
        ("I do not know", "5", 0),
        ("", "5", 0),
        ("$\\frac{" * 50, "5", 0),
    ],
)
def test_final_answers(completion, answer, expected):
    assert math_answer(None, [completion], [answer]) == [expected]


@pytest.mark.parametrize("answer", ["????", "", r"\frac{1}{"])
def test_a_reference_that_cannot_be_read_is_no_zero(answer):
    with pytest.raises(ValueError, match=r"cannot parse the reference answer .*answer_column"):
        math_answer(None, ["5", "6"], ["5", answer])


def test_no_reference_is_no_zero():
    with pytest.raises(ValueError, match="no reference answer"):
        math_answer(None, ["None"], [None])


def test_an_answer_that_takes_forever_is_wrong_and_the_next_is_judged(caplog):
    before = signal.getsignal(signal.SIGPROF)
    with caplog.at_level(logging.WARNING):
        tower = r"\boxed{9^{9^{9^9}}}"
        assert math_answer(None, [tower, r"\boxed{5}", "9**9**9**9"], ["5", "5", "5"], limit_s=0.3) == [0.0, 1.0, 0.0]
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert not caplog.records


def test_a_reference_that_takes_forever_is_no_zero(monkeypatch):
    def spin(text):
        while True:
            pass

    monkeypatch.setattr(math, "_parse", spin)
    with pytest.raises(ValueError, match="cannot parse the reference answer '5'"):
        math_answer(None, ["5"], ["5"], limit_s=0.2)


def test_works_in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(math_answer(None, [r"\boxed{1/2}", "3"], ["0.5", "4"])))
    thread.start()
    thread.join()
    assert found == [1.0, 0.0]


def test_works_in_a_worker():
    spec = RewardFunction(name="math", path="gcore.rewarding.math:math_answer")
    rewarder = WeightedRewarder(WorkerPool(Rewards(functions=[spec]), 1).sources)
    rewarder.check(["answer"])
    try:
        scored = asyncio.run(rewarder.reward(group_of(r"\boxed{\frac{1}{2}}", "2", answer="0.5")))
        assert [s.reward for s in scored] == [1.0, 0.0]
    finally:
        rewarder.close()


def test_the_package_is_missed_before_the_run(monkeypatch):
    monkeypatch.setattr(math.importlib.util, "find_spec", lambda name: None)
    functions = [RewardFunction(name="m", path="gcore.rewarding.math:math_answer")]
    (source,) = WorkerPool(Rewards(functions=functions), num_workers=1).sources
    with pytest.raises(UserError, match=r"pip install 'gcore-rl\[math\]'"):
        source.check(["answer"])
