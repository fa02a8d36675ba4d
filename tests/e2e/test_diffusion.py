"""A diffusion policy on the unchanged loop: controllers, dynamic sampling, KL, resume, pages. It learns brightness."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from gcore.checkpoint.tensors import read, shapes
from gcore.config.load import load_config
from gcore.diffusion.samplers import schedule_of
from gcore.observe.samples import read_samples
from tests.e2e import helpers
from tests.e2e.helpers import gcore, gcore_process, rows, steps

RECIPE: dict[str, Any] = {
    "run": {"name": "tiny", "steps": 4, "seed": 3},
    "model": {"denoiser": {"hidden_size": 16, "layers": 1, "heads": 2}},
    "data": {
        "train": {"task": "draw_digits", "args": {"wrong": 0.5}},
        "eval": {"task": "draw_digits", "args": {"split": "eval"}, "size": 10},
        "max_prompt_length": 8,
    },
    "generation": {"denoising": {"steps": 5, "window": {"size": 2, "every": 1}}},
    "sampling": {"prompts_per_step": 6, "samples_per_prompt": 4, "filter": "spread"},
    "algorithm": {"kl_coef": 0.01, "kl_estimator": "velocity", "mini_batches": 2},
    "training": {"lr": 3e-3, "warm_start": {"steps": 4, "batch_size": 16, "lr": 3e-3}},
    "placement": {"trainer": {"ranks": 1, "threads": 1}},
    "checkpoint": {"every": 2, "keep_last": 9},
    "observe": {"progress": "plain"},
}


WEIGHTS = 1e-5  # of two ranks and one, after the steps of these runs


def bright(images, prompts, answer, **columns):
    """In coarse steps, so that some groups have no spread."""
    assert all(image.shape == (8, 8, 3) for image in images) and prompts == answer
    return [round(image.mean() / 255 * 8) / 8 for image in images]


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    """Without the bytes of groups that were drawn too many."""
    return {name: value for name, value in helpers.untimed(row).items() if not name.startswith("link/")}


def train(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    start = gcore if "runtime=local" in overrides else gcore_process
    done = start("train", str(recipe_in(folder)), f"run.name={name}", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return rows(folder / "runs" / name)


def recipe_in(folder: Path) -> Path:
    path = folder / "tiny.yaml"
    rewards = {"functions": [{"name": "bright", "path": "tests.e2e.test_diffusion:bright"}]}
    run = {**RECIPE["run"], "dir": str(folder / "runs")}
    path.write_text(yaml.safe_dump({**RECIPE, "rewards": rewards, "run": run}))
    return path


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    train(folder, "one", "runtime=local", "controllers=1")
    return folder / "runs" / "one"


def test_a_run(one):
    found = steps(rows(one))
    assert len(found) == 4 and len({row["samples_digest"] for row in found}) == 4
    for row in found:
        assert row["rollout/logprob_diff_max"] < 1e-5  # engine and trainer compute the same logprobs
        assert row["response_length/mean"] == 5 and row["actor/kl"] >= 0
        # latents are 1,536 bytes per sample: they do not pass through controllers
        assert 1e6 * row["link/responses_within_mb"] < 200 * 4 * row["sampling/drawn"]
    assert sum(row["sampling/drawn"] for row in found) > 24 == sum(row["sampling/trained"] for row in found)
    kept = sorted(folder.name for folder in (one / "latents" / "engine-0").iterdir())
    assert kept in (["000002", "000003"], ["000003", "000004"], ["000002", "000003", "000004"])


@pytest.mark.parametrize("controllers", [2, 4])
def test_any_number_of_controllers(tmp_path, one, controllers):
    found = train(tmp_path, "many", "runtime=local", f"controllers={controllers}", "placement.policy.replicas=2")
    assert [untimed(row) for row in steps(found)] == [untimed(row) for row in steps(rows(one))]  # to the last bit


def test_resume_is_exact(tmp_path, one):
    """As a kill leaves it: rows that came later than the last checkpoint are there, and are written again."""
    folder = tmp_path / "runs" / "part"
    shutil.copytree(one, folder)
    shutil.rmtree(folder / "step_4")
    found = train(tmp_path, "part", "runtime=local", "controllers=2", "run.resume=auto")
    assert [untimed(row) for row in found] == [untimed(row) for row in rows(one)]


def test_the_pages_show_pictures(one):
    report, samples = (one / "report.html").read_text(), (one / "samples.html").read_text()
    assert report.count("data:image/png;base64,") == 4  # two held-out prompts before, two after
    assert "Before training" in report and "After step 4" in report
    assert "Denoising steps per second" in report and "Tokens per second" not in report
    assert "Answer length" not in report and "Response lengths" not in report
    assert samples.count("data:image/png;base64,") == 4 * 2 * 4 + 2 * 2
    logged = next((one / "samples" / "pictures").iterdir())
    assert np.load(logged).shape == (8, 8, 3)


def test_evaluation_of_a_checkpoint(one):
    done = gcore("eval", str(one), "runtime=local")
    assert done.returncode == 0, done.stdout + done.stderr
    last = [row for row in rows(one) if "eval/accuracy" in row][-1]
    assert f"{last['eval/accuracy']:.3f}" in done.stdout


@pytest.mark.release
def test_processes_under_ray(tmp_path, one):
    """Latents, pictures and embeddings by reference between processes; nothing else is different."""
    found = steps(train(tmp_path, "ray", "controllers=2", "placement.policy.replicas=2"))
    for row in found:
        row.pop("reward/worker_restarts", None)  # of workers that a busy machine starts slowly
    assert [untimed(row) for row in found] == [untimed(row) for row in steps(rows(one))]  # to the last bit


@pytest.mark.release
def test_two_trainer_ranks(tmp_path, one):
    """Sums have another order: weights differ in the last bits, so that a digest of latents differs too. The steps draw
    the same prompts, and weights, losses and pictures agree to a tolerance."""
    found = train(tmp_path, "ray", "placement.trainer.ranks=2", "placement.trainer.shard=2")
    for a, b in zip(steps(found), steps(rows(one)), strict=True):
        for name in ("sampling/drawn", "sampling/trained"):
            assert a[name] == b[name], a["step"]
        assert a["actor/loss"] == pytest.approx(b["actor/loss"], abs=1e-7)
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-4)
    two = tmp_path / "runs" / "ray"
    for name in ("warm_4", "step_2", "step_4"):
        folders = [run / name / "weights" for run in (two, one)]
        a, b = (read(folder, shapes(folder)) for folder in folders)
        assert a.keys() == b.keys()
        for key, tensor in a.items():
            assert torch.allclose(tensor, b[key], rtol=0, atol=WEIGHTS), (name, key)
    logged = [{(r["step"], r["phase"], r["prompt"]): r["samples"] for r in read_samples(run)} for run in (two, one)]
    assert logged[0].keys() == logged[1].keys() and len(logged[0]) == 4 * 2 + 2 * 2
    for key, samples in logged[0].items():
        for mine, other in zip(samples, logged[1][key], strict=True):
            pictures = [np.load(run / "samples" / "pictures" / s["picture"]) for run, s in ((two, mine), (one, other))]
            assert np.abs(np.subtract(*pictures, dtype=np.int16)).max() <= 1, key  # of 255


@pytest.mark.release
def test_asynchronous_generation(tmp_path):
    """Samples of older policies: versions per step, importance weights, groups in checkpoints."""
    extra = ("sampling.max_staleness=2", "run.steps=6", "algorithm.kl_coef=0", "checkpoint.every=2")
    found = steps(train(tmp_path, "async", "runtime=local", "controllers=2", *extra))
    assert len(found) == 6 and max(row["staleness/max"] for row in found) >= 1
    shutil.rmtree(tmp_path / "runs" / "async" / "step_6")
    again = train(tmp_path, "async", "runtime=local", "controllers=1", "run.resume=auto", *extra)
    assert len(steps(again)) == 6


@pytest.mark.release
def test_pairs_of_pictures(tmp_path):
    """DPO on the best and the worst picture of a group: logprobs of their stochastic steps. The result does not depend
    on the number of controllers, and pictures of a dataset are refused."""
    extra = ("objective=dpo", "preference={pairs: rollouts, beta: 1.0}", "algorithm={}", "run.steps=2")
    one, two = (
        steps(train(tmp_path, f"dpo{n}", "runtime=local", f"controllers={n}", "training.lr=0.01", *extra))
        for n in (1, 2)
    )
    assert [untimed(row) for row in one] == [untimed(row) for row in two]
    first, second = one
    assert first["preference/loss"] == pytest.approx(np.log(2), abs=1e-6)  # the policy is the reference
    assert first["actor/grad_norm"] > 0 and second["preference/margin"] != 0
    done = gcore(
        "train", str(recipe_in(tmp_path)), "run.name=offline", "runtime=local", "objective=dpo", "algorithm={}"
    )
    assert done.returncode == 2 and "generation.denoising: dpo is for language models" in done.stderr


JUDGE: dict[str, Any] = {
    "name": "grader",
    "model": {
        "build": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "layers": 1,
            "heads": 2,
            "kv_heads": 1,
            "max_length": 64,
            "alphabet": "0123456789?",
            "vision": {"hidden_size": 16, "intermediate_size": 16, "layers": 1, "heads": 2, "image_size": 8},
        }
    },
    "images": True,
    "template": "{{ prompt }}{{ response }}?",
    "verdict": r"^\D*(\d?)",  # an untrained judge may say anything, also nothing
    "values": {"": 0, **{f"{digit}": digit / 9 for digit in range(10)}},
    "repeats": 4,
    "max_prompt_length": 32,
    "max_response_length": 4,
    "max_concurrent": 8,
}


def judged(folder: Path, mode: str, step_s: float, *overrides: str) -> list[dict[str, Any]]:
    """A judge that sees the pictures gives the only reward. It has four questions about each picture, so that it needs
    most of the slots when the pictures are there. `step_s`: at least, of every step of both."""
    path = recipe_in(folder)
    recipe = yaml.safe_load(path.read_text())
    recipe["rewards"] = {"judges": [{**JUDGE, "min_step_s": step_s}]}
    recipe["generation"] |= {"max_concurrent": 8, "min_step_s": step_s}
    recipe["sampling"] = {"prompts_per_step": 12, "samples_per_prompt": 4}
    recipe["placement"] |= {"mode": mode, **({"slots": 4} if mode != "shared" else {})}
    path.write_text(yaml.safe_dump(recipe))
    done = gcore("train", str(path), f"run.name={mode}", "runtime=local", "controllers=1", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return steps(rows(folder / "runs" / mode))


def test_a_judge_that_sees_the_pictures(tmp_path):
    """What it gets is stored beside the pictures, and removed with them: the run's folder does not grow."""
    found = judged(tmp_path, "shared", 0.0, "run.steps=3", "checkpoint.every=100")
    assert len(found) == 3 and all(row["reward/std"] > 0 and row["reward/errors"] == 0 for row in found)
    run = tmp_path / "runs" / "shared"
    assert not (run / "media").exists()
    versions = sorted((run / "latents" / "engine-0").iterdir())
    assert len(versions) <= 3
    for folder in versions:
        arrays = [np.load(path) for path in folder.iterdir()]
        pictures = [array for array in arrays if array.dtype == np.uint8]
        inputs = [array for array in arrays if array.dtype == np.float32 and array.ndim == 2]
        assert pictures and len(inputs) == len(pictures)
        # patches of 4 x 4 pixels, each twice (two frames), scaled to -1 ... 1: the mean of a picture is kept
        means = [sorted(float(a.mean()) for a in group) for group in (inputs, [p / 127.5 - 1 for p in pictures])]
        assert means[0] == pytest.approx(means[1], abs=1e-5)


