"""Environments in processes of their own: conversations, and failures that are never scores."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore.config.environments import ROWS, EnvironmentSettings
from gcore.config.generation import Generation
from gcore.config.load import validate
from gcore.config.tree import Config
from gcore.content.text import TextModality
from gcore.controller.record import check_episodes, environment_row
from gcore.environments import hosts as hosts_module
from gcore.environments.base import Call, Observation
from gcore.environments.hosts import Hosts
from gcore.environments.own import observation
from gcore.environments.rows import check, rows_of
from gcore.launch.node_checks import sent_files
from gcore.preparation.advantages import GroupScores, grpo
from gcore.training.step_advantages import generalized, step_rewards
from gcore.types import EnvironmentFailure, Scored, UserError
from gcore.workflows import play
from gcore.workflows.environment import Trajectory, with_turn_credit
from tests.e2e.helpers import RECIPE
from tests.unit.rollouts import scored as scored_sample
from tests.unit.test_endpoint import World

GAMES = '''
import asyncio, os, time
from types import SimpleNamespace

class Guess:
    """Says < or >, and counts its objects."""
    def __init__(self, secret=3): self.secret = secret
    def rows(self, split): return [{"prompt": "1", "answer": "3", "split": split}] * 4
    def reset(self, row, seed): self.row, self.seed = row, seed
    def step(self, action):
        right = action == str(self.secret)
        return ("" if right else "no"), float(right), right, {"seed": self.seed}

class Told(Guess):
    """Async, with its own first message, and Gymnasium's five values."""
    async def reset(self, seed): return "go", {"seed": seed}
    async def step(self, action): return "more", 0.5, False, action == "3", {"note": "text"}

class Tools:
    tools = ["add", "fail", "late"]
    def add(self, a: int, b: int) -> int:
        """The sum."""
        return a + b
    def fail(self): raise KeyError("oh")
    async def late(self): await asyncio.sleep(100)
    def step(self, action): return None, float(action == "5"), True

class Troubled(Guess):
    """The first `times` episodes of an empty folder do `what` at the word of the policy."""
    def __init__(self, what, folder, times=1, at="1"):
        super().__init__()
        self.what, self.folder, self.times, self.at = what, folder, times, at
    def step(self, action):
        if action == self.at and len(os.listdir(self.folder)) < self.times:
            open(os.path.join(self.folder, f"{time.time_ns()}"), "w").close()
            match self.what:
                case "raise": raise ValueError("broken")
                case "die": os._exit(3)
                case "hang": time.sleep(1000)
                case "garbage": return b"x"
                case "nan": return "x", float("nan"), False
        return super().step(action)

class Waits(Guess):
    async def step(self, action):
        await asyncio.sleep(1000)

class Rubric:
    async def score_rollout(self, prompt, completion, answer, state, **_):
        right = float(completion[-1]["content"] == answer)
        return SimpleNamespace(reward=right, metrics={"turns": state["turn"], "asked": len(prompt)})

class Verifiers:
    """Multi-turn, with the older form of env_response, which returns the state too."""
    system_prompt, max_turns, rubric = "play", 3, Rubric()
    dataset = ({"question": "1", "answer": "3", "info": {"k": 1}},)
    def setup_state(self, state): return {**state, "seen": []}
    def is_completed(self, messages, state): return messages[-1]["content"] == "3"
    async def env_response(self, messages, state):
        state["seen"].append(messages[-1]["content"])
        return [{"role": "user", "content": "no"}], state

class Runs:
    dataset = ({"prompt": [{"role": "user", "content": "1"}], "answer": "4"},)
    rubric = SimpleNamespace(funcs=[lambda completion, answer: float(completion == answer)], weights=[2.0])
    async def rollout(self, client, model, prompt, answer, **_):
        said = await client.chat.completions.create(model=model, messages=prompt)
        return said.choices[0].message.content, {"note": 1}

class Seeded:
    """In the style of Gymnasium, without a dataset."""
    def reset(self, seed=None): return f"seed {seed}", {}
    def step(self, action): return "x", 1.0, True, False, {}

