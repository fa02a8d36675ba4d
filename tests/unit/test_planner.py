"""The planner: rollouts by hand and against brute force, memory, the output of the command."""

import dataclasses
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest

from gcore.cli import main
from gcore.cost import costs
from gcore.cost.costs import ENGINE, GPUS, SHAPES
from gcore.cost.replica_speed import ReplicaSpeed
from gcore.placement.grid import POLICY
from gcore.placement.guard import COLOCATED, STATIC
from gcore.placement.rules import ClusterLoad, Load
from gcore.planner.asynchronous import asynchronous
from gcore.planner.inputs import Constraints, Workload, drawn_lengths, modes_of
from gcore.planner.plan import MIN_SEQUENCES, plan
from gcore.planner.steps import MODES, Case, Rollouts, estimate, training_layouts
from gcore.types import UserError

H100 = GPUS["h100"]
SPEED = ReplicaSpeed(0.01, 0.0001, 0.00001, max_concurrent=10, sleep_s=0.0, wake_s=0.0, weights_s=0.0)


def case(judge_mean=100, sigma=0.5, gpus=8, prompts=64, swap_s=0.0, acceptance=1.0, judges=("judge",), **other):
    """A policy of one GPU and judges of two; groups of 4 responses of 100 tokens, 50 tokens of prompt per request."""
    responses = drawn_lengths(100, sigma, 400, 4).tolist()
    lengths = sorted(length for call in responses for length in call)[:: len(responses) * 4 // 64]
    factor = judge_mean / 100
    needed = 4 * prompts / acceptance
    loads = {POLICY: Load(waiting=round(needed), needed=needed, lengths=lengths, prompt=50.0)}
    loads |= {name: Load(needed=needed, lengths=[factor * n for n in lengths], prompt=50.0) for name in judges}
    view = ClusterLoad(loads, groups=prompts, rate=acceptance, samples=4, calls=responses[::8])
    widths = {POLICY: 1, **dict.fromkeys(judges, 2)}
    rollouts = Rollouts(view, widths, dict.fromkeys(widths, SPEED.with_swap(swap_s)))
    return Case(H100, gpus, SHAPES["7B"], rollouts, trained_tokens=1e5, mean_length=150, **other)


# ---- lengths ----


def test_drawn_lengths():
    """Mean after the cut; siblings share half of the variance of the logarithm."""
    lengths = drawn_lengths(1000, 0.8, 3000, 16)
    assert lengths.shape == (512, 16) and lengths.mean() == pytest.approx(1000, rel=1e-6) and lengths.max() == 3000
    assert (drawn_lengths(100, 0.0, 400, 2) == 100).all()
    logs = np.log(drawn_lengths(1000, 0.8, 10**6, 16))
    assert logs.std() == pytest.approx(0.8, rel=0.05)
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.5, abs=0.07)


def test_the_mean_context_by_hand():
    """A response of 100 tokens is met at 50 on average. Of responses of 100 and 300, the long one runs three times as
    long: (1 x 50 + 3 x 150) / 4."""
    even = Workload(prompt_length=10, response_length=100, max_response_length=100)
    assert even.context("policy") == pytest.approx(60) and even.context("judge") > 110 + 256
    lengths = drawn_lengths(200, 0.8, 800, 4)
    work = Workload(samples=4, prompt_length=10, response_length=200, max_response_length=800)
    assert work.context("policy") == pytest.approx(10 + np.average(lengths / 2, weights=lengths))
    assert np.average(np.array([50, 150]), weights=[100, 300]) == 125


def test_the_expected_work():
    work = Workload(32, 8, prompt_length=64, response_length=128, acceptance=0.5, verdict_length=16, repeats=2)
    view = work.expected(SHAPES["7B"], ["judge"])
    policy, judge = view.loads[POLICY], view.loads["judge"]
    assert (view.groups, view.rate, view.samples) == (32, 0.5, 8) and len(view.calls) == 64
    assert (policy.needed, policy.prompt, judge.needed, judge.prompt) == (512, 64 / 8, 1024, 192 / 2)
    assert policy.mean == pytest.approx(128, rel=0.03) and judge.mean == pytest.approx(16, rel=0.03)
    assert policy.longest == [max(call) for call in view.calls] and policy.longest[-1] == work.responses.max()


