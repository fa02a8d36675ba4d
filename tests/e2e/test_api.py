"""Runs from Python: functions as objects, named evaluation sets, and agents that only know HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from gcore import UserError, evaluate, train
from gcore.clients import TrainerClient
from gcore.controller.evaluation import pass_at_k
from gcore.generation.pool import EnginePool
from tests.e2e.helpers import RECIPE, environment, steps, untimed
from tests.unit.test_endpoint_reach import free_port

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]


def recipe(folder: Path, **top: Any) -> dict[str, Any]:
    return {
        **RECIPE,
        "run": {"name": "python", "steps": 2, "dir": str(folder), "seed": 3},
        "runtime": "local",
        "controllers": 2,
        "observe": {"progress": "none", "trackers": [], "eval_every": 1},
        "training": {"lr": 3e-3},
        **top,
    }


def even(prompts, completions, answer, **columns):
    return [float(len(text) % 2 == 0) for text in completions]


def test_a_run_with_objects_and_several_evaluation_sets(tmp_path):
    seen = []

    async def workflow(ctx, prompt):
        seen.append(prompt.id)
        return await ctx.reward(await ctx.generate(prompt))

    tree = recipe(
        tmp_path,
        evaluation={"samples": 4, "k": [1, 2, 4]},
        checkpoint={"every": 1, "keep_best": 1, "best_metric": "eval/small/pass@2"},
    )
    tree["data"] = {"train": ROWS, "eval": {"small": ROWS[:2], "large": ROWS[6:20]}, "max_prompt_length": 12}
    result = train(tree, reward=even, workflow=workflow, filter=lambda group: True)
    assert seen and len(steps(result.rows)) == 2 and "samples_digest" in result.metrics
    evaluations = [row for row in result.rows if "eval/small/pass@2" in row]
    assert [row["step"] for row in evaluations] == [0, 1, 2]
    row = evaluations[-1]
    assert row["eval/small/prompts"] == 2 and row["eval/large/prompts"] == 14 and row["eval/prompts"] == 16
    assert row["eval/small/pass@1"] == pytest.approx(row["eval/small/mean@4"])  # rewards are 0 or 1
    assert row["eval/accuracy"] == pytest.approx((row["eval/small/accuracy"] + row["eval/large/accuracy"]) / 2)
    assert row["eval/large/pass@1"] <= row["eval/large/pass@2"] <= row["eval/large/pass@4"]
    # the same numbers from the logged answers, which are those to the first two prompts of a set
    logged = [s for s in result.samples if (s["phase"], s.get("set"), s["step"]) == ("eval", "small", 2)]
    assert [len(group["samples"]) for group in logged] == [4, 4]
    assert all(len({sample["text"] for sample in group["samples"]}) > 1 for group in logged)  # sampled, not greedy
    passed = [sum(len(sample["text"]) % 2 == 0 for sample in group["samples"]) for group in logged]
    for k in (1, 2, 4):
        assert row[f"eval/small/pass@{k}"] == pytest.approx(float(sum(pass_at_k(4, c, k) for c in passed) / 2))
    assert result.best in result.checkpoints and result.history("reward/mean")[0][0] == 1
    manifest = json.loads((result.best / "manifest.json").read_text())
    assert manifest["score"] == max(row["eval/small/pass@2"] for row in evaluations[1:])
    again = evaluate(result)  # the last checkpoint: the same samples, so the same numbers
    assert {k: v for k, v in again.items() if k.startswith("eval/")} == {
        k: v for k, v in row.items() if k.startswith("eval/")
    }
    other = evaluate(result.checkpoints[-1], "evaluation.k=[3]", reward=even, workflow=workflow, data=ROWS[:3])
    assert other["eval/prompts"] == 3 and 0 <= other["eval/pass@3"] <= 1


def test_errors_of_a_run_are_exceptions(tmp_path):
    def broken(prompts, completions, **columns):
        raise RuntimeError("not today")

    with pytest.raises(UserError, match="not today"):
        train(recipe(tmp_path), reward=broken)

    async def wrong(ctx, prompt):
        return [1]

    async def notebook():
        train(recipe(tmp_path), workflow=wrong)

    with pytest.raises(UserError, match="workflow returned a list of int for prompt"):
        asyncio.run(notebook())


def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, list[Any]], list[Any]]:
    """What the engines sampled, by noise key; and the samples that the trainer received."""
    sampled: dict[int, list[Any]] = {}
    trained: list[Any] = []
    generate = EnginePool.generate

    async def record_generate(self: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
        completions = await generate(self, requests, *args, **kwargs)
        for request, completion in zip(requests, completions, strict=True):
            if request.params.temperature:  # evaluations are greedy
                sampled.setdefault(request.noise_key, []).append(completion)
        return completions

    async def record_push(self: Any, source: int, samples: Any) -> Any:
        trained.extend(samples)
        return await self.handle.call("push", source, samples)

    monkeypatch.setattr(EnginePool, "generate", record_generate)
    monkeypatch.setattr(TrainerClient, "push", record_push, raising=False)  # its methods exist on instances alone
    return sampled, trained


BUILD = {**RECIPE["model"]["build"], "max_length": 40, "alphabet": "0123456789+=[];?<>"}


def test_an_agent_that_only_knows_http_trains_on_exact_tokens(tmp_path, monkeypatch):
    sampled, trained = recorded(monkeypatch)
    tree = recipe(tmp_path, model={"build": BUILD}, generation={"max_response_length": 12})
    result = train(
        {**tree, "observe": {**tree["observe"], "eval_every": 0}},
        f"workflow={ROOT}/examples/http_agent.py:workflow",
        f"rewards.functions.0.path={ROOT}/examples/http_agent.py:last_answer",
    )
    found = steps(result.rows)
    assert len(found) == 2 and all(row["batch/samples"] == 48 for row in found)
    assert all(row["rollout/logprob_diff_max"] < 1e-5 for row in found)
    keys = {tuple(np.concatenate([c.content.tokens_S for c in cs])): cs for cs in sampled.values()}
    turns = []
    for sample in trained:
        own = keys[tuple(sample.content.tokens_S[sample.mask_S])]  # the tokens of this sample, of all its turns
        logprobs = np.concatenate([completion.logprobs_S for completion in own])
        assert np.array_equal(sample.rollout_logprobs_S[sample.mask_S], logprobs)
        turns.append(len(own))
    assert len(trained) == 96 and set(turns) <= {1, 2} and 2 in turns
    assert any((~sample.mask_S).any() for sample in trained)  # what the agent said is masked


@pytest.mark.parametrize("example", ["number_game", "parallel_tools"])
def test_examples_of_environments_and_tools(tmp_path, monkeypatch, example):
    monkeypatch.chdir(ROOT)
    if example == "number_game":
        source: Any = "examples/number_game.yaml"
        extra = ["runtime=local", "observe.progress=none", "observe.trackers=[]"]
    else:
        source = recipe(tmp_path, model={"build": BUILD}, generation={"max_response_length": 16})
        extra = ["workflow=examples/parallel_tools.py:workflow"]
    result = train(source, "run.steps=2", f"run.dir={tmp_path}", "placement.trainer.ranks=1", *extra)
    found = steps(result.rows)
    assert len(found) == 2 and all(row["rollout/logprob_diff_mean"] < 1e-5 for row in found)
    if example == "number_game":
        assert {"reward/environment", "reward/found", "reward/fast", "environment/turns"} <= found[0].keys()
        assert found[0]["response_length/max"] > 2


@pytest.mark.release
def test_a_script_sends_its_functions_to_the_processes_of_ray(tmp_path):
    """Functions of __main__, a lambda, a closure and rows, in engines' controllers and in reward workers."""
    script = tmp_path / "script.py"
    script.write_text(
        "from gcore import train\n"
        f"tree = {recipe(tmp_path)!r}\n"
        f"rows = {ROWS!r}\n"
        "bonus = 0.25\n"
        "def right(prompts, completions, answer, **columns):\n"
        "    return [float(c == a) + bonus for c, a in zip(completions, answer)]\n"
        "def flow_of(n):\n"
        "    async def flow(ctx, prompt):\n"
        "        return await ctx.reward(await ctx.generate(prompt, n=n))\n"
        "    return flow\n"
        "if __name__ == '__main__':\n"
        "    short = lambda completions, **_: [-0.01 * len(c) for c in completions]\n"
        "    result = train(tree, 'runtime=ray', reward={'right': right, 'short': short}, workflow=flow_of(3),\n"
        "                   filter=lambda group: len(group) == 3, data=rows)\n"
        "    row = result.metrics\n"
        "    print(row['batch/samples'], row['reward/right'] >= 0.25, row['reward/short'] < 0)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment(), timeout=500)
    assert done.stdout.splitlines()[-1:] == ["36 True True"], done.stdout + done.stderr


async def several_conversations(ctx, prompt):
    """An agent that asks, then asks two sub-agents at once, and at last rewrites its history."""
    question = prompt.columns["prompt"]

    async def ask(http, session, text):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with http.post(f"{session.base_url}/chat/completions", json=body, headers=headers) as answer:
            return (await answer.json())["choices"][0]["message"]["content"]

    async def agent(http, session):
        first = await ask(http, session, question)
        await asyncio.gather(ask(http, session, "?1+1="), ask(http, session, "?2+2="))
        await ask(http, session, f"{question}?{first};"[-10:])

    async with ctx.serve(prompt) as sessions, aiohttp.ClientSession() as http:
        await asyncio.gather(*(agent(http, session) for session in sessions))
        group = [session.rollout for session in sessions]
    return await ctx.reward(group)


def test_trajectories_of_several_conversations_do_not_depend_on_controllers(tmp_path, monkeypatch):
    """Each sampled token is an action of one sample. With two controllers both have the sessions of one port."""
    found = []
    for controllers in (1, 2):
        with monkeypatch.context() as patched:
            sampled, trained = recorded(patched)
            tree = recipe(tmp_path, model={"build": BUILD}, controllers=controllers, endpoint={"port": free_port()})
            tree["run"] = {**tree["run"], "name": f"with-{controllers}"}
            tree["algorithm"] = {"loss_aggregation": "sequence_mean"}
            result = train({**tree, "observe": {**tree["observe"], "eval_every": 0}}, workflow=several_conversations)
        rows = steps(result.rows)
        assert len(rows) == 2 and all(row["batch/samples"] == 48 for row in rows)
        assert len(trained) == 2 * 48 * 4 and all(row["rollout/logprob_diff_max"] < 1e-5 for row in rows)
        actions = sorted(tuple(sample.content.tokens_S[sample.mask_S].tolist()) for sample in trained)
        made = [tuple(c.content.tokens_S.tolist()) for completions in sampled.values() for c in completions]
        assert actions == sorted(made)
        found.append([untimed(row) for row in rows])
    assert found[0] == found[1]
