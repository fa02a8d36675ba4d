"""Agents of the command line in sandboxes: what they reach, what is recorded, and failures that are never scores."""

from __future__ import annotations

import asyncio
import signal
import string
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gcore.config.generation import Generation
from gcore.config.sandbox import Limits, SandboxSettings
from gcore.content.text import TextModality
from gcore.content.tokens import Tokens
from gcore.prompts.tokenizer import build_char_tokenizer
from gcore.sandbox.base import SandboxError
from gcore.sandbox.bubblewrap import BubblewrapSandboxes
from gcore.sandbox.pool import SandboxPool
from gcore.types import Prompt, Scored
from gcore.workflows.command_line import AgentFailure, AgentRun, command_line_agent
from gcore.workflows.context import ForAgents, SampleContext, SharedContext
from gcore.workflows.endpoint import Endpoint
from tests.unit.test_endpoint import TEMPLATE, Engines
from tests.unit.test_evaluation import config_of

KIND = BubblewrapSandboxes(SandboxSettings(limits=Limits(memory_mb=128, disk_mb=32, seconds=20)))
pytestmark = pytest.mark.skipif(KIND.problem() is not None, reason=f"no sandbox: {KIND.problem()}")

# an agent without libraries: it asks for commands until the policy says `done`
AGENT = r"""
import json, os, subprocess, sys, urllib.request

messages = [{"role": "user", "content": os.environ["PROMPT"]}]
while True:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    if said == "done":
        break
    ran = subprocess.run(said, shell=True, capture_output=True, text=True)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": ran.stdout + ran.stderr}]
print("turns:", len(messages))
sys.exit(int(os.environ.get("EXIT", 0)))
"""


class World:
    """A policy that writes what the test says, turn by turn, and a controller's sandboxes."""

    def __init__(self, *texts: str, kind: Any = KIND) -> None:
        self.tokenizer = build_char_tokenizer(string.printable)
        self.tokenizer.chat_template = TEMPLATE
        self.engines = Engines(self.tokenizer, list(texts))
        self.modality = TextModality(
            Generation(max_response_length=20_000), self.tokenizer, (self.tokenizer.eos_token_id,), 20_000
        )
        self.prompt = Prompt(7, 7, ({"role": "user", "content": "write 2 to a"},), "", Tokens(np.array([1], np.int32)))
        self.judged: list[str] = []
        self.kind = kind

    async def reward(self, group: Any) -> list[Scored]:
        self.judged += [rollout.output for rollout in group]
        return [Scored(rollout, 0.5) for rollout in group]

    def run(self, workflow: Any) -> list[Scored]:
        async def main() -> list[Scored]:
            rewarder: Any = SimpleNamespace(reward=self.reward)
            pool = SandboxPool(KIND.settings, self.kind)
            config = config_of()
            agents, parts = ForAgents(Endpoint(config.endpoint), pool), (config, self.engines, rewarder, self.modality)
            shared = SharedContext(*parts, greedy=True, agents=agents)  # type: ignore[arg-type]
            return await workflow(SampleContext(shared), self.prompt)

        return asyncio.run(asyncio.wait_for(main(), 60))


def agent_of(**options: Any) -> Any:
    return command_line_agent(["python3", "-c", AGENT], **options)


def test_an_agent_acts_in_its_sandbox_and_is_recorded():
    async def score(run: AgentRun) -> float:
        assert run.result.text == "turns: 5\n"
        return float(await run.box.read("a"))

    world = World("echo 2 > a", "ls; cat a", "done")
    (scored,) = world.run(agent_of(score=score))
    assert (scored.reward, scored.parts) == (2.0, {"agent": 2.0})
    rollout, made = scored.rollout, world.engines.made
    sampled = [step for completion in made for step in completion.content.tokens_S]
    assert rollout.content.tokens_S[rollout.mask_S].tolist() == sampled
    assert np.array_equal(rollout.logprobs_S[rollout.mask_S], np.concatenate([c.logprobs_S for c in made]))
    assert rollout.text == "echo 2 > a;u:;a:ls; cat a;u:a\n2\n;a:done"


def test_the_rewards_of_the_recipe_judge_a_file_of_the_agent(tmp_path):
    (tmp_path / "given").write_text("from the task")
    world = World("cp given a", "done")
    (scored,) = world.run(agent_of(folder=str(tmp_path), answer="a"))
    assert (scored.reward, world.judged) == (0.5, ["from the task"])
    world = World("done")
    world.run(agent_of(folder=lambda prompt: str(tmp_path), answer="a"))
    assert world.judged == [""]  # it wrote none: the agent's fault, which rewards judge


@pytest.mark.parametrize(
    ("texts", "options", "cause"),
    [
        (["done"], {"env": {"EXIT": "3"}}, "exit"),
        (["sleep 99"], {"seconds": 1.0}, "time"),
        (["head -c 20000000 /dev/zero | tee a > b", "done"], {"env": {"EXIT": "1"}}, "disk"),
        (["done"], {"env": {"OPENAI_BASE_URL": "http://127.0.0.1:1"}}, "exit"),
        (["done"], {"env": {"OPENAI_API_KEY": "wrong"}}, "exit"),
    ],
)
def test_a_failure_has_a_cause_and_is_no_score(texts, options, cause):
    async def score(run: AgentRun) -> float:
        raise AssertionError("it must not be scored")

    with pytest.raises(AgentFailure) as failed:
        World(*texts).run(agent_of(score=score, **options))
    assert failed.value.cause == cause, failed.value


def test_an_agent_that_never_asks_has_failed():
    with pytest.raises(AgentFailure, match="agent: silent: it ended without a request to the policy: hello"):
        World("done").run(command_line_agent("echo hello"))
    with pytest.raises(AgentFailure, match=r"agent: exit: code 127: .*no-such-agent"):
        World("done").run(command_line_agent(["no-such-agent"]))


def test_exit_codes_that_are_no_failure():
    (scored,) = World("done").run(agent_of(env={"EXIT": "3"}, codes=(0, 3)))
    assert scored.reward == 0.5
    (scored,) = World("done").run(agent_of(env={"EXIT": "9"}, codes=None))
    assert scored.reward == 0.5


class Unreliable:
    """Its first sandboxes die, before or during the run of the agent."""

    def __init__(self, *failures: str) -> None:
        self.failures, self.started = list(failures), 0

    async def start(self) -> Any:
        self.started += 1
        what = self.failures.pop(0) if self.failures else ""
        if what == "start":
            raise SandboxError("start", "no place")
        box = await KIND.start()
        if what == "killed":
            later = asyncio.get_running_loop().call_later
            later(1.5, signal.pidfd_send_signal, box._process.first, signal.SIGKILL)
        return box


@pytest.mark.parametrize("what", ["start", "killed"])
def test_a_sandbox_that_dies_is_tried_again(what):
    kind = Unreliable(what)
    world = World(*(["sleep 9"] if what == "killed" else []), "done", kind=kind)
    (scored,) = world.run(agent_of())
    assert (scored.reward, kind.started) == (0.5, 2)
    sampled = scored.rollout.content.tokens_S[scored.rollout.mask_S]
    later = [step for c in world.engines.made[what == "killed" :] for step in c.content.tokens_S]
    assert sampled.tolist() == later  # nothing of the attempt that failed
    with pytest.raises(AgentFailure) as failed:
        World("sleep 9", kind=Unreliable(*[what] * 2)).run(agent_of())
    assert failed.value.cause == what