# ---- modes ----


def test_colocation_by_hand():
    """All generate, swap, all judge, train: nothing overlaps. 8 replicas have 32 requests each, of which 10 run: 4
    waves of 100 steps. 4 replicas judge 64 requests each, in 7 waves. The swaps begin at the next poll."""
    now = case(sigma=0.0, swap_s=2.0)
    found = estimate("colocated", now)
    generation = 4 * 100 * 0.01 + 32 * 100 * 0.0001 + 32 * 50 * 0.00001
    judging = 7 * 100 * 0.01 + 64 * 100 * 0.0001 + 64 * 50 * 0.00001
    assert found.stages["generation"] == pytest.approx(generation, rel=0.05)
    assert found.stages["rewarding"] == pytest.approx(judging, rel=0.1)
    assert found.stages["swaps"] == pytest.approx(2.0 + ENGINE.sleep_s)
    rollout = sum(found.stages[name] for name in ("generation", "rewarding", "swaps")) - ENGINE.sleep_s
    assert found.rollout_s == pytest.approx(rollout)
    assert found.stages["training"] == costs.training_s(SHAPES["7B"], H100, 8, 1e5, 75, 16384)
    assert found.step_s == pytest.approx(sum(found.stages.values())) and found.stages["preparation"] == 0
    twice = estimate("colocated", dataclasses.replace(now, logprob_passes=2))
    assert twice.stages["preparation"] == 2 * costs.logprob_s(SHAPES["7B"], H100, 8, 1e5, 75, 16384)
    for offload, size in (("optimizer", 8), ("all", 12)):
        moved = estimate("colocated", dataclasses.replace(now, offload=offload))
        assert moved.step_s - found.step_s == pytest.approx(2 * size * SHAPES["7B"].parameters / 8 / 32e9)
    kept = estimate("colocated", dataclasses.replace(now, checkpointing=False))
    assert kept.stages["training"] == costs.training_s(SHAPES["7B"], H100, 8, 1e5, 75, 16384, False)


def test_rejections_cost_more_and_rounds_of_colocation_pay_swaps():
    easy, hard = case(swap_s=5.0), case(swap_s=5.0, acceptance=0.4)
    for mode in MODES:
        assert estimate(mode, hard).step_s > estimate(mode, easy).step_s, mode
    some = case(swap_s=0.5, acceptance=0.4)
    turns = some.rollouts.under(
        COLOCATED, 8
    ).times.turns  # into judging in every round, and back in every round but the last
    found = estimate("colocated", some)
    assert found.notes == (f"{round((turns + 1) / 2)} rounds of generating and judging",) and turns >= 2
    assert found.stages["swaps"] == pytest.approx(turns * 0.5 + ENGINE.sleep_s)
    assert estimate("colocated", case(swap_s=0.5)).notes == ()


@pytest.mark.parametrize("judge_mean", [20, 100, 400])
@pytest.mark.parametrize("acceptance", [1.0, 0.5])
def test_the_best_static_split_is_the_best(judge_mean, acceptance):
    now = case(judge_mean=judge_mean, gpus=32, acceptance=acceptance)
    every = [estimate("static", now, {"policy": n, "judge": 32 - n}).rollout_s for n in range(2, 32, 2)]
    assert estimate("static", now).rollout_s == pytest.approx(min(every), rel=0.02)


def test_streaming_waits_for_both():
    """With few judges, their work decides: 256 verdicts on one replica of 10. With few policies, generation does."""
    now = case(gpus=16)
    late = estimate("static", now, {"policy": 14, "judge": 2})
    judging = 256 * 100 * (0.01 / 10 + 0.0001)
    assert late.rollout_s > judging > late.stages["generation"]
    slow = estimate("static", now, {"policy": 2, "judge": 14})
    assert slow.stages["generation"] > 128 * 100 * (0.01 / 10 + 0.0001)
    assert slow.rollout_s == pytest.approx(slow.stages["generation"], rel=0.3)


