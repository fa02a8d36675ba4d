"""What examples/ and docs/extending.md show does run; and one controller carries thousands of sample programs."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.helpers import steps, train

EXAMPLES = Path(__file__).parents[2] / "examples"


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