@pytest.mark.release
def test_denoiser_and_judge_share_slots_that_move(tmp_path):
    """Every slot has a denoiser and a judge that sees, of which one sleeps. The denoiser frees its weights while it
    sleeps. No sample and no verdict depends on who has which slot."""
    calm = judged(tmp_path, "shared", 0.0)
    found = judged(tmp_path, "dynamic", 0.05)
    assert len(found) == 4 and sum(row["placement/moves"] for row in found) > 0
    for name in ("samples_digest", "reward/mean", "reward/grader"):
        assert [row[name] for row in found] == [row[name] for row in calm], name
    assert max(row["rollout/logprob_diff_max"] for row in found) < 1e-5  # never with old weights
    moves = [json.loads(line) for line in (tmp_path / "runs" / "dynamic" / "placement.jsonl").read_text().splitlines()]
    assert ("policy", "grader") in {(line["from"], line["to"]) for line in moves if line["kind"] == "move"}


@pytest.mark.release
@pytest.mark.parametrize("lora", ["null", "{rank: 2, targets: [to_q, to_v]}"], ids=["full", "lora"])
def test_a_pipeline_of_diffusers(tmp_path, lora):
    """A tiny Stable Diffusion 3 with guidance: text encoders, VAE, transformer; all weights, and adapters."""
    pytest.importorskip("diffusers")
    from tests.unit.tiny_pipelines import save_sd3

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"a {word}"}) + "\n" for word in ("cat", "dog", "sun", "tree")))
    path = recipe_in(tmp_path)
    recipe = yaml.safe_load(path.read_text())
    recipe["model"] = {"path": str(save_sd3(tmp_path))}
    recipe["data"] = {"train": {"path": str(prompts)}, "max_prompt_length": 16}
    recipe["generation"] = {"denoising": {"steps": 4, "guidance_scale": 2.0, "height": 32, "width": 32, "shift": 3.0}}
    recipe["rewards"]["functions"][0]["path"] = "tests.e2e.test_diffusion:white"
    recipe["sampling"] = {"prompts_per_step": 4, "samples_per_prompt": 4}
    recipe["training"] = {"lr": 1e-3}
    path.write_text(yaml.safe_dump(recipe))
    done = gcore("train", str(path), "run.name=sd3", "runtime=local", "run.steps=3", f"model.lora={lora}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = steps(rows(tmp_path / "runs" / "sd3"))
    assert len(found) == 3 and all(row["actor/grad_norm"] > 0 for row in found)
    assert max(row["rollout/logprob_diff_max"] for row in found) < 1e-5
    check_export(tmp_path, Path(recipe["model"]["path"]), has_adapters=lora != "null")


def check_export(folder: Path, original: Path, has_adapters: bool) -> None:
    """diffusers opens the exported folder, and its pictures differ from those of the model before training. The
    original model with the adapters makes the same pictures."""
    from diffusers import StableDiffusion3Pipeline

    done = gcore("export", str(folder / "runs" / "sd3"), str(folder / "exported"))
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {"text_encoder_3": None, "tokenizer_3": None, "image_encoder": None, "feature_extractor": None}

    def latents(pipe: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        size = {"height": 32, "width": 32, "num_inference_steps": 4}
        return pipe("a cat", **size, generator=generator, output_type="latent").images

    trained, before = (
        StableDiffusion3Pipeline.from_pretrained(str(path), **parts) for path in (folder / "exported", original)
    )
    after = latents(trained)
    assert "sampling.json: how to sample as in training" in done.stdout
    arguments = json.loads((folder / "exported" / "sampling.json").read_text())
    spec = load_config(folder / "runs" / "sd3" / "config.yaml").generation.denoising
    trained("a cat", height=32, width=32, output_type="latent", **arguments)
    schedule = [*schedule_of(spec).time.tolist(), 0.0]
    assert trained.scheduler.sigmas.tolist() == pytest.approx(schedule, abs=1e-6) and spec.shift != 1
    before.scheduler = type(before.scheduler).from_config(trained.scheduler.config)
    assert not torch.allclose(after, latents(before), atol=1e-3)
    assert (folder / "exported-adapter").exists() is has_adapters
    if has_adapters:
        before.load_lora_weights(str(folder / "exported-adapter"))
        assert torch.allclose(latents(before), after, atol=1e-5)


def white(images, prompts, **columns):
    assert all(image.shape == (32, 32, 3) for image in images)
    return [float(image.mean()) / 255 for image in images]