@pytest.mark.parametrize("judge_mean", [20, 100, 400])
def test_dynamic_is_never_slower_than_static_and_never_faster_than_the_work(judge_mean):
    now = case(judge_mean=judge_mean, gpus=16, sigma=0.8)
    dynamic, static = estimate("dynamic", now), estimate("static", now)
    assert dynamic.rollout_s <= static.rollout_s
    token_s = SPEED.base_s / SPEED.max_concurrent + SPEED.per_sequence_s  # of replicas as full as possible
    work = 256 * token_s * (100 + 2 * judge_mean)  # a judge's replica has two GPUs
    assert dynamic.rollout_s >= work / 16
    assert sum(dynamic.split.values()) == 16 and dynamic.split["policy"] % 2 == 0


def test_dynamic_keeps_the_split_if_swaps_are_slow():
    now = case(gpus=16, sigma=0.8, swap_s=1e4)
    dynamic, static = estimate("dynamic", now), estimate("static", now)
    assert (dynamic.split, dynamic.rollout_s) == (static.split, static.rollout_s)
    assert "does not pay" in dynamic.notes[0]


def test_several_judges_share_whole_blocks():
    now = case(gpus=32, sigma=0.8, prompts=256, judges=("judge 1", "judge 2"))
    loads = now.rollouts.view.loads
    short = dataclasses.replace(loads["judge 1"], lengths=[n / 4 for n in loads["judge 1"].lengths])
    view = dataclasses.replace(now.rollouts.view, loads={**loads, "judge 1": short})
    now = dataclasses.replace(now, rollouts=Rollouts(view, now.rollouts.widths, now.rollouts.speeds))
    for mode in ("static", "dynamic", "disaggregated"):
        found = estimate(mode, now)
        assert sum(found.split.values()) == 32
        assert all(gpus % 2 == 0 for gpus in found.split.values())
    assert estimate("static", now).split["judge 2"] > estimate("static", now).split["judge 1"]
    assert estimate("static", dataclasses.replace(now, gpus=4)) is None  # three roles, two blocks
    assert estimate("colocated", dataclasses.replace(now, gpus=5)) is None  # not whole blocks


def test_disaggregated_training_runs_in_parallel():
    """The number of GPUs for the trainer is the best of all."""
    now = case(gpus=32)
    found = estimate("disaggregated", now)
    update = found.stages["preparation"] + found.stages["training"]
    assert found.step_s == pytest.approx(max(found.rollout_s, update) + found.stages["weights"])
    assert sum(found.split.values()) == 32 and found.split["trainer"] % 8 == 0
    every = []
    for trainer in (8, 16, 24):
        updates = [sum(stages.values()) for _, stages in training_layouts(now, trainer)]
        every += [max(now.rollouts.under(STATIC, 32 - trainer).times.seconds, min(updates))] if updates else []
    assert found.step_s == pytest.approx(min(every) + found.stages["weights"])


# ---- the result ----

RESULT = plan(SHAPES["32B"], [SHAPES["72B"]], 64, H100)


def test_memory_of_every_role_and_phase():
    policy, judge, trainer = RESULT.memory
    assert (policy.role, judge.role, trainer.role, trainer.phase) == ("policy", "judge", "trainer", "backward")
    parts = ("weights", "gradients", "optimizer", "activations", "kv_cache", "asleep", "free")
    for fit in RESULT.memory:
        assert sum(getattr(fit, part) for part in parts) == pytest.approx(80)
        assert not fit.problem
    assert judge.weights == pytest.approx(SHAPES["72B"].weight_bytes / judge.tp / 1e9)
    assert judge.sequences >= MIN_SEQUENCES and policy.sequences >= MIN_SEQUENCES
    state = SHAPES["32B"].parameters / 64 / 1e9
    rank = RESULT.trainer.rank
    assert (rank.shard, rank.tensor_parallel, rank.checkpointing, rank.offload) == (64, 1, True, "all")
    assert (trainer.gradients, trainer.optimizer) == (pytest.approx(4 * state), 0)  # moments: in the optimizer step
    assert judge.optimizer == 0 and RESULT.host_gb == pytest.approx(8 * (judge.weights + 12 * state))
    buckets = RESULT.trainer.gpu["start"]["buckets"] / 1e9
    assert policy.optimizer == pytest.approx(4 * state + buckets)  # at the first weight update
    assert sum(RESULT.trainer.gpu["rollout"].values()) == pytest.approx(72e9)
    assert RESULT.trainer.gpu["weight update"]["engines"] == pytest.approx((policy.weights + 2 * 5.7) * 1e9)
    assert trainer.asleep == pytest.approx(2 * 5.7) and judge.asleep == pytest.approx(5.7)


