"""Reward workers: functions that hang, crash, lie and leave things behind, and a parent that goes away."""

import asyncio
import contextlib
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gcore import processes
from gcore.config.rewards import RewardFunction, Rewards
from gcore.content.tokens import Tokens
from gcore.processes import kill_group
from gcore.rewarding import workers
from gcore.rewarding.functions import FunctionSource, calls_of
from gcore.rewarding.rewarder import WeightedRewarder
from gcore.rewarding.source import BadAnswer, Source, TimedOut
from gcore.rewarding.workers import WorkerPool
from gcore.types import Prompt, RewardError, Rollout, UserError

FUNCTIONS = '''
import asyncio, ctypes, os, random, signal, subprocess, sys, threading, time
from pathlib import Path

def ok(completions):
    return [float(len(c)) for c in completions]

def pid(completions):
    return {"rewards": [1.0] * len(completions), "pid": [os.getpid()] * len(completions)}

def here(completions, wanted):
    """1 where it runs as promised."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # raises outside the main thread
    heavy = {"torch", "ray", "transformers"} & set(sys.modules)
    cwd, path = wanted[0]
    return [float(not heavy and os.getcwd() == cwd and sys.path == path and sys.stdin.read() == "")]

def trl(prompts, completions, answer, completion_ids, scale=1):
    assert type(completion_ids) is list and type(completion_ids[0]) is list
    return [scale * float(c == a) + sum(i) for c, a, i in zip(completions, answer, completion_ids)] or None

async def verl(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

def openrlhf(queries, prompts, labels):
    return {"rewards": [float(q == p + l) for q, p, l in zip(queries, prompts, labels)], "extra_logs": {"n": [1, 2]}}

def later(completions):
    async def wait():
        await asyncio.sleep(0)
        return [5.0] * len(completions)
    return wait()

def flaky(completions, folder):
    """Group `gid` fails its call number `n` with probability 0.2, always the same."""
    log = Path(folder) / completions[0]
    n = len(log.read_text()) if log.exists() else 0
    log.write_text("x" * (n + 1))
    if random.Random(f"{completions[0]}/{n}").random() < 0.2:
        raise ConnectionError("flaky")
    return [1.0] * len(completions)

def sleeps(completions): time.sleep(1000)
def loops(completions):
    while True: pass
def ignores_sigterm(completions):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
    while True: time.sleep(1)
def holds_the_gil(completions): return 9 ** (9 ** 9)

def exits(completions): os._exit(3)
def quits(completions): sys.exit(4)
def crashes(completions): ctypes.string_at(0)
def is_killed(completions): os.kill(os.getpid(), signal.SIGKILL)

def answers(completions, what):
    return {"nan": [1.0, float("nan")], "inf": [float("inf"), 1.0], "strings": ["1", "2"], "short": [1.0],
            "none": None, "text": "12", "generator": (x for x in [1, 2]), "applies": [None, 1.0], "fine": [0.5, 1.0],
            }[what[0]]

def leaves_a_child(completions, file, then):
    child = subprocess.Popen(["sleep", "1000"])
    Path(file).write_text(str(child.pid))
    if then == "hang": time.sleep(1000)
    os._exit(5)

def forks_and_dies(completions, file):
    child = os.fork()  # it holds the worker's socket open
    if child == 0: time.sleep(1000)
    Path(file).write_text(str(child))
    os._exit(6)

def forks_and_returns(completions):
    return [float(os.fork() != 0)] * len(completions)

def floods(completions):
    for _ in range(2000): print("flood " * 100)
    os.write(1, b"flood " * 1000)
    subprocess.run(["echo", "flood of a child"], check=True)
    return [7.0] * len(completions)

class Awkward(Exception):
    def __init__(self, a, b): self.lock = threading.Lock()
    def __reduce__(self): raise TypeError("no pickle")
    def __repr__(self): return "Awkward!"
class Mute(Awkward):
    def __repr__(self): raise RuntimeError("no repr")
def unpicklable(completions): raise Awkward(1, 2)
def no_repr(completions): raise Mute(1, 2)
def refuses(completions):
    from gcore.types import RewardError
    raise RewardError("never")

def leaves_an_alarm(completions):
    if completions[0] == "set": signal.setitimer(signal.ITIMER_REAL, 0.1)
    else: time.sleep(0.3)
    return [1.0] * len(completions)

def tenth(completions, file):
    with open(file, "a") as log: log.write("x")
    time.sleep(0.1)
    return [1.0] * len(completions)

inside = 0
everyone = asyncio.Event()
async def together(completions, num, file):
    """No call returns before `num` are inside. `hang` and `stubborn` never return; `slow` returns after `stubborn` was
    cancelled."""
    global inside
    inside += 1
    told = "cancelled" in Path(file).read_text()
    if inside >= num or told: everyone.set()
    with open(file, "a") as log: log.write(completions[0] + "\\n")
    await everyone.wait()
    while completions[0] in ("hang", "stubborn"):
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            with open(file, "a") as log: log.write("cancelled\\n")
            if completions[0] == "hang": raise
    if completions[0] == "crash": os._exit(9)
    if completions[0] == "slow" and not told: await asyncio.sleep(1000)
    return {"rewards": [1.0], "pid": [os.getpid()]}
stubborn = hangs = together
'''
ALIASES = {"stubborn": "together", "hangs": "together"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "users.py").write_text(FUNCTIONS)
    (tmp_path / "log").touch()
    return tmp_path


