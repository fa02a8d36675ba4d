"""Rewarding: the signatures people have, and failures that are never a zero."""

import asyncio
import functools
import inspect
import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from gcore.config.rewards import RewardFunction
from gcore.content.tokens import Tokens
from gcore.prompts.tasks import make_task
from gcore.rewarding import rules
from gcore.rewarding.functions import FunctionSource, answer_here, calls_of
from gcore.rewarding.rewarder import WeightedRewarder
from gcore.rewarding.signatures import load_reward, recognise
from gcore.types import Prompt, RewardError, Rollout, UserError
from gcore.user_files import load_function

KEY = "rewards.functions"


def group_of(*texts: str, messages=({"role": "user", "content": "1+1="},), **columns) -> list[Rollout]:
    prompt = Prompt(70, 6, tuple(messages), "<bos>1+1=", Tokens(np.array([1, 2], np.int32)), columns)
    n = len(texts)
    steps = np.zeros(2, np.float32)
    return [
        Rollout(
            prompt, i, Tokens.steps(np.array([i, 2], np.int32)), steps, steps == 0, text, np.zeros(2, np.int32), "stop"
        )
        for i, text in zip(range(n), texts, strict=True)
    ]


def rewarder_of(*functions, weights=(), attempts=2, **args) -> WeightedRewarder:
    """A rewarder of functions that live here."""
    for index, function in enumerate(functions):
        globals()[f"_function_{index}"] = function
    specs = [
        RewardFunction(
            name=f"f{i}",
            path=f"{__name__}:_function_{i}",
            weight=weights[i] if weights else 1.0,
            args=args if i == 0 else {},
        )
        for i in range(len(functions))
    ]
    return WeightedRewarder(
        [FunctionSource(s, attempts, f"rewards.functions.{i}") for i, s in enumerate(specs)], backoff_s=0
    )


def score(rewarder: WeightedRewarder, group):
    return asyncio.run(rewarder.reward(group))


def call(function, group, **args):
    loaded = recognise(function, args, KEY)
    return asyncio.run(answer_here(loaded, calls_of(loaded, group), len(group)))


# --- shipped rules


def test_exact_answer():
    assert rules.exact_answer(None, [" 85\n", "85.", "58"], ["85", "85 ", 58]) == [1.0, 0.0, 1.0]
    assert rules.exact_answer(None, [[{"role": "assistant", "content": "85"}]], ["85"]) == [1.0]
    with pytest.raises(ValueError, match="answer_column"):
        rules.exact_answer(None, ["None"], [None])


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("so 12 and then 85.", "85", 1.0),
        ("85 or 86", "85", 0.0),
        ("none", "85", 0.0),
        ("$1,234.50", 1234.5, 1.0),
        ("it is -7", "-7", 1.0),
        ("it is \u22127", "-7", 1.0),
        ("10-7", "7", 1.0),
        (".5", "0.50", 1.0),
        ("1,2", "2", 1.0),
        ("12345,678", "678", 1.0),
        ("18", "9 + 9 = 18\n#### 18", 1.0),
        ("10000000000000000000000001", "10000000000000000000000002", 0.0),
    ],
)
def test_last_number(text, answer, expected):
    assert rules.last_number(None, [text], [answer]) == [expected]


def test_last_number_without_a_reference():
    with pytest.raises(ValueError, match="no number in the reference answer 'x'"):
        rules.last_number(None, ["1", "2"], ["1", "x"])


def test_reasoning_gym_scores_with_the_packages_scorer():
    pytest.importorskip("reasoning_gym")

    for name in ("chain_sum", "rearc", "decimal_arithmetic", "spell_backward"):  # rearc compares tuples
        row = make_task(f"reasoning_gym/{name}", {"seed": 3}, size=1)[0]
        texts = [row["answer"], f"9 <answer>no</answer> <answer> {row['answer']} </answer>", "<answer>?</answer>"]
        right, tagged, wrong = call(rules.reasoning_gym, group_of(*texts, **row)).values
        assert (right, tagged) == (1.0, 1.0), name
        assert wrong is not None and wrong < 0.2


def test_a_text_that_a_gym_scorer_cannot_read_is_worth_0():
    """The scorer of prime_factorization raises for a text without numbers; a broken scorer still raises."""
    pytest.importorskip("reasoning_gym")

    (row,) = make_task("reasoning_gym/prime_factorization", {}, size=1)
    given = [[row[name]] for name in ("task", "entry_json", "task_args")]
    assert rules.reasoning_gym([""], ["none"], *given) == [0.0]
    assert rules.reasoning_gym([""], [f"<answer>{row['answer']}</answer>"], *given) == [1.0]

    def broken(text, entry):
        raise KeyError("metadata")

    with pytest.raises(KeyError):
        rules._gym_score(broken, "none", {"answer": "1"})