def test_every_mode_is_ranked():
    assert {found.mode for found in RESULT.estimates} == set(MODES)
    times = [found.step_s for found in RESULT.estimates]
    assert times == sorted(times) and RESULT.best.step_s == times[0]
    assert RESULT.saved_over("static") == pytest.approx(1 - RESULT.of("dynamic").step_s / RESULT.of("static").step_s)
    assert RESULT.dollars(RESULT.best, 1000) == pytest.approx(1000 * RESULT.best.step_s / 3600 * 64 * 3.0)
    assert RESULT.tokens_per_s(RESULT.best) == pytest.approx(256 * 16 * 2560 / RESULT.best.step_s)


def test_a_static_split_that_stays_falls_behind_when_responses_grow():
    assert RESULT.drift["static"] > RESULT.drift["dynamic"] > RESULT.of("dynamic").step_s
    fitted = plan(SHAPES["32B"], [SHAPES["72B"]], 64, H100, RESULT.workload.stretched(2)).of("static")
    assert fitted.split["policy"] > RESULT.of("static").split["policy"]
    assert RESULT.drift["static"] > 1.02 * fitted.step_s


def test_the_measured_step():
    """One H200, 1.5B, 32 x 8 x 512 tokens with vLLM: 5.31 s; generation 2.06, training 2.98. Another host: 5.66 s."""
    work = Workload(32, 8, prompt_length=64, response_length=512, max_response_length=512)
    result = plan(SHAPES["1.5B"], [], 1, GPUS["h200"], work)
    assert [found.mode for found in result.estimates] == ["colocated"]
    assert result.best.step_s == pytest.approx(5.31, rel=0.1)
    assert result.best.stages["generation"] == pytest.approx(2.06, rel=0.1)
    assert result.best.stages["training"] == pytest.approx(2.98, rel=0.1)


def test_prompts_that_siblings_share():
    """16 answers of 1024 tokens do not fit one micro-batch with their prompt of 1024: in two, 14 of 16 are saved."""
    work = Workload(4, 16, prompt_length=1024, response_length=1024, max_response_length=1024)
    shape = SHAPES["1.5B"]
    result = plan(shape, [], 1, GPUS["h200"], work, Constraints(checkpointing=True))
    assert result.trainer.rank.max_tokens == 16384 and result.shared_prompts == 4 * 14
    whole, shared = work.training_work(shape, 0), work.training_work(shape, 16384)
    saved = 4 * 14 * shape.cost.of(1024) / shape.cost.of_token(1024)
    assert (whole, whole - shared) == (4 * 16 * 2048, pytest.approx(saved))
    assert work.shared_prompts(shape, 1000) == 0 and work.shared_prompts(shape, 1 << 20) == 4 * 15
    short = dataclasses.replace(work, prompt_length=64)
    assert short.shared_prompts(shape, 16384) == 0  # too little
    of_ranks = plan(shape, [], 2, GPUS["h200"], work, Constraints(trainer_context=2))
    assert of_ranks.shared_prompts == 0


def test_problems_come_with_changes_that_would_fit():
    result = plan(SHAPES["72B"], [SHAPES["72B"]], 8, H100)
    assert result.best is None and result.estimates == () and result.saved_over("static") is None
    assert result.problems == (
        "policy (rollout): a weight update needs 74 GB per GPU, 72 GB can be used",
        "trainer (backward): needs 121 GB per GPU, 72 GB can be used",
    )
    larger = "149 GB of NVIDIA H200 SXM5 (--gpu h200)", "180 GB of NVIDIA B200 (HGX) (--gpu b200)"
    assert result.changes == ("32 GPUs (--gpus)", *larger)
    assert plan(SHAPES["72B"], [SHAPES["72B"]], 32, H100).best is not None
    assert plan(SHAPES["72B"], [SHAPES["72B"]], 16, H100).best is None