@pytest.fixture
def pools():
    made: list[WorkerPool] = []
    yield made
    for pool in made:
        pool.close()
        assert not pool.processes


def known(name: str, args: dict) -> dict:
    """Those of the arguments that the function takes."""
    line = next(line for line in FUNCTIONS.splitlines() if f"def {ALIASES.get(name, name)}(" in line)
    return {key: value for key, value in args.items() if key in line}


@pytest.fixture
def pool_of(place, pools):
    def make(*names: str, num_workers=1, timeout_s=20.0, limits=None, attempts=1, recycle_after=10_000, **args):
        functions = [
            RewardFunction(name=n, path=f"{place}/users.py:{n}", timeout_s=(limits or {}).get(n), args=known(n, args))
            for n in names
        ]
        rewards = Rewards(functions=functions, timeout_s=timeout_s, attempts=attempts, recycle_after=recycle_after)
        pools.append(WorkerPool(rewards, num_workers))
        return pools[-1]

    return make


def group_of(*texts: str, **columns) -> list[Rollout]:
    prompt = Prompt(
        70, 6, ({"role": "user", "content": "1+1="},), "<bos>1+1=", Tokens(np.array([1], np.int32)), columns
    )
    steps = np.zeros(2, np.float32)
    return [
        Rollout(
            prompt, i, Tokens.steps(np.array([i, 2], np.int32)), steps, steps == 0, text, np.zeros(2, np.int32), "stop"
        )
        for i, text in enumerate(texts)
    ]


def blend(pool: WorkerPool) -> WeightedRewarder:
    return WeightedRewarder(pool.sources, backoff_s=0)


def values(pool: WorkerPool, *groups) -> list:
    """The rewards of each group, or its error; all at the same time."""
    rewarder = blend(pool)

    async def all_of_them():
        return await asyncio.gather(*(rewarder.reward(group) for group in groups), return_exceptions=True)

    scored = asyncio.run(all_of_them())
    return [s if isinstance(s, BaseException) else [x.reward for x in s] for s in scored]


def error(pool: WorkerPool, group=None) -> str:
    (result,) = values(pool, group or group_of("2", "3"))
    assert isinstance(result, RewardError), result
    return str(result)


def counts(pool: WorkerPool) -> dict[str, int]:
    total: dict[str, int] = {}
    for source in pool.sources:
        total |= {key: total.get(key, 0) + n for key, n in source.counts.items()}
    return total