def broken(): raise RuntimeError("no licence")
def nothing(): return object()
'''


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "games.py").write_text(GAMES)
    (tmp_path / "log").mkdir()
    return tmp_path


@dataclasses.dataclass
class Stage:
    world: World
    hosts: Hosts

    def play(self, n: int = 1, **columns: Any) -> list[Scored]:
        prompt = dataclasses.replace(self.world.prompt, columns=columns)
        return asyncio.run(self._play(prompt, n))

    async def _play(self, prompt: Any, n: int) -> list[Scored]:
        try:
            return await play(self.world.ctx, prompt, n)
        finally:
            self.hosts.close()


@pytest.fixture
def stage(place: Path) -> Iterator[Callable[..., Stage]]:
    made: list[Hosts] = []

    def make(name: str, *texts: str, least: int = 1, **spec: Any) -> Stage:
        world = World(*texts)
        hosts = Hosts(EnvironmentSettings(source=f"{place}/games.py:{name}", **spec), 1)
        shared = world.ctx.shared
        shared.environment, shared.least_siblings = hosts, least
        shared.config = shared.config.changed("rewards", functions=[], by_workflow=["environment"])
        made.append(hosts)
        return Stage(world, hosts)

    yield make
    for hosts in made:
        assert not hosts.living
        hosts.close()


def test_an_environment_answers_between_turns(stage):
    played = stage("Guess", "1", "2", "3")
    (scored,) = played.play(seed=5)
    assert (scored.reward, scored.parts) == (1.0, {"environment": 1.0, "seed": 5.0})
    assert scored.rollout.text == "1;u:no;a:2;u:no;a:3"
    said = played.world.ids(";u:no;a:")
    assert scored.rollout.mask_S.tolist() == [True, True, *[False] * len(said)] * 2 + [True, True]
    assert played.hosts.take_counts() == {"episodes": 1, "turns": 3, "tool_calls": 0, "tool_errors": 0}


def test_siblings_have_the_same_seed_and_other_prompts_another(stage):
    played = stage("Guess", "3", concurrency=2)
    first, second = played.play(n=2)
    assert first.parts["seed"] == second.parts["seed"] > 0
    other = stage("Guess", "3")
    other.world.prompt = dataclasses.replace(other.world.prompt, id=8)
    assert other.play()[0].parts["seed"] != first.parts["seed"]


def test_an_environment_may_speak_first_and_is_cut_by_max_turns(stage):
    played = stage("Told", "1", max_turns=2)
    (scored,) = played.play()
    assert scored.rollout.text == "1;u:more;a:1" and scored.reward == 1.0  # 0.5 for each turn
    assert played.world.engines.requests[0].content.tokens_T.tolist() == played.world.ids("u:go;a:")
    assert stage("Told", "3").play()[0].rollout.text == "3"  # truncated by the environment


def test_tools_are_called_and_their_errors_are_told(stage):
    def with_room(name: str, *texts: str) -> Stage:
        played = stage(name, *texts, max_turns=3)
        stops = (played.world.tokenizer.eos_token_id,)
        modality = TextModality(Generation(max_response_length=600), played.world.tokenizer, stops, 40)
        played.world.modality = played.world.ctx.shared.modality = modality
        return played

    played = with_room("Tools", call("add", '{"a": 2, "b": 3}'), "5")
    (scored,) = played.play()
    assert scored.rollout.text.endswith(";t:5;a:5") and scored.reward == 1.0
    counts = played.hosts.take_counts()
    assert (counts["turns"], counts["tool_calls"], counts["tool_errors"]) == (2, 1, 0)
    played = with_room("Tools", call("fail"), call("nothing") + call("add"), "4")
    (scored,) = played.play()
    assert "oh" in scored.rollout.text and "no tool" in scored.rollout.text  # without letters of no token
    assert scored.reward == 0.0 and played.hosts.take_counts()["tool_errors"] == 3


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("what", "cause"), [("raise", "raised"), ("die", "died"), ("garbage", "bad_answer"), ("nan", "bad_answer")]
)
def test_what_fails_once_begins_again_with_the_same_sample(place, stage, what, cause):
    args = {"what": what, "folder": str(place / "log")}
    played = stage("Troubled", "1", "1", "3", args=args)
    (scored,) = played.play()
    assert scored.reward == 1.0 and scored.rollout.text == "1;u:no;a:3"
    assert len({request.noise_key for request in played.world.engines.requests}) == 1
    counts = played.hosts.take_counts()
    assert counts[f"cause_{cause}"] == 1 and counts["retried"] == 1 and counts["episodes"] == 1
    assert not any(name.startswith("failed_") for name in counts)


def test_what_fails_always_is_dropped_and_no_sibling_with_it(place, stage):
    """The first episode fails three times: its sample is dropped, never scored; the group fails if none is left."""
    args = {"what": "raise", "folder": str(place / "log"), "times": 100}
    with pytest.raises(EnvironmentFailure, match=r"step raised ValueError: broken at games.py:\d+ in step \(raised\)"):
        stage("Troubled", "1", args=args).play()
    played = stage("Troubled", "1", "3", args=args, retries=0)
    (scored,) = played.play(n=2)  # one of the two says 3
    assert scored.reward == 1.0 and played.hosts.take_counts()["failed_raised"] == 1
    with pytest.raises(EnvironmentFailure):
        stage("Troubled", "1", "3", args=args, retries=0, on_failure="drop_group").play(n=2)
    with pytest.raises(EnvironmentFailure):
        stage("Troubled", "1", "3", args=args, retries=0, least=2).play(n=2)


def test_what_hangs_is_killed_and_the_others_in_its_process_begin_again(place, stage, monkeypatch):
    monkeypatch.setattr(hosts_module, "GRACE_S", 0.1)
    args = {"what": "hang", "folder": str(place / "log"), "at": "2"}
    played = stage("Troubled", "1", "2", "3", "3", "3", args=args, step_s=1.0)
    group = played.play(n=2)
    counts = played.hosts.take_counts()
    assert len(group) == 2 and counts["cause_hung"] == 1 and counts["restarts"] == 1
    assert not any(name.startswith("failed_") for name in counts)


def test_a_call_that_can_be_cancelled_does_not_kill_its_process(stage, monkeypatch):
    played = stage("Waits", "1", step_s=0.2, retries=1)
    with pytest.raises(EnvironmentFailure, match=r"step gave no answer within 0.2 s \(timeout\)"):
        played.play()
    counts = played.hosts.take_counts()
    assert (counts["cause_timeout"], counts["failed_timeout"], counts.get("restarts")) == (2, 1, None)
    late = stage("Tools", '<tool_call>{"name": "late"}</tool_call>', step_s=0.2, retries=0)
    with pytest.raises(EnvironmentFailure, match="tool_timeout"):
        late.play()


def test_a_process_that_dies_with_several_episodes_shows_alone_which_one_it_was(place, stage):
    """Both are suspects, and neither loses an attempt; then the guilty one dies alone until it is dropped."""
    args = {"what": "die", "folder": str(place / "log"), "times": 100}
    played = stage("Troubled", "1", args=args, retries=1)
    with pytest.raises(EnvironmentFailure, match="exited with code 3"):
        played.play(n=3)
    counts = played.hosts.take_counts()
    assert counts["failed_died"] == 3 and counts["cause_died"] == 6


def test_a_conversation_without_room_is_a_failure_or_scored(stage):
    played = stage("Guess", "1" * 60)
    with pytest.raises(EnvironmentFailure, match=r"generation\.max_response_length"):
        played.play()
    assert played.hosts.take_counts() == {
        "episodes": 1,
        "turns": 1,
        "tool_calls": 0,
        "tool_errors": 0,
        "cause_context_exceeded": 1,
        "failed_context_exceeded": 1,
    }
    (scored,) = stage("Guess", "1" * 60, on_context="score").play()
    assert scored.rollout.finish == "length" and scored.rollout.num_steps == 61 and scored.reward == 0.0


def test_many_episodes_wait_for_a_place(stage):
    played = stage("Guess", "3", concurrency=2)
    assert [scored.reward for scored in played.play(n=9)] == [1.0] * 9


def test_a_cancelled_workflow_frees_its_place(stage, monkeypatch):
    monkeypatch.setattr(hosts_module, "GRACE_S", 0.1)
    played = stage("Guess", "3", concurrency=1)
    waits = stage("Waits", "1", concurrency=1)

    async def main() -> None:
        task = asyncio.ensure_future(play(waits.world.ctx, waits.world.prompt, 1))
        while not waits.world.engines.made:
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        waits.world.ctx.shared.environment, other = waits.hosts, waits.hosts
        async with other.episode() as episode:  # the place is free again
            assert episode.number == 2
        waits.hosts.close()

    asyncio.run(main())
    assert played.play()[0].reward == 1.0


def test_an_environment_in_the_style_of_verifiers(stage, place):
    rows = rows_of(f"{place}/games.py:Verifiers")
    assert rows == [
        {
            "prompt": [{"role": "system", "content": "play"}, {"role": "user", "content": "1"}],
            "answer": "3",
            "info": {"k": 1},
        }
    ]
    played = stage("Verifiers", "1", "2", "3")
    played.world.prompt = dataclasses.replace(played.world.prompt, messages=tuple(rows[0]["prompt"]))
    (scored,) = played.play(answer="3")
    assert (scored.reward, scored.parts) == (1.0, {"environment": 1.0, "turns": 3.0, "asked": 2.0})
    assert scored.rollout.text == "1;u:no;a:2;u:no;a:3"
    (scored,) = stage("Verifiers", "1", "2").play(answer="3")
    assert scored.reward == 0.0 and scored.parts["turns"] == 3  # max_turns


def test_an_environment_with_its_own_rollout_gets_a_client(stage):
    pytest.importorskip("openai")
    played = stage("Runs", "4", "5")
    group = played.play(n=2, answer="4", prompt=[{"role": "user", "content": "1"}])
    assert sorted(s.reward for s in group) == [0.0, 2.0] and played.hosts.take_counts() == {"episodes": 2, "turns": 2}
    made = sorted(made.content.tokens_S.tolist() for made in played.world.engines.made)
    assert sorted(s.rollout.content.tokens_S.tolist() for s in group) == made


def test_rows_and_arguments_are_checked_in_a_line(place):
    assert (
        rows_of(f"{place}/games.py:Guess", split="eval", size=2)
        == [{"prompt": "1", "answer": "3", "split": "eval"}] * 2
    )
    for source, message in (
        ("games.py:Guess", "no such file"),
        (f"{place}/games.py:Gues", "did you mean Guess"),
        (f"{place}/games.py:broken", "raised RuntimeError: no licence"),
        (f"{place}/games.py:nothing", "object has neither `step` nor `tools`"),
        (f"{place}/games.py:Tools", "has no rows"),
    ):
        with pytest.raises(UserError, match=message):
            rows_of(source)
    with pytest.raises(UserError, match=r"unexpected keyword argument 'x' \(got environment.args="):
        rows_of(f"{place}/games.py:Guess", {"x": 1})


def test_an_environment_is_loaded_before_the_run(place):
    check(EnvironmentSettings(source=f"{place}/games.py:Guess", args={"secret": 1}))
    with pytest.raises(UserError, match=r"environment.source: .*games.py:broken raised RuntimeError: no licence"):
        check(EnvironmentSettings(source=f"{place}/games.py:broken"))
    with pytest.raises(UserError, match=r"mcp is not installed|expected mcp:COMMAND or mcp:URL"):
        check(EnvironmentSettings(source="mcp: "))


def test_a_recipe_with_an_environment_needs_little_else():
    tree = {key: value for key, value in RECIPE.items() if key not in ("data", "rewards")}
    short = {"max_prompt_length": 8}
    config = validate({**tree, "data": short, "environment": {"source": "a.py:B", "args": {"x": 1}}}, "recipe", Config)
    assert config.workflow == "gcore.workflows.environment:episodes"
    assert config.rewards.by_workflow == ["environment"] and config.rewards.accuracy_name == "environment"
    assert config.data.train.task == ROWS
    assert config.data.train.args == {"source": "a.py:B", "args": {"x": 1}, "split": "train", "size": None}
    data = {"max_prompt_length": 8, "train": {"path": "x.jsonl"}, "eval": {"task": "environment", "size": 9}}
    rewards = {"functions": [{"name": "right", "path": "gcore.rewarding.rules:exact_answer"}]}
    spec = {"environment": {"source": "a.py:B"}, "data": data, "rewards": rewards, "workflow": "b.py:flow"}
    config = validate({**tree, **spec}, "recipe", Config)
    assert (config.workflow, config.rewards.by_workflow, config.data.train.path) == ("b.py:flow", [], "x.jsonl")
    assert config.data.eval_sets[""].args == {"source": "a.py:B", "args": {}, "split": "eval", "size": 9}
    spec = {"environment": {"source": "mcp:python server.py", "args": {"game": "c.py:Game"}}, "data": data}
    assert {"b.py", "c.py"} <= set(sent_files(validate({**tree, **spec, "workflow": "b.py:flow"}, "recipe", Config)))
    with pytest.raises(UserError, match=r"environment.source"):
        validate({**tree, "data": data, "rewards": rewards, "environment": {}}, "recipe", Config)


def test_an_environment_without_a_dataset_has_seeds_as_rows(place):
    assert rows_of(f"{place}/games.py:Seeded", size=2) == [
        {"prompt": "seed 0", "seed": 0},
        {"prompt": "seed 1", "seed": 1},
    ]
    (row,) = rows_of(f"{place}/games.py:Seeded", split="eval", size=1)
    assert row["seed"] == 10**6


def test_an_environment_of_gymnasium(stage):
    pytest.importorskip("gymnasium")
    source, args = "gym:FrozenLake-v1", {"is_slippery": False}
    assert rows_of(source, args, size=1) == [{"prompt": "0", "seed": 0}]
    played = stage("Guess", *"221", "go 1", "x", "12", "1", "2")
    played.hosts.spec = played.hosts.spec.model_copy(update={"source": source, "args": args})
    stops = (played.world.tokenizer.eos_token_id,)
    played.world.ctx.shared.modality = TextModality(Generation(max_response_length=600), played.world.tokenizer, stops)
    (scored,) = played.play()
    assert scored.reward == 1.0 and "is no action; expected a number from 0 to 3" in scored.rollout.text
    with pytest.raises(UserError, match=r"environment.source=gym:Nope-v1: Environment"):
        rows_of("gym:Nope-v1")


def test_an_environment_of_openenv(stage):
    """Its server runs in this process."""
    pytest.importorskip("openenv")
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import EnvironmentSettings as Served
    from openenv.core.env_server.types import Action, State
    from openenv.core.env_server.types import Observation as Seen

    class Said(Action):
        text: str

    class Heard(Seen):
        answer: str = ""

    class Echo(Served):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: Any = None, episode_id: Any = None, **_: Any) -> Heard:
            return Heard(answer=f"seed {seed}", done=False, reward=0.0)

        def step(self, action: Said, **_: Any) -> Heard:
            return Heard(answer=action.text + "!", done=action.text == "3", reward=float(action.text == "3"))

        @property
        def state(self) -> State:
            return State()

    server = uvicorn.Server(
        uvicorn.Config(create_fastapi_app(Echo, Said, Heard), host="127.0.0.1", port=0, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    url = f"openenv:http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    args = {"action": "text", "say": "answer"}
    assert rows_of(url, args, size=2)[1] == {"prompt": "seed 1", "seed": 1}
    played = stage("Guess", "1", "3")
    played.hosts.spec = played.hosts.spec.model_copy(update={"source": url, "args": args})
    (scored,) = played.play(seed=4)
    assert scored.reward == 1.0 and scored.rollout.text == "1;u:1;a:3"  # the alphabet has no !
    assert played.world.engines.requests[0].content.tokens_T.tolist() == played.world.ids("u:seed 4;a:")
    server.should_exit = True
    thread.join(timeout=10)
    broken = stage("Guess", "1", retries=0)
    broken.hosts.spec = broken.hosts.spec.model_copy(update={"source": url, "args": args})
    with pytest.raises(EnvironmentFailure, match="raised"):
        broken.play()


def test_metrics_and_the_budget_of_a_step():
    counts = {"episodes": 4, "turns": 6, "retried": 3, "cause_hung": 3, "failed_hung": 2, "failed_died": 1}
    row = environment_row(hosts_module.Counter(counts))
    assert row["environment/turns"] == 1.5 and row["environment/failed_hung"] == 2 and row["environment/retried"] == 3
    spec = EnvironmentSettings(source="a.py:B", max_failed_frac=0.75)
    check_episodes(spec, 3, hosts_module.Counter(counts))
    with pytest.raises(UserError, match=r"step 3: 3 of 4 episodes of environment.source=a.py:B failed \(died 1, hun"):
        check_episodes(spec.model_copy(update={"max_failed_frac": 0.5}), 3, hosts_module.Counter(counts))


def trajectories(*rewards: list[float]) -> tuple[list[Scored], list[Trajectory]]:
    """Each turn has two tokens of the policy, and between two turns the environment says one."""
    made, group = [], []
    for sibling, own in enumerate(rewards):
        mask_S = np.array(([True, True, False] * len(own))[:-1])
        rollout = dataclasses.replace(scored_sample(7, sibling).rollout, mask_S=mask_S)
        made.append(Trajectory(rollout, [3 * k + 2 for k in range(len(own))], list(own), measured=True))
        group.append(Scored(rollout, sum(own)))
    return group, made


def test_turns_are_credited_with_what_they_and_later_ones_earned():
    group, made = trajectories([1.0, 0.0], [0.0, 1.0, 2.0])
    first, second = with_turn_credit(group, made, 0.5, divides=False)
    # G: 1, 0 and 0 + 0.5 + 0.5 = 1, 1 + 1 = 2, 2; means by turn: 1, 1, 2; A - A_episode, which is -1 and 1
    assert first.step_rewards_S.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert second.step_rewards_S.tolist() == [-1.0, -1.0, 0.0, 0.0, 0.0, 0.0, -1.0, -1.0]
    spread = np.std([1.0, 3.0], ddof=1) + 1e-6
    first, second = with_turn_credit(group, made, 0.5, divides=True)
    advantages = grpo(GroupScores(np.array([1.0, 3.0]), np.array([4.0, 6.0])))
    assert advantages[1] + second.step_rewards_S[3] == pytest.approx(1 / spread)  # (2 - 1) / spread
    assert advantages[0] + first.step_rewards_S[0] == pytest.approx(0.0, abs=1e-6)


def test_equal_rewards_of_episodes_still_have_turns():
    group, made = trajectories([1.0, 0.0], [0.0, 1.0])
    first, second = with_turn_credit(group, made, 1.0, divides=True)
    assert first.step_rewards_S[0] == 0 and first.step_rewards_S[3] == -second.step_rewards_S[3] < 0


def test_estimators_with_a_reward_per_step_get_that_of_each_turn():
    group, made = trajectories([1.0, 2.0, 4.0])
    (one,) = with_turn_credit([dataclasses.replace(group[0], reward=8.0)], made, 1.0, divides=None)  # 1 of the recipe
    steps_S = one.step_rewards_S + step_rewards(8.0, one.rollout.mask_S)
    assert steps_S.tolist() == [0, 1.0, 0, 0, 2.0, 0, 0, 5.0]
    found = generalized({(7, 0): steps_S}, None, {(7, 0): one.rollout.mask_S}, 1.0, 1.0)[7, 0]
    assert found[one.rollout.mask_S].tolist() == [8.0, 8.0, 7.0, 7.0, 5.0, 5.0]


def test_turns_that_an_episode_earned_reach_the_samples(stage):
    played = stage("Told", "1", "3", credit="turn", discount=0.5, least=1)
    (one,) = played.play()
    assert one.reward == 1.0 and one.step_rewards_S is not None and len(one.step_rewards_S) == one.rollout.num_steps


def test_credit_and_estimator_must_fit():
    tree = {**RECIPE, "environment": {"source": "a.py:B", "credit": "turn"}}
    for algorithm, message in (
        ({"adv_estimator": "rloo"}, "environment.credit=turn: got algorithm.adv_estimator=rloo; expected one of grpo"),
        ({"adv_estimator": "grpo"}, None),
        ({"adv_estimator": "gae"}, None),
    ):
        if message is None:
            validate({**tree, "algorithm": algorithm}, "recipe", Config)
            continue
        with pytest.raises(UserError, match=message):
            validate({**tree, "algorithm": algorithm}, "recipe", Config)
    with pytest.raises(UserError, match=r"environment.discount=0.5 needs environment.credit=turn"):
        validate({**RECIPE, "environment": {"source": "a.py:B", "discount": 0.5}}, "recipe", Config)


def test_what_step_may_return():
    assert observation(("x", 1, True)) == Observation("x", 1.0, True)
    assert observation((7, True, False, False, {"a": 1, "b": "text"})) == Observation("7", 1.0, False, {"a": 1.0})
    assert observation(([{"role": "user", "content": "x"}], None, False)).reward is None


SERVER = '''
import os
from mcp.server import MCPServer
server = MCPServer("tools")