def test_a_width_that_does_not_fit():
    result = plan(SHAPES["7B"], [SHAPES["72B"]], 8, H100, constraints=Constraints(judge_tp=2))
    assert result.problems == ("judge (rollout): weights need 73 GB per GPU, 66 GB are available",)
    assert "without --policy-tp and --judge-tp" in result.changes
    none_left = plan(SHAPES["72B"], [], 1, H100).problems[0]
    assert none_left.endswith("GB per GPU, 0 GB are available"), none_left
    assert any("--gpu h200" in change for change in result.changes)
    three = plan(SHAPES["7B"], [], 3, H100, constraints=Constraints(policy_tp=2))
    assert three.problems == ("policy (rollout): none of tensor parallel 2 divides 3 GPUs",)


def test_the_trainer_divides_the_gpus():
    result = plan(SHAPES["7B"], [], 3, H100, constraints=Constraints(trainer_tp=2))
    assert result.problems == ("trainer (backward): --trainer-tp 2 does not divide 3 GPUs",)


LONG = Workload(64, 8, prompt_length=2048, response_length=32_768, max_response_length=129_000)


def test_ranks_that_share_long_sequences_make_them_fit():
    """A 32B model and 128k tokens on 16 GPUs: the planner says how many ranks must share a sequence."""
    whole = plan(SHAPES["32B"], [], 16, H100, LONG)
    assert whole.best is None and "4 ranks per long sequence (--trainer-context)" in whole.changes
    shared = plan(SHAPES["32B"], [], 16, H100, LONG, Constraints(trainer_context=4))
    assert shared.best is not None and shared.trainer.rank.max_tokens == -(-LONG.longest // 4)
    assert plan(SHAPES["32B"], [], 16, H100, LONG, Constraints(trainer_context=2)).best is None


def test_the_number_of_ranks_per_sequence_is_checked():
    result = plan(SHAPES["7B"], [], 6, H100, constraints=Constraints(trainer_context=4))
    assert result.problems == ("trainer (backward): --trainer-context 4 does not divide 6 data-parallel ranks",)
    with pytest.raises(UserError, match="--trainer-context 3: expected a power of two"):
        Constraints(trainer_context=3)


def test_the_longest_sequence_must_fit_the_cache():
    work = Workload(response_length=20_000, max_response_length=900_000)
    result = plan(SHAPES["32B"], [], 64, H100, work, Constraints(policy_tp=2))
    assert any("the longest sequence has 900512" in problem for problem in result.problems)


def test_a_cache_for_few_sequences_is_rejected():
    """14B on one A100, with a sleeping judge and long prompts; on two GPUs the cache is large enough."""
    work = Workload(prompt_length=8192, response_length=2048)
    tight = plan(SHAPES["14B"], [SHAPES["7B"]], 8, GPUS["a100"], work, Constraints(policy_tp=1))
    assert tight.problems == ("policy (rollout): KV cache for 11 sequences, expected at least 32",)
    assert plan(SHAPES["14B"], [SHAPES["7B"]], 8, GPUS["a100"], work).best.tp["policy"] > 1


def test_each_mode_has_its_best_widths():
    for mode in MODES:
        fixed = [
            plan(
                SHAPES["7B"], [SHAPES["32B"]], 16, H100, constraints=Constraints(policy_tp=a, judge_tp=b, modes=(mode,))
            )
            for a in (1, 2)
            for b in (2, 4)
        ]
        free = plan(SHAPES["7B"], [SHAPES["32B"]], 16, H100, constraints=Constraints(modes=(mode,)))
        assert free.best.step_s == min(result.best.step_s for result in fixed), mode


def test_siblings_and_repeated_verdicts_share_a_prefill():
    def stages(**other):
        constraints = Constraints(policy_tp=1, judge_tp=1, modes=("colocated",))
        work = Workload(prompt_length=4000, response_length=100, verdict_length=10, sigma=0.0, **other)
        return plan(SHAPES["7B"], [SHAPES["7B"]], 8, H100, work, constraints).best.stages

    few, many = (
        stages(prompts=256, samples=1),
        stages(prompts=16, samples=16),
    )  # the same number of responses to fewer prompts
    speed = costs.speed_of(SHAPES["7B"], H100, 1, 4050, 256)
    prefilled = (256 - 16) * 4000 / 8 * speed.prefill_s_per_token
    assert few["generation"] - many["generation"] == pytest.approx(prefilled, rel=0.01)
    once, thrice = stages(prompts=256, samples=1), stages(prompts=256, samples=1, repeats=3)
    assert once["rewarding"] < thrice["rewarding"] < 1.5 * once["rewarding"]  # mostly prefill, which they share


def test_micro_batches_shrink_until_they_fit():
    wide = plan(SHAPES["32B"], [], 64, H100, constraints=Constraints(max_tokens_per_gpu=65536))
    assert wide.best is not None and wide.trainer.rank.max_tokens == 32768


def test_constraints_are_kept():
    result = plan(
        SHAPES["7B"], [SHAPES["14B"]], 16, H100, constraints=Constraints(policy_tp=4, judge_tp=8, modes=("static",))
    )
    assert [found.mode for found in result.estimates] == ["static"]
    assert result.best.tp == {"policy": 4, "judge": 8} and result.best.split == {"policy": 8, "judge": 8}


def test_too_few_gpus_for_a_split():
    result = plan(SHAPES["3B"], [SHAPES["3B"]], 1, GPUS["h200"], constraints=Constraints(modes=("static",)))
    assert result.best is None and result.problems[0].startswith("no placement of 2 roles on 1 GPUs")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"prompts": 0}, "--prompts 0: expected"),
        ({"acceptance": 0.0}, "--acceptance 0.0: expected a share"),
        ({"acceptance": 1.5}, "--acceptance 1.5"),
        ({"sigma": -1.0}, "--sigma -1.0"),
        ({"response_length": 100, "max_response_length": 50}, "--max-response-length 50: expected at least the mean"),
    ],
)
def test_a_wrong_workload_is_rejected(wrong, message):
    with pytest.raises(UserError, match=message):
        Workload(**wrong)