def is_gone(pid: int) -> bool:
    """In the end; a zombie is gone, too."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def only_pid(pool: WorkerPool) -> int:
    (process,) = pool.processes
    return process.pid


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


# --- what it does


def test_all_signatures_and_what_they_see(place, pool_of):
    pool = pool_of("trl", "verl", "openrlhf", "later", num_workers=2)
    group = group_of("2", "33", answer="2", other=1)

    async def each():
        return [await source.answer(group) for source in pool.sources]

    trl, verl, openrlhf, later = asyncio.run(each())
    assert trl.values == [1.0 + 2, 0.0 + 3]
    assert (verl.values, verl.extras) == ([1.0, 0.0], [{"length": 1.0}, {"length": 2.0}])
    assert (openrlhf.values, openrlhf.extras) == ([1.0, 0.0], [{"n": 1.0}, {"n": 2.0}])
    assert later.values == [5.0, 5.0]


def test_functions_run_in_the_main_thread_where_the_parent_found_them(place, pool_of, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    wanted = [str(place), list(sys.path)]
    functions = [RewardFunction(name=n, path=p) for n, p in (("a", "users:here"), ("b", "users.py:here"))]
    sources = WorkerPool(Rewards(functions=functions), 1).sources
    rewarder = WeightedRewarder(sources)
    monkeypatch.chdir("/")  # workers start later
    try:
        assert [s.reward for s in asyncio.run(rewarder.reward(group_of("2", wanted=wanted)))] == [2.0]
    finally:
        rewarder.close()


def test_weights_and_names_are_the_recipes(place):
    spec = RewardFunction(name="mine", path=f"{place}/users.py:ok", weight=3.0)
    (source,) = WorkerPool(Rewards(functions=[spec], attempts=4), 1).sources
    checked: Source = source
    assert (checked.name, checked.weight, checked.attempts) == ("mine", 3.0, 4)
    checked.close()


def test_paths_and_signatures_fail_in_the_constructor(place):
    def make(path, **args):
        return WorkerPool(Rewards(functions=[RewardFunction(name="f", path=path, args=args)]), 1)

    with pytest.raises(UserError, match=r"rewards\.functions\.0\.path: .*no 'okk'; did you mean ok\?"):
        make(f"{place}/users.py:okk")
    with pytest.raises(UserError, match=r"rewards\.functions\.0\.path: Awkward is a class without __call__"):
        make(f"{place}/users.py:Awkward")
    with pytest.raises(UserError, match=r"rewards\.functions\.0\.args\.x: ok takes no such argument"):
        make(f"{place}/users.py:ok", x=1)


MAKERS = """
import os
class Scaled:
    def __init__(self, scale, log):
        open(log, "a").write(f"{os.getpid()}\\n")
        self.scale = scale
    def __call__(self, completions, answer): return [self.scale * (c == a) for c, a in zip(completions, answer)]
class Later(Scaled):
    async def __call__(self, completions): return [self.scale + 1] * len(completions)
def factory(scale):
    def per_sample(solution_str, ground_truth): return scale * len(solution_str)
    return per_sample
class Broken:
    def __init__(self): self.table = {}["none"]
    def __call__(self, completions): return [0.0] * len(completions)