def test_reasoning_gym_never_runs_answers_as_code_unasked():
    gym = pytest.importorskip("reasoning_gym.factory")
    from gcore.prompts import tasks

    evaluating = {
        n for n, (kind, _) in gym.DATASETS.items() if rules.EVALUATES.search(inspect.getsource(kind.score_answer))
    }
    assert {"n_queens", "countdown", "puzzle24", "binary_matrix", "simple_integration"} <= evaluating
    assert not {"chain_sum", "number_sorting"} & evaluating
    assert tasks.EVALUATES.pattern == rules.EVALUATES.pattern
    with pytest.raises(UserError, match="allow_eval"):
        rules.reasoning_gym(None, ["1"], ["n_queens"], ["{}"])
    row = tasks.make_task("reasoning_gym/countdown", {"allow_eval": True}, 1)[0]
    assert call(rules.reasoning_gym, group_of(row["answer"], **row)).values == [1.0]


def test_tags_restore_tuples_and_keys():
    from gcore.prompts.tasks import _tag

    entry = {"a": (1, [2, (3,)]), "b": {(0, 1): "x", 2: {"c": ()}}, "d": {"$x": None}}
    assert rules._untag(json.dumps(_tag(entry))) == entry


# --- loading


def test_load_function_from_module_and_file(tmp_path: Path):
    assert load_function("gcore.rewarding.rules:exact_answer") is rules.exact_answer
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 4\n"
        "def good(completions): return A().x\n"
    )
    assert load_function(f"{file}:good")(None) == 4
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text("def good(completions): return 5\n")
    assert load_function(f"{tmp_path}/other/mine.py:good")(None) == 5  # same stem, another module


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gcore.rewarding.rules", r"rewards\.functions\.path: expected package\.module:function or file\.py:function"),
        ("gcore.rewarding.rulez:f", r"gcore\.rewarding\.rulez does not import: ModuleNotFoundError: No module named"),
        ("gcore.rewarding.rules:exact_anser", r"no 'exact_anser'; did you mean exact_answer\?"),
        ("gcore.rewarding.rules:NUMBER", "is of type Pattern; expected a function"),
        ("gone.py:f", r"no such file: gone\.py"),
        ("BROKEN:f", r"broken\.py does not import: ZeroDivisionError: division by zero"),
    ],
)
def test_paths_that_do_not_load(path, message, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match=message):
        load_function(path.replace("BROKEN", str(tmp_path / "broken.py")))


# --- signatures


def test_trl_strings_and_columns():
    seen = {}

    def function(prompts, completions, answer, level=None, completion_ids=None):
        seen.update(locals())
        return [1.0, None]

    group = group_of("2", "3", prompt="1+1=", answer="2", level=4, unwanted=5)
    assert recognise(function, {}, KEY).style == "trl"
    assert call(function, group).values == [1.0, None]
    assert seen["prompts"] == ["1+1=", "1+1="]
    assert seen["completions"] == ["2", "3"]
    assert (seen["answer"], seen["level"], seen["completion_ids"]) == (["2", "2"], [4, 4], [[0, 2], [1, 2]])


def test_trl_messages_and_kwargs():
    seen = {}

    def function(completions, **kwargs):
        seen.update(kwargs, completions=completions)
        return np.array([1, 0])

    messages = [{"role": "user", "content": "1+1="}]
    group = group_of("2", "3", prompt=messages, answer="2", level=4)
    assert call(function, group, scale=7).values == [1.0, 0.0]
    assert seen == {
        "prompts": [messages, messages],
        "completions": [[{"role": "assistant", "content": "2"}], [{"role": "assistant", "content": "3"}]],
        "completion_ids": [[0, 2], [1, 2]],
        "answer": ["2", "2"],
        "level": [4, 4],
        "scale": 7,
    }


def test_trl_prompt_made_by_hand():
    def function(prompts, completions):
        return [float(isinstance(p, str)) for p in prompts]

    assert call(function, group_of("2")).values == [1.0]
    two = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    assert call(function, group_of("2", messages=two)).values == [0.0]