def test_wrong_constraints_are_rejected():
    with pytest.raises(UserError, match="--policy-tp 3: expected one of 1, 2, 4, 8"):
        Constraints(policy_tp=3)
    with pytest.raises(UserError, match=r"--price -1.0: expected 0 or more"):
        Constraints(price=-1.0)
    for bad in ({"price": math.inf}, {"swap_s": math.nan}):
        with pytest.raises(UserError, match=r"(--price inf|--swap-s nan): expected 0 or more"):
            Constraints(**bad)
    with pytest.raises(UserError, match="--mode fast: expected one of colocated, static"):
        modes_of(["fast"])
    assert modes_of(None) == MODES and modes_of(["dynamic", "static"]) == ("static", "dynamic")


# ---- the command ----


def test_what_is_missing_is_no_negative_memory(capsys):
    assert main(["plan", "--model", "70B", "--gpus", "1"]) == 1
    shown = capsys.readouterr().out
    assert "344.5 missing" in shown and "667.2 missing" in shown and not re.search(r"\s-\d", shown)


def test_neither_torch_nor_ray_is_needed():
    code = "import sys, gcore.planner.table; print([m for m in ('torch', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_command(capsys, tmp_path):
    file = tmp_path / "result.json"
    assert main(["plan", "--model", "32B", "--judge", "72B", "--gpus", "64", "--gpu", "h100", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "fits · fastest: dynamic" in out and "\x1b[" not in out
    assert max(map(len, out.splitlines())) <= 118
    for word in ("policy", "judge", "trainer", "KV cache", "colocated", "disaggregated", "assumptions", "per 1000"):
        assert word in out
    result = json.loads(file.read_text())
    assert result["fits"] and result["estimates"][0]["step_s"] == pytest.approx(RESULT.best.step_s)
    assert result["estimates"][0]["dollars_per_step"] == pytest.approx(RESULT.dollars(RESULT.best))
    assert result["workload"]["max_response_length"] == 8192
    assert result["assumptions"]["reach"]["training"]["source"]


def test_the_command_when_it_does_not_fit(capsys):
    assert main(["plan", "--model", "72B", "--gpus", "8", "--price", "2"]) == 1
    out = capsys.readouterr().out
    assert "does not fit: trainer (backward): needs" in out
    assert "what would fit:" in out and "Seconds" not in out


def test_the_command_prints_memory_alone(capsys):
    assert main(["plan", "--model", "7B", "--gpus", "1", "--gpu", "h200", "--memory"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("GPU of a trainer rank, GB (shard 1, tp 1, 16384 tokens, checkpointing on, off-load opt")
    step = next(line.split() for line in lines if line.strip().startswith("optimizer step"))
    assert step == ["optimizer", "step", "30.5", "30.5", "6.5", "·", "·", "·", "·", "5.7", "73.1"]
    assert sum(line.endswith("yes  ") for line in lines) == 2 and max(map(len, lines)) <= 118
    assert main(["plan", "--model", "32B", "--gpus", "1", "--gpu", "h200", "--memory"]) == 1
    assert "trainer (" in capsys.readouterr().out
    given = ["--trainer-tp", "2", "--checkpointing", "on", "--offload", "all", "--kl"]
    assert main(["plan", "--model", "7B", "--gpus", "8", "--gpu", "h200", *given]) == 0
    out = capsys.readouterr().out
    assert "(shard 4, tp 2, 16384 tokens, checkpointing on, off-load all)" in out and "logprobs" in out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model", "x", "--gpus", "8"], "gcore: --model x: neither a folder nor a known size"),
        (["--model", "7B", "--gpus", "8", "--trainer-tp", "3"], "gcore: --trainer-tp 3: expected one of 1, 2, 4, 8"),
        (["--model", "7B", "--gpus", "0"], "gcore: --gpus 0: expected an integer, at least 1"),
        (["--model", "7B", "--gpus", "8", "--gpu", "h10"], "gcore: --gpu h10: unknown (did you mean h100?)"),
        (["--model", "7B", "--gpus", "8", "--json", "/no/such/folder/a"], "gcore: --json /no/such/folder/a: cannot"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(capsys, words, message):
    assert main(["plan", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(message) and err.count("\n") == 1


# ---- a critic on GPUs of its own ----


def test_a_critic_trains_beside_the_policy_or_after_it():
    """Sharing GPUs is a little faster here, because neither waits for the other."""
    one = case(gpus=16, critic=True, logprob_passes=2)
    layouts = {(split["trainer"], split.get("critic", 0)): stages for split, stages in training_layouts(one, 8)}
    alone = dataclasses.replace(one, critic=False)
    assert layouts[8, 0]["training"] == pytest.approx(2 * alone.update(8)["training"])
    assert layouts[4, 4]["training"] == pytest.approx(alone.update(4)["training"])
    assert layouts[4, 4]["preparation"] == pytest.approx(alone.update(4)["preparation"])  # two passes, against one
    assert layouts[5, 3]["training"] == pytest.approx(alone.update(3)["training"])
    found = estimate("disaggregated", one)
    assert found is not None and "critic" not in found.split


# ---- asynchronous rollout ----


def test_asynchronous_rollout_of_a_plan():
    work = Workload(prompts=32, samples=4, response_length=500, acceptance=0.5)
    result = plan(SHAPES["7B"], [SHAPES["14B"]], 16, H100, work, Constraints(policy_tp=1, judge_tp=2))
    scenario, rules = asynchronous(result, "7B", ["14B"], 2)
    assert scenario.staleness == 2 and scenario.grid.widths == {POLICY: 1, "judge": 2}
    assert rules[:2] == ["dynamic", "colocated"] and rules[2].startswith("disaggregated:")
    assert sum(int(n) for n in rules[2].partition(":")[2].split("-")) == scenario.grid.num_blocks
    with pytest.raises(UserError, match="--staleness -1: expected an integer, at least 1"):
        asynchronous(result, "7B", ["14B"], -1)


def test_plan_simulates_asynchronous_rollout(capsys):
    keys = "--judge 3B --gpus 4 --prompts 8 --samples 2 --response-length 100 --staleness 1"
    assert main(["plan", "--model", "1.5B", *keys.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if "staleness 1: 4 x h100" in line)
    rules = [line.split()[0] for line in lines[start:] if "%" in line]
    assert rules[:2] == ["dynamic", "colocated"]