"""


def test_classes_and_factories_are_made_with_args(place):
    """An instance is made once per worker, and never in the parent."""
    (place / "makers.py").write_text(MAKERS)
    log = place / "made"
    specs = [
        RewardFunction(name=name, path=f"{place}/makers.py:{made}", args=args)
        for name, made, args in (
            ("a", "Scaled", {"scale": 3, "log": str(log)}),
            ("b", "Later", {"scale": 4, "log": str(log)}),
            ("c", "factory", {"scale": 5}),
        )
    ]
    pool = WorkerPool(Rewards(functions=specs), 1)
    assert not log.exists()
    group = group_of("2", "33", answer="2")

    async def each():
        return [(await source.answer(group)).values for _ in range(2) for source in pool.sources]

    try:
        assert asyncio.run(each()) == [[3.0, 0.0], [5.0, 5.0], [5.0, 10.0]] * 2
        assert len(log.read_text().split()) == 2 and str(os.getpid()) not in log.read_text().split()
    finally:
        pool.close()
    with pytest.raises(UserError, match="a needs answer; the dataset has level"):
        pool.sources[0].check(["level"])


def test_a_constructor_that_raises_is_told_by_its_key(place):
    (place / "makers.py").write_text(MAKERS)
    spec = RewardFunction(name="f", path=f"{place}/makers.py:Broken")
    pool = WorkerPool(Rewards(functions=[spec], attempts=1), 1)
    try:
        assert error(pool) == (
            "reward 'f', prompt 70: its worker did not start: rewards.functions.0.args: Broken() raised "
            "KeyError: 'none' (got {}) (tried 1 times)"
        )
    finally:
        pool.close()


def test_columns_and_preflight_are_checked_before_the_run(place, pool_of):
    (place / "pre.py").write_text(
        "from gcore.types import UserError\n"
        "def f(completions, answer, k=0): return [1.0]\n"
        "def need(args):\n    if args.get('k') == 1: raise UserError('k is 1')\n"
        "f.preflight = need\n"
    )
    for k, expected in ((0, None), (1, "k is 1")):
        spec = RewardFunction(name="f", path=f"{place}/pre.py:f", args={"k": k})
        worker = WorkerPool(Rewards(functions=[spec]), 1).sources[0]
        for source in (worker, FunctionSource(spec, 1, "rewards.functions.0")):
            with pytest.raises(UserError, match="f needs answer; the dataset has level"):
                source.check(["level"])
            with pytest.raises(UserError, match=expected) if expected else contextlib.nullcontext():
                source.check(["answer"])
        with pytest.raises(RewardError, match="prompt 70: the row has no column answer"):
            asyncio.run(worker.answer(group_of("2")))
        worker.close()


def test_only_what_is_asked_for_travels(pool_of):
    (source,) = pool_of("ok").sources
    group = group_of("2", "3", answer="x" * 5000, prompt="p" * 5000)
    assert len(pickle.dumps(calls_of(source.loaded, group))) < 200


def test_workers_start_with_the_first_calls_and_stay(pool_of):
    pool = pool_of("ok", "verl", num_workers=3)
    assert not pool.processes

    async def call():
        await asyncio.gather(*(pool.sources[i].answer(group_of("2", answer="2")) for i in (0, 0, 0, 1, 1)))
        assert len(pool.processes) == 3 + 1  # sync functions, and one for the async ones
        pids = {process.pid for process in pool.processes}
        await asyncio.gather(*(pool.sources[0].answer(group_of("2")) for _ in range(9)))
        assert {process.pid for process in pool.processes} == pids

    asyncio.run(call())


def test_one_call_starts_one_worker(pool_of):
    pool = pool_of("ok", num_workers=3)

    async def call():
        await pool.sources[0].answer(group_of("2"))
        assert len(pool.processes) == 1
        await asyncio.gather(*(pool.sources[0].answer(group_of("2")) for _ in range(30)))
        assert len(pool.processes) <= 3

    asyncio.run(call())


def test_functions_that_import_in_the_parent_alone(place, pool_of):
    pool = pool_of("ok", num_workers=2)
    (place / "users.py").write_text("import gone_since\n")
    results = values(pool, *[group_of("2")] * 5)
    message = r"its worker did not start: .*users\.py does not import: ModuleNotFoundError.*gone_since"
    assert all(re.search(message, str(r)) for r in results)
    (place / "users.py").write_text("import os\nos._exit(8)\n")
    results = values(pool, *[group_of("2")] * 2)
    assert all("its worker did not start: exited with code 8" in str(r) for r in results)


def test_a_pool_serves_one_loop_after_another(pool_of):
    pool = pool_of("pid", "together", num=1, file=os.devnull)
    pool.sources.pop()
    pids = []
    for _ in range(3):
        (scored,) = asyncio.run(blend(pool).reward(group_of("2")))
        pids.append(int(scored.parts["pid/pid"]))
    assert len(set(pids)) == 3
    assert all(map(is_gone, pids))  # asyncio.run cancels what is left
    loop = asyncio.new_event_loop()
    loop.run_until_complete(blend(pool).reward(group_of("2")))
    with pytest.raises(RuntimeError, match="one event loop at a time"):
        asyncio.run(pool.sources[0].answer(group_of("2")))
    pool.close()
    loop.run_until_complete(asyncio.sleep(0.05))
    loop.close()


# --- what functions do wrong


def test_flaky_functions_are_retried_and_counted(place, pool_of):
    (place / "logs").mkdir()
    pool = pool_of("flaky", num_workers=2, attempts=2, folder=str(place / "logs"))
    fails = {g: [random.Random(f"{g}/{n}").random() < 0.2 for n in range(2)] for g in range(150)}
    rewarder = blend(pool)

    async def everything():
        groups = [group_of(str(g), "x") for g in fails]
        return await asyncio.gather(*map(rewarder.reward, groups), return_exceptions=True)

    for (first, second), result in zip(fails.values(), asyncio.run(everything()), strict=True):
        if first and second:
            assert isinstance(result, RewardError)
            assert re.search(
                r"raised ConnectionError\('flaky'\) at users\.py:\d+ in flaky \(tried 2 times\)", str(result)
            )
            assert "users.py" in "".join(result.__cause__.__notes__)
        else:
            assert [s.reward for s in result] == [1.0, 1.0]
    retries = sum(first for first, _ in fails.values())
    assert retries > 5 and any(first and second for first, second in fails.values())
    assert rewarder.take_counts() == {"retries": retries}


@pytest.mark.parametrize("name", ["sleeps", "loops", "ignores_sigterm", "holds_the_gil"])
def test_what_hangs_is_killed_and_asked_again(pool_of, monkeypatch, name):
    pool = pool_of(name, timeout_s=0.3, attempts=2)
    rewarder = blend(pool)
    killed = []
    monkeypatch.setattr(processes, "kill_group", lambda process: (killed.append(process.pid), kill_group(process)))

    with pytest.raises(
        RewardError, match=r"no answer within 0\.3 s; its worker was killed \(tried 2 times\)"
    ) as caught:
        asyncio.run(rewarder.reward(group_of("2")))
    assert isinstance(caught.value.__cause__, TimedOut)
    assert rewarder.take_counts() == {"timeouts": 2, "retries": 1, "worker_restarts": 2}
    assert len(set(killed)) == 2 and all(map(is_gone, killed))


def test_a_hanging_function_does_not_hold_up_another(pool_of):
    pool = pool_of("sleeps", "ok", num_workers=2, limits={"sleeps": 0.5})

    async def both():
        return await asyncio.gather(
            pool.sources[0].answer(group_of("2")),
            *(pool.sources[1].answer(group_of("22")) for _ in range(20)),
            return_exceptions=True,
        )

    hung, *others = asyncio.run(both())
    assert isinstance(hung, TimedOut)
    assert [answer.values for answer in others] == [[2.0]] * 20


def test_time_in_the_queue_is_not_the_functions_time(place, pool_of):
    pool = pool_of("tenth", timeout_s=1.0, file=str(place / "log"))
    assert values(pool, *[group_of("2")] * 15) == [[1.0]] * 15


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exits", "its worker exited with code 3"),
        ("crashes", "its worker died of SIGSEGV"),
        ("is_killed", "its worker died of SIGKILL"),
    ],
)
def test_workers_that_die_are_replaced(pool_of, name, message):
    pool = pool_of(name, "ok")
    bad, good = pool.sources

    async def ask():
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                await bad.answer(group_of("2"))
        return (await good.answer(group_of("222"))).values

    assert asyncio.run(ask()) == [3.0]
    assert (bad.counts, good.counts) == ({"worker_restarts": 2}, {})


def test_what_is_not_a_reward(pool_of):
    pool = pool_of("answers")
    expected = {
        "nan": "returned nan in [1.0, nan]; expected finite numbers",
        "inf": "returned inf in [inf, 1.0]; expected finite numbers",
        "strings": "returned '1' in ['1', '2']; expected numbers",
        "short": "returned 1 rewards for 2 completions: [1.0]",
        "none": "returned None; expected a list of 2 numbers",
        "text": "returned '12'; expected a list of 2 numbers",
        "generator": "returned <generator object",
    }
    *errors, fine = values(pool, *[group_of("2", "3", what=what) for what in (*expected, "fine")])
    for (what, message), got in zip(expected.items(), errors, strict=True):
        assert isinstance(got, RewardError) and f"prompt 70: {message}" in str(got), what
    assert fine == [0.5, 1.0]
    assert counts(pool) == {}  # the worker is fine


def test_none_does_not_apply(pool_of):
    (source,) = pool_of("answers").sources
    assert asyncio.run(source.answer(group_of("2", "3", what="applies"))).values == [None, 1.0]


def test_exceptions_come_back_as_text(pool_of):
    names = ("unpicklable", "no_repr", "quits", "refuses")
    pool = pool_of(*names)

    async def ask():
        answers = (source.answer(group_of("2")) for source in pool.sources)
        return await asyncio.gather(*answers, return_exceptions=True)

    results = asyncio.run(ask())
    assert [str(r) for r in results] == ["raised Awkward!", "raised Mute", "raised SystemExit(4)", "never"]
    assert [type(r) for r in results] == [BadAnswer, BadAnswer, BadAnswer, RewardError]  # the last is not tried again
    assert counts(pool) == {}


@pytest.mark.parametrize("then", ["hang", "exit"])
def test_children_of_a_function_die_with_its_worker(place, pool_of, then):
    pool = pool_of("leaves_a_child", timeout_s=1.0, file=str(place / "pid"), then=then)
    assert ("no answer within 1 s" if then == "hang" else "exited with code 5") in error(pool)
    assert is_gone(int((place / "pid").read_text()))


def test_a_fork_that_holds_the_socket_hides_no_death(place, pool_of):
    pool = pool_of("forks_and_dies", file=str(place / "pid"))
    assert "exited with code 6" in error(pool)
    assert is_gone(int((place / "pid").read_text()))


def test_a_fork_that_returns_does_not_answer(pool_of):
    pool = pool_of("forks_and_returns")
    assert values(pool, *[group_of("2")] * 5) == [[1.0]] * 5


def test_prints_do_not_mix_with_answers(pool_of, capfd):
    assert values(pool_of("floods"), group_of("2", "3")) == [[7.0, 7.0]]
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.count("flood ") == 2000 * 100 + 1000 + 1


def test_an_alarm_left_behind_does_not_go_off_in_the_next_call(pool_of):
    (source,) = pool_of("leaves_an_alarm").sources

    async def both():
        return [(await source.answer(group_of(text))).values for text in ("set", "wait")]

    assert asyncio.run(both()) == [[1.0], [1.0]]
    assert source.counts == {}


# --- async functions


def test_async_calls_share_a_worker_and_one_that_hangs_is_cancelled(place, pool_of):
    log = place / "log"
    pool = pool_of("together", "hangs", num=40, num_workers=2, file=str(log), limits={"hangs": 0.5})
    first, second = pool.sources

    async def ask():
        calls = [first.answer(group_of("2")) for _ in range(39)]
        results = await asyncio.gather(*calls, second.answer(group_of("hang")), return_exceptions=True)
        await until(lambda: "cancelled" in log.read_text())
        return results

    *others, hung = asyncio.run(ask())
    assert [answer.values for answer in others] == [[1.0]] * 39
    assert str(hung) == "no answer within 0.5 s; it was cancelled"
    assert counts(pool) == {}


def test_one_that_ignores_its_cancellation_is_killed_and_the_others_begin_again(place, pool_of, monkeypatch):
    monkeypatch.setattr(workers, "GRACE_S", 0.1)
    log = place / "log"
    pool = pool_of("stubborn", "together", num=4, file=str(log), limits={"stubborn": 0.5})
    first, second = pool.sources

    async def ask():
        calls = [second.answer(group_of("slow")) for _ in range(3)]
        return await asyncio.gather(*calls, first.answer(group_of("stubborn")), return_exceptions=True)

    *others, stubborn = asyncio.run(ask())
    assert str(stubborn) == "no answer within 0.5 s; it was cancelled"
    assert [answer.values for answer in others] == [[1.0]] * 3
    assert (first.counts, second.counts) == ({"worker_restarts": 1}, {})
    assert log.read_text().splitlines().count("slow") == 6


def test_of_many_in_a_crashed_worker_only_the_guilty_one_fails(place, pool_of):
    log = place / "log"
    pool = pool_of("together", num=1, num_workers=1, file=str(log))
    *others, guilty = values(pool, *[group_of("2")] * 10, group_of("crash"))
    assert others == [[1.0]] * 10
    assert "its worker exited with code 9" in str(guilty)


# --- the life of workers


def test_workers_are_recycled_between_calls(pool_of):
    pool = pool_of("pid", recycle_after=3)
    rewarder = blend(pool)

    async def ten():
        scored = await asyncio.gather(*(rewarder.reward(group_of("2")) for _ in range(10)))
        return [int(group[0].parts["pid/pid"]) for group in scored]

    pids = asyncio.run(ten())
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 3, 1]
    assert all(map(is_gone, pids))
    assert rewarder.take_counts() == {}


def test_async_workers_are_recycled_when_the_last_call_ended(place, pool_of):
    pool = pool_of("together", num=5, recycle_after=5, file=os.devnull)
    rewarder = blend(pool)

    async def fifteen():
        scored = await asyncio.gather(*(rewarder.reward(group_of("2")) for _ in range(15)))
        return [group[0].parts["together/pid"] for group in scored]

    pids = asyncio.run(fifteen())
    assert sorted(pids.count(pid) for pid in set(pids)) == [5, 5, 5]
    assert rewarder.take_counts() == {}


def test_a_cancelled_call_ends_its_worker_and_no_other(place, pool_of):
    pool = pool_of("sleeps", "tenth", "ok", num_workers=2, file=str(place / "log"))
    sleeps, tenth, ok = pool.sources

    async def cancel():
        await asyncio.gather(*(ok.answer(group_of("2")) for _ in range(2)))
        await until(lambda: sum(worker.ready for worker in pool._dispatchers[False].workers) == 2)
        doomed = asyncio.create_task(sleeps.answer(group_of("2")))
        await asyncio.sleep(0)
        other = asyncio.create_task(tenth.answer(group_of("2")))
        await asyncio.sleep(0)
        worker = next(iter(pool._dispatchers[False].workers[0].calls.values())).worker
        waiting = [asyncio.create_task(tenth.answer(group_of("2"))) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        doomed.cancel()
        results = await asyncio.gather(doomed, other, *waiting, return_exceptions=True)
        assert [isinstance(r, asyncio.CancelledError) for r in results] == [True, False, False, True, False]
        return worker.child.process.pid

    assert is_gone(asyncio.run(cancel()))
    assert (place / "log").read_text() == "xxx"  # one was cancelled before it began
    assert (sleeps.counts, tenth.counts) == ({"worker_restarts": 1}, {})


def test_a_cancelled_async_call_leaves_its_worker_alone(place, pool_of):
    log = place / "log"
    pool = pool_of("together", num=2, file=str(log))
    (source,) = pool.sources

    async def cancel():
        doomed = asyncio.create_task(source.answer(group_of("hang")))
        other = asyncio.create_task(source.answer(group_of("2")))
        await other
        doomed.cancel()
        await until(lambda: "cancelled" in log.read_text())
        await until(lambda: not pool._dispatchers[True].workers[0].calls)
        return only_pid(pool), (await source.answer(group_of("3"))).extras, (await other).extras

    pid, *extras = asyncio.run(cancel())
    assert extras == [[{"pid": pid}]] * 2
    assert source.counts == {}


def test_close_leaves_no_process_and_tells_who_waits(place, pool_of):
    pool = pool_of("sleeps", "together", num_workers=2, num=1, file=str(place / "log"))
    pids: list[int] = []

    async def close():
        waiting = [asyncio.create_task(pool.sources[0].answer(group_of("2"))) for _ in range(3)]
        waiting.append(asyncio.create_task(pool.sources[1].answer(group_of("hang"))))
        await until(lambda: (place / "log").read_text() and sum(w.ready for w in pool._dispatchers[False].workers) == 2)
        pids.extend(process.pid for process in pool.processes)
        pool.close()
        assert not pool.processes
        for pid in pids:
            with pytest.raises(ProcessLookupError):  # killed, and mark_dead
                os.kill(pid, 0)
        pool.close()
        return await asyncio.gather(*waiting, return_exceptions=True)

    results = asyncio.run(close())
    assert len(pids) == 3
    assert [str(r) for r in results] == ["the reward workers were closed"] * 4
    with pytest.raises(RewardError, match="are closed"):
        asyncio.run(pool.sources[0].answer(group_of("2")))


PARENT = """
import asyncio, json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
from tests.unit.test_reward_workers import group_of
from gcore.config.rewards import RewardFunction, Rewards
from gcore.rewarding.workers import WorkerPool
name, file = sys.argv[2:4]
args = {"file": file + ".child", "then": "hang"} if name == "leaves_a_child" else {}
pool = WorkerPool(Rewards(functions=[RewardFunction(name="f", path=f"users.py:{name}", args=args)]), 1)
async def main():
    call = asyncio.create_task(pool.sources[0].answer(group_of("2")))
    while not pool.processes:
        await asyncio.sleep(0.01)
    open(file, "w").write(str(next(iter(pool.processes)).pid))
    await call
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
"""


def test_workers_end_when_the_interpreter_ends(place):
    root = [str(Path(__file__).parents[2])]
    command = [sys.executable, "-c", PARENT, json.dumps(root), "ok", "pid"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert is_gone(int((place / "pid").read_text()))


def test_workers_end_when_their_parent_is_killed(place):
    """Even while a function runs; its children too."""
    root = [str(Path(__file__).parents[2])]
    command = [sys.executable, "-c", PARENT, json.dumps(root), "leaves_a_child", "pid"]
    parent = subprocess.Popen(command, cwd=place)
    child = place / "pid.child"
    asyncio.run(until(lambda: parent.poll() is not None or (child.exists() and child.read_text())))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert is_gone(int((place / "pid").read_text()))
    assert is_gone(int(child.read_text()))