def test_verl_one_call_a_sample():
    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1, **kwargs):
        calls.append((data_source, solution_str, ground_truth, extra_info, kwargs))
        return {
            "score": scale * float(solution_str == ground_truth),
            "acc": True,
            "pred": solution_str,
            "bad": float("nan"),
        }

    group = group_of("2", "3", data_source="math", answer="2", extra_info={"i": 1}, reward_model={})
    answer = call(compute_score, group, scale=3)
    assert recognise(compute_score, {}, KEY).style == "verl"
    assert answer.values == [3.0, 0.0]
    assert answer.extras == [{"acc": 1.0}, {"acc": 1.0}]
    assert calls == [("math", "2", "2", {"i": 1}, {}), ("math", "3", "2", {"i": 1}, {})]
    assert call(lambda data_source, solution_str, ground_truth: 0.5, group).values == [0.5, 0.5]


def test_openrlhf_lists_dicts_and_tensors():
    torch = pytest.importorskip("torch")
    seen = {}

    def reward_func(queries, prompts, labels, **kwargs):
        seen.update(locals())
        return {
            "rewards": torch.tensor([1.0, 0.5]),
            "scores": [torch.tensor(0.25), 0.75],
            "extra_logs": {"length": torch.tensor([3, 4]), "note": ["a", "b"]},
        }

    answer = call(reward_func, group_of("2", "3", answer="2"))
    assert recognise(reward_func, {}, KEY).style == "openrlhf"
    assert answer.values == [1.0, 0.5]
    assert answer.extras == [{"scores": 0.25, "length": 3.0}, {"scores": 0.75, "length": 4.0}]
    assert seen["queries"] == ["<bos>1+1=2", "<bos>1+1=3"]
    assert seen["prompts"] == ["<bos>1+1="] * 2
    assert seen["labels"] == ["2", "2"]
    assert call(lambda queries, prompts, labels: [1, 2], group_of("2", "3")).values == [1.0, 2.0]


def test_async_functions_run_on_the_loop_and_sync_ones_off_it():
    main = threading.get_ident()
    threads = {}

    async def verl_async(data_source, solution_str, ground_truth, extra_info=None):
        threads["async"] = threading.get_ident()
        await asyncio.sleep(0)
        return float(solution_str)

    def sync(completions):
        threads["sync"] = threading.get_ident()
        return [1.0] * len(completions)

    class Judge:
        async def __call__(self, prompts, completions):
            return [3.0] * len(completions)

    async def queries_async(queries, prompts, labels, k):
        return [k] * len(queries)

    group = group_of("2", "3")
    assert call(verl_async, group).values == [2.0, 3.0]
    assert call(sync, group).values == [1.0, 1.0]
    assert call(Judge(), group).values == [3.0, 3.0]
    assert call(functools.partial(queries_async, k=4), group).values == [4.0, 4.0]
    assert call(lambda completions: Judge()(None, completions), group).values == [3.0, 3.0]
    assert threads["async"] == main != threads["sync"]


@pytest.mark.parametrize("function", [lambda x: 1, lambda solution_str: 1, lambda *a, **k: 1, print, dict.fromkeys])
def test_unknown_signatures_show_the_three(function):
    with pytest.raises(UserError, match=r"rewards\.functions\.path: .*\[TRL\].*\[verl\].*\[OpenRLHF\]"):
        recognise(function, {}, KEY)


def test_arguments_that_no_function_takes():
    with pytest.raises(UserError, match=r"rewards\.functions\.0\.args\.scal: .*expected one of \['scale'\]"):
        rewarder_of(lambda completions, scale=1: [1.0], scal=2)
    with pytest.raises(UserError, match=r"args\.completions"):
        rewarder_of(lambda completions, **_: [1.0], completions=2)


# --- what makes a reward


class Longer:
    made = 0

    def __init__(self, than: int = 0):
        type(self).made += 1
        self.than = than

    def __call__(self, prompts, completions, **columns):
        return [float(len(c) > self.than) for c in completions]


def test_a_class_is_made_once_with_args_and_its_instance_called():
    Longer.made = 0
    rewarder = rewarder_of(Longer, than=1)
    assert Longer.made == 0  # not before it is called
    for _ in range(2):
        assert [s.reward for s in score(rewarder, group_of("2", "33"))] == [0.0, 1.0]
    assert Longer.made == 1


def test_a_factory_is_called_with_args_and_what_it_returns_is_the_reward():
    def longer(than):
        return Longer(than)

    assert [s.reward for s in score(rewarder_of(longer, than=1), group_of("2", "33"))] == [0.0, 1.0]