@server.tool()
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b

@server.tool()
def fail() -> str:
    raise ValueError("oh")

@server.tool()
def die() -> str:
    if not os.path.exists("died"):
        open("died", "w").close()
        os._exit(3)
    return "alive"

@server.tool()
def row() -> str:
    return os.environ.get("GCORE_SEED", "none")

server.run()
'''


def test_tools_of_an_mcp_server(place):
    pytest.importorskip("mcp")
    (place / "server.py").write_text(SERVER)
    source = f"mcp:python {place}/server.py"

    async def ask(call: Call, **args: Any) -> Observation:
        hosts = Hosts(EnvironmentSettings(source=source, args={"cwd": str(place), **args}), 1)
        try:
            async with hosts.episode() as episode:
                opening = await episode.reset({"prompt": "1"}, 5)
                assert [tool["function"]["name"] for tool in opening.tools] == args.get(
                    "tools", ["add", "fail", "die", "row"]
                )
                schema = opening.tools[0]["function"]
                assert schema["description"] == "The sum." and schema["parameters"]["required"] == ["a", "b"]
                return await episode.step("", [call])
        finally:
            hosts.close()

    async def main() -> None:
        made = await ask(Call("add", {"a": 2, "b": 3}), tools=["add"])
        assert made.said == [{"role": "tool", "content": "5"}] and (made.tool_errors, made.done) == (0, False)
        assert (await ask(Call("fail"))).tool_errors == 1
        assert (await ask(Call("row"))).said == [{"role": "tool", "content": "none"}]
        assert (await ask(Call("row"), per_episode=True)).said == [{"role": "tool", "content": "5"}]
        with pytest.raises(EnvironmentFailure, match=r"is gone: .*\(died\)"):
            await ask(Call("die"))
        with pytest.raises(UserError, match=r"environment.args: got tool; expected some of env, cwd"):
            await ask(Call("die"), tool="x")

    asyncio.run(main())


def test_an_mcp_server_that_dies_is_started_again(place, stage):
    pytest.importorskip("mcp")
    (place / "server.py").write_text(SERVER)
    played = stage("Guess", "die[", "die[", "3", calls={"die": r"die\["})
    args = {"cwd": str(place), "game": f"{place}/games.py:Guess"}
    played.hosts.spec = played.hosts.spec.model_copy(update={"source": f"mcp:python {place}/server.py", "args": args})
    (scored,) = played.play()
    assert scored.rollout.text == "die[;t:alive;a:3" and scored.reward == 1.0
    counts = played.hosts.take_counts()
    assert (counts["cause_died"], counts["retried"], counts["tool_calls"]) == (1, 1, 1)


def test_a_call_to_a_process_whose_socket_is_closed_is_a_failure(place):
    """The transport closes before the end of the process is known. uvloop raises if it is written to then."""
    uvloop = pytest.importorskip("uvloop")
    hosts = Hosts(EnvironmentSettings(source=f"{place}/games.py:Guess"), 1)

    async def main() -> None:
        for yields in range(4):  # the handle is closed in one of the next turns of the loop
            async with hosts.episode() as episode:
                await episode.reset({"prompt": "1"}, 0)
                episode.host._child._writer.transport.abort()
                for _ in range(yields):
                    await asyncio.sleep(0)
                with pytest.raises(EnvironmentFailure, match="its process"):
                    await episode.step("1", [])
        hosts.close()

    uvloop.run(main())
