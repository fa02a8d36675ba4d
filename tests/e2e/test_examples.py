"""What examples/ and docs/extending.md show does run; and one controller carries thousands of sample programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gcore.config.base import BuildModel, Model
from gcore.models.networks import load_scorer
from gcore.prompts.tokenizer import build_char_tokenizer
from tests.e2e.helpers import RECIPE, gcore, rows, steps, train, untimed, write_recipe

EXAMPLES = Path(__file__).parents[2] / "examples"
BUILD = {**RECIPE["model"]["build"], "max_length": 48, "alphabet": "0123456789+=[];"}
PANEL = {  # models that were never trained: what counts here is that all of it runs
    "model": {"build": BUILD},
    "generation": {"max_response_length": 12},
    "rewards": {
        "functions": [{"name": "exact", "path": "gcore.rewarding.rules:exact_answer"}],
        "judges": [
            {
                "name": "checker",
                "model": {"build": {**BUILD, "alphabet": "0123456789+=[];?"}},
                "template": "{{ prompt }}{{ response }}?",
                "verdict": r"(\d)",
                "max_response_length": 6,
                "max_prompt_length": 30,
                "attempts": 20,
            }
        ],
        "max_error_frac": 0.9,
    },
}


def test_second_chance(tmp_path):
    found = steps(
        train(
            tmp_path,
            "example",
            "runtime=local",
            "controllers=2",
            f"workflow={EXAMPLES}/second_chance.py:workflow",
            f"rewards.functions.0.path={EXAMPLES}/second_chance.py:close",
        )
    )
    assert len(found) == 5 and all(0 < row["reward/mean"] < 1 for row in found)
    assert all(row["rollout/logprob_diff_mean"] < 1e-5 for row in found)


def test_every_temperature_is_trained_at_its_own(tmp_path):
    """A workflow that draws a second batch hotter: fresh noise, no sample twice, logprobs at the right temperature."""
    flow = tmp_path / "flow.py"
    flow.write_text(
        "async def workflow(ctx, prompt):\n"
        "    cool = await ctx.generate(prompt, n=3)\n"
        "    hot = await ctx.generate(prompt, n=3, temperature=1.7)\n"
        "    return await ctx.reward(cool + hot)\n"
    )
    found = steps(train(tmp_path, "hot", "runtime=local", "controllers=2", f"workflow={flow}:workflow"))
    assert all(row["batch/samples"] == 12 * 6 for row in found)
    assert all(row["rollout/logprob_diff_mean"] < 1e-5 for row in found)


def test_thousands_of_samples_at_once(tmp_path):
    """2,000 prompts of one step are all in flight together; the engine takes them as rows come free."""
    workflow = tmp_path / "count.py"
    workflow.write_text(
        "import asyncio\n\nhere = most = 0\n\n\n"
        "async def workflow(ctx, prompt):\n"
        "    global here, most\n"
        "    here += 1\n"
        "    most = max(most, here)\n"
        "    await asyncio.sleep(0)\n"
        "    scored = await ctx.reward(await ctx.generate(prompt))\n"
        "    here -= 1\n"
        f"    open('{tmp_path}/most', 'w').write(str(most))\n"
        "    return scored\n"
    )
    found = steps(
        train(
            tmp_path,
            "many",
            "runtime=local",
            "run.steps=1",
            "controllers=1",
            f"workflow={workflow}:workflow",
            "sampling.prompts_per_step=2000",
            "sampling.samples_per_prompt=2",
        )
    )
    assert found[0]["batch/samples"] == 4000
    assert int((tmp_path / "most").read_text()) == 2000


def test_failing_rewards_are_dropped_and_counted_never_zero(tmp_path):
    """Prompts in = trained + reported as failed; a group without a reward leaves the step, the others go on."""
    reward = tmp_path / "moody.py"
    reward.write_text(
        "def moody(prompts, completions, answer, **_):\n"
        "    if int(answer[0]) % 5 == 0:\n"
        "        raise RuntimeError('not today')\n"
        "    return [1.0 + (c == answer[0]) for c in completions]\n"
    )
    found = steps(
        train(tmp_path, "moody", "runtime=local", "controllers=2", f"rewards.functions.0.path={reward}:moody")
    )
    assert sum(row["reward/errors"] for row in found) > 0
    for row in found:
        assert row["batch/samples"] == 4 * (12 - row["reward/errors"])
        assert row["reward/mean"] >= 1.0  # no failure was taken for a 0


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """The folder of a scalar model that was never trained either."""
    folder = tmp_path_factory.mktemp("scorer")
    model, tokenizer = Model(build=BuildModel(**BUILD)), build_char_tokenizer(BUILD["alphabet"])
    network = load_scorer(model, 0, torch.float32, torch.device("cpu"), tokenizer=tokenizer, new_head=True)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("example", ["best_of_n", "stepwise", "calculator", "feedback"])
def test_workflows(tmp_path, scorer, example):
    """Each runs with rules, a scalar model and a judge, and samples the same for any number of controllers."""
    model = {"name": "scorer", "model": {"path": str(scorer)}, "weight": 0.5, "max_length": 48}
    path = write_recipe(tmp_path, **{**PANEL, "rewards": {**PANEL["rewards"], "models": [model]}})
    found = {}
    for controllers in (1, 3):
        flow = (f"workflow={EXAMPLES}/{example}.py:workflow", f"run.name=n{controllers}", f"controllers={controllers}")
        done = gcore("train", str(path), "runtime=local", "run.steps=2", "observe.trackers=[]", *flow)
        assert done.returncode == 0, done.stdout + done.stderr
        found[controllers] = [untimed(row) for row in steps(rows(tmp_path / "runs" / f"n{controllers}"))]
    assert found[1] == found[3] and len(found[1]) == 2
    for row in found[1]:
        assert {"reward/exact", "reward/scorer", "reward/checker"} <= row.keys()
        assert row["rollout/logprob_diff_mean"] < 1e-5  # also where a tool or a judge spoke in between


def test_a_tool_speaks_and_is_masked(tmp_path):
    """A policy that always calls: its tokens are its own, the answer of the tool is not, and both stand in the text."""
    flow = tmp_path / "flow.py"
    flow.write_text(
        "async def workflow(ctx, prompt):\n"
        "    group = await ctx.generate(prompt, max_tokens=3)\n"
        "    group = [await ctx.proceed(r, '[7]', max_tokens=2) for r in group]\n"
        "    for r in group:\n"
        "        assert r.text[:3 + 3].count('[7]') == 1 or r.mask_S.sum() < 5, r\n"
        "        start = list(r.mask_S).index(False)\n"
        "        assert (~r.mask_S).sum() == 3 and not r.mask_S[start : start + 3].any(), r\n"
        "        assert (r.logprobs_S[~r.mask_S] == 0).all() and len(r.versions_S) == len(r.content.tokens_S), r\n"
        "    return await ctx.reward(group)\n"
    )
    path = write_recipe(tmp_path, model={"build": BUILD}, generation={"max_response_length": 12})
    done = gcore("train", str(path), "runtime=local", "run.steps=2", f"workflow={flow}:workflow")
    assert done.returncode == 0, done.stdout + done.stderr
    found = steps(rows(tmp_path / "runs" / "tiny"))
    assert all(row["rollout/logprob_diff_mean"] < 1e-5 for row in found)