def test_a_reward_keeps_its_args_as_keyword_arguments():
    def longer(completions, than=0):
        return [float(len(c) > than) for c in completions]

    assert [s.reward for s in score(rewarder_of(longer, than=1), group_of("2", "33"))] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("found", "args", "message"),
    [
        (Longer, {"then": 1}, r"0\.path: got the signature Longer\(than: int = 0\); .*got an unexpected .*'then'"),
        (Exception, {}, r"0\.path: Exception is a class without __call__; expected one whose instances are called"),
        (lambda text, label: 1.0, {}, r"got the signature .*\(text, label\); .*missing a required argument: 'text'"),
        (
            lambda scale=1: scale,
            {},
            r"\(scale=1\) does not have a reward signature, .* but it returned 1; expected f\(",
        ),
        (lambda **k: k["x"], {}, r"0\.args: .*\(\*\*k\) raised KeyError: 'x' \(got {}\)"),
        (lambda: lambda text: 1.0, {}, r"0\.path: got the signature .*\(text\); expected f\("),
    ],
)
def test_what_makes_no_reward(found, args, message):
    with pytest.raises(UserError, match=message):
        rewarder_of(found, **args)


# --- the rewarder


def test_weighted_sum_and_parts():
    def verl(data_source, solution_str, ground_truth):
        return {"score": 4, "acc": 0.5}

    rewarder = rewarder_of(lambda completions: [1.0, 0.0], verl, weights=(2.0, -0.5))
    group = group_of("2", "3")
    first, second = score(rewarder, group)
    assert (first.reward, second.reward) == (0.0, -2.0)
    assert first.parts == {"f0": 1.0, "f1": 4.0, "f1/acc": 0.5}
    assert first.rollout is group[0] and second.rollout is group[1]
    assert rewarder.counts["retries"] == 0


@pytest.mark.parametrize(
    ("value", "weight", "total"), [(1e308, 10.0, "inf"), (-1e31, 1.0, r"-1e\+31"), (100.0, 1e29, r"1e\+31")]
)
def test_a_sum_that_is_too_large_is_a_failure(value, weight, total):
    """Squares of 1e308 overflow in the metrics, and in float32 the loss of 1e39 is infinite."""
    rewarder = rewarder_of(lambda completions: [value, 1.0], weights=(weight,))
    with pytest.raises(RewardError, match=rf"prompt 70: the weighted sum of .* is {total}; expected .* at most 1e\+30"):
        score(rewarder, group_of("2", "3"))
    assert score(rewarder_of(lambda completions: [1e30, -1e30]), group_of("2", "3"))[1].reward == -1e30


def test_none_does_not_apply_and_is_left_out():
    rewarder = rewarder_of(lambda completions: [None, 1.0], lambda completions: [0.5, None])
    first, second = score(rewarder, group_of("2", "3"))
    assert (first.reward, first.parts) == (0.5, {"f1": 0.5})
    assert (second.reward, second.parts) == (1.0, {"f0": 1.0})
    rewarder = rewarder_of(lambda completions: [None, 1.0], lambda completions: [None, 1.0])
    with pytest.raises(RewardError, match="'f0', 'f1', prompt 70: every source returned None for 1 of 2 siblings"):
        score(rewarder, group_of("2", "3"))


def test_siblings_without_a_reward_are_left_out_where_asked_for():
    rewarder = rewarder_of(lambda completions: [None if text == "?" else 1.0 for text in completions])
    rewarder._least_scored = 2
    assert [s.rollout.sibling for s in score(rewarder, group_of("2", "?", "3"))] == [0, 2]
    assert rewarder.take_counts() == {"unscored": 1}
    with pytest.raises(RewardError, match=r"prompt 70: it returned None for 2 of 3 siblings; .*rewards\.unscored"):
        score(rewarder, group_of("2", "?", "?"))
    assert len(score(rewarder, group_of("2"))) == 1  # as in evaluations


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], r"returned 1 rewards for 2 completions: \[1\.0\]"),
        ([1.0, 2.0, 3.0], "returned 3 rewards for 2"),
        ([1.0, "1"], "returned '1' in .*expected numbers"),
        ([1.0, float("nan")], "returned nan in .*expected finite numbers"),
        (np.array([1.0, np.inf]), "returned inf in "),
        (np.ones((2, 2)), "expected numbers"),
        (1.0, r"returned 1\.0; expected a list of 2 numbers"),
        ("12", "returned '12'; expected a list of 2 numbers"),
        (None, "returned None; expected a list of 2 numbers"),
        ({"scores": [1, 2]}, "expected a list, or a dict with 'rewards'"),
    ],
)
def test_what_is_not_a_reward_is_a_failure(answer, message):
    rewarder = rewarder_of(lambda completions: answer, attempts=3)
    with pytest.raises(RewardError, match=f"reward 'f0', prompt 70: .*{message}.*tried 3 times"):
        score(rewarder, group_of("2", "3"))
    assert rewarder.counts["retries"] == 2


