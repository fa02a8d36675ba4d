"""Invariants 1 and 2: what a run computes does not depend on how many processes compute it."""

from __future__ import annotations

import pytest

from tests.e2e.helpers import steps, train, untimed


def assert_same_run(found, expected, tolerance=1e-5):
    assert len(found) == len(expected) == 5
    assert len({row["samples_digest"] for row in expected}) == 5  # the runs do sample
    for a, b in zip(found, expected, strict=True):
        assert a["samples_digest"] == b["samples_digest"], a["step"]
        assert a["actor/loss"] == pytest.approx(b["actor/loss"], abs=tolerance), a["step"]
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], abs=1e-4), a["step"]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return steps(train(tmp_path_factory.mktemp("one"), "one", "runtime=local", "controllers=1"))


@pytest.mark.parametrize("controllers", [2, 4])
def test_controllers_in_one_process(tmp_path, one, controllers):
    found = steps(train(tmp_path, "many", "runtime=local", f"controllers={controllers}"))
    assert_same_run(found, one)
    assert [untimed(row) for row in found] == [untimed(row) for row in one]  # to the last bit


def test_shared_prefixes(tmp_path, one):
    """Siblings share their prompt in a row: the same run up to rounding as without."""
    found = steps(train(tmp_path, "whole", "runtime=local", "controllers=1", "training.share_prefixes=false"))
    assert_same_run(found, one)
    assert all(row["perf/tokens_shared"] > 0.3 for row in one) and "perf/tokens_shared" not in found[0]
    always = steps(train(tmp_path, "always", "runtime=local", "controllers=1", "training.share_prefixes=true"))
    assert [untimed(row) for row in always] == [untimed(row) for row in one]


def test_resume_with_and_without_shared_prefixes(tmp_path, one):
    keys = ("runtime=local", "controllers=1", "checkpoint.every=1")
    train(tmp_path, "resumed", *keys, "run.steps=2", "training.share_prefixes=false")
    train(tmp_path, "resumed", *keys, "run.steps=4", "run.resume=auto")
    folder = train(tmp_path, "resumed", *keys, "run.resume=auto", "training.share_prefixes=false")
    found = steps(folder)
    assert_same_run(found, one)
    assert ["perf/tokens_shared" in row for row in found] == [False, False, True, True, False]


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.lora={rank: 4}", "training.lr=1e-2", "algorithm.kl_coef=0.1"),
        ("algorithm.adv_estimator=gae", "algorithm.mini_batches=2", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"),
    ],
    ids=["adapters", "critic"],
)
def test_shared_prefixes_in_all_passes(tmp_path, overrides):
    """Of the reference, old logprobs and values too."""
    both = ("runtime=local", "controllers=1", "training.max_tokens_per_gpu=64", *overrides)
    one = steps(train(tmp_path, "whole", *both, "training.share_prefixes=false"))
    assert_same_run(steps(train(tmp_path, "shared", *both, "training.share_prefixes=true")), one)


@pytest.mark.parametrize(
    "overrides",
    [
        ("controllers=4", "placement.policy.replicas=2", "placement.weights=broadcast"),
        pytest.param(
            ("controllers=2", "placement.policy.replicas=1", "placement.trainer.ranks=2"), marks=pytest.mark.release
        ),
        pytest.param(("controllers=2", "placement.policy.replicas=1"), marks=pytest.mark.release),
        pytest.param(
            (
                "controllers=2",
                "placement.policy.replicas=1",
                "placement.trainer.ranks=2",
                "training.share_prefixes=true",
            ),
            marks=pytest.mark.release,
        ),
        pytest.param(  # test_lora.py shards, too
            ("controllers=1", "placement.policy.replicas=1", "placement.trainer.ranks=2", "placement.trainer.shard=2"),
            marks=pytest.mark.release,
        ),
    ],
    ids=["broadcast", "ranks", "host", "shared", "shards"],
)
def test_processes_under_ray(tmp_path, one, overrides):
    assert_same_run(steps(train(tmp_path, "ray", *overrides)), one)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("placement.trainer.ranks=2", "placement.trainer.tensor_parallel=2"), marks=pytest.mark.release),
        pytest.param(
            ("placement.trainer.ranks=2", "placement.trainer.tensor_parallel=2", "training.share_prefixes=true"),
            marks=pytest.mark.release,
        ),
        pytest.param(
            ("placement.trainer.ranks=4", "placement.trainer.tensor_parallel=2", "placement.trainer.shard=2"),
            marks=pytest.mark.release,
        ),
    ],
    ids=["tensor", "shared_tensor", "shards_x_tensor"],
)
def test_tensor_parallel_under_ray(tmp_path, overrides):
    """Matrices are split over two ranks. The KL needs a pass of the reference, and KV heads must be divisible."""
    extra = ("model.build.kv_heads=2", "algorithm.mini_batches=2", "algorithm.kl_coef=0.1")
    one = steps(train(tmp_path, "one", "runtime=local", "controllers=1", *extra))
    found = steps(train(tmp_path, "split", "controllers=2", "placement.policy.replicas=1", *extra, *overrides))
    assert_same_run(found, one)
    assert found[-1]["actor/kl"] == pytest.approx(one[-1]["actor/kl"], rel=1e-3)


@pytest.mark.release  # tests/contract/test_context.py compares more
def test_ranks_that_share_sequences(tmp_path):
    """Samples of more than 10 tokens are too long for one rank: both compute them together, the others alone."""
    extra = ("algorithm.kl_coef=0.1", "training.warm_start=null")
    one = steps(train(tmp_path, "one", "runtime=local", "controllers=1", *extra))
    shared = ("placement.trainer.ranks=2", "training.context_parallel=2", "training.max_tokens_per_gpu=10")
    found = steps(train(tmp_path, "shared", "controllers=2", "placement.policy.replicas=1", *extra, *shared))
    assert_same_run(found, one)
    assert found[0]["perf/micro_batches"] > one[0]["perf/micro_batches"]


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_mini_batches_and_kl(tmp_path, kl_in):
    """The same with old and reference logprobs in play, and an estimator that needs sums over all controllers."""
    extra = (
        "runtime=local",
        "algorithm.mini_batches=3",
        "algorithm.kl_coef=0.1",
        f"algorithm.kl_in={kl_in}",
        "algorithm.adv_estimator=reinforce_pp",
    )
    a = steps(train(tmp_path, "a", *extra, "controllers=1"))
    b = steps(train(tmp_path, "b", *extra, "controllers=3"))
    assert_same_run(b, a)
    assert a[-1]["actor/kl"] > 0 and a[0]["actor/clip_frac"] >= 0