@pytest.mark.parametrize("answer", [{"acc": 1.0}, "1", float("-inf"), [1.0]])
def test_verl_answers_that_are_no_reward(answer):
    with pytest.raises(RewardError, match="prompt 70: returned "):
        score(rewarder_of(lambda data_source, solution_str, ground_truth: answer), group_of("2"))


def test_retries_until_it_answers():
    calls = []

    def flaky(completions):
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError("server busy")
        return [1.0]

    rewarder = rewarder_of(flaky, attempts=3)
    assert score(rewarder, group_of("2"))[0].reward == 1.0
    assert rewarder.counts["retries"] == 2
    calls.clear()
    rewarder = rewarder_of(flaky, attempts=2)
    with pytest.raises(RewardError, match=r"reward 'f0', prompt 70: raised ConnectionError\('server busy'\)") as caught:
        score(rewarder, group_of("2"))
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert rewarder.counts["retries"] == 1


def test_missing_columns_are_found_before_the_run_and_not_retried():
    def function(prompts, completions, solution, scale):
        return [1.0]

    rewarder = rewarder_of(function, scale=1)
    with pytest.raises(UserError, match=r"f0 needs solution; the dataset has answer, level"):
        rewarder.check(["level", "answer"])
    rewarder.check(["solution"])
    with pytest.raises(RewardError, match="the row has no column solution"):
        score(rewarder, group_of("2", answer="2"))
    assert rewarder.counts["retries"] == 0


def test_groups_are_scored_concurrently():
    """A slow function holds up its own group only: all groups are in the function at the same time."""
    barrier = threading.Barrier(3, timeout=60)

    def waits(completions):
        barrier.wait()
        return [1.0] * len(completions)

    rewarder = rewarder_of(waits, attempts=1)

    async def together():
        return await asyncio.gather(*(rewarder.reward(group_of("2")) for _ in range(3)))

    assert [scored[0].reward for scored in asyncio.run(together())] == [1.0, 1.0, 1.0]


# --- sys.exit() must not end the process


def leaves(prompts, completions):
    sys.exit(3)


async def leaves_later(prompts, completions):
    await asyncio.sleep(0)
    raise SystemExit("enough")


async def leaves_in_an_awaitable(prompts, completions):
    sys.exit(5)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (leaves, r"SystemExit\(3\)"),
        (leaves_later, r"SystemExit\('enough'\)"),
        (lambda prompts, completions: leaves_in_an_awaitable(prompts, completions), r"SystemExit\(5\)"),
    ],
)
def test_sys_exit_in_a_function_is_a_failed_call(function, what):
    with pytest.raises(RewardError, match=f"raised {what}"):
        score(rewarder_of(function), group_of("2"))


def raises(error):
    def function(prompts, completions):
        raise error

    async def later(prompts, completions):
        await asyncio.sleep(0)
        raise error

    return function, later


@pytest.mark.parametrize("error", [GeneratorExit, KeyboardInterrupt, StopIteration, asyncio.CancelledError])
@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_no_exception_is_a_failed_call_too(error, is_async):
    """Without workers, in a thread or on the event loop of the run, which would end or wait for ever."""
    function = raises(error)[is_async]
    what = rf"raised {error.__name__}\(\) at test_rewarding\.py:\d+ in |coroutine raised {error.__name__}"
    with pytest.raises(RewardError, match=what):
        score(rewarder_of(function), group_of("2"))


def test_sys_exit_at_import_or_construction_is_an_error_of_the_user(tmp_path):
    (tmp_path / "leaving.py").write_text("import sys\ndef make(scale): sys.exit(4)\n")
    (tmp_path / "gone.py").write_text("import sys\nsys.exit(4)\n")
    with pytest.raises(UserError, match=r"raised SystemExit: 4"):
        load_reward(f"{tmp_path}/leaving.py:make", {"scale": 1})
    with pytest.raises(UserError, match=r"does not import: SystemExit: 4"):
        load_reward(f"{tmp_path}/gone.py:make", {})
