"""Runs of a small model that hears: the number of controllers, adapters, an export, wrong engines, and the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gcore.config.base import Model
from gcore.content.media import resolve
from gcore.models.networks import load_model
from gcore.prompts.processor import load_processor
from gcore.prompts.tokenizer import load_tokenizer
from gcore.rewarding.rules import text_of
from tests.e2e.helpers import RECIPE, gcore, gcore_process, rows, steps, untimed, write_recipe

AUDIO = {"hidden_size": 32, "intermediate_size": 32, "layers": 1, "heads": 2, "mel_bins": 16}
BUILD = {**RECIPE["model"]["build"], "architecture": "qwen2", "max_length": 64, "audio": AUDIO}
KEYS = {"task": "keypad", "size": 40, "args": {"most": 3, "answer": "sum"}}
SMALL: dict[str, Any] = {
    "model": {"build": BUILD},
    "data": {
        "train": KEYS,
        "eval": {**KEYS, "size": 10, "args": {**KEYS["args"], "split": "eval"}},
        "max_prompt_length": 32,
    },
    "algorithm": {"kl_coef": 0.05, "mini_batches": 2},
}


def train(folder: Path, *overrides: str, **top: Any) -> list[dict[str, Any]]:
    recipe = write_recipe(folder, **{**SMALL, **top})
    ended = gcore("train", str(recipe), "runtime=local", "run.steps=3", *overrides)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return rows(folder / "runs" / "tiny")


def loudness(prompts: Any, completions: Any, audios: Any, **_: Any) -> list[float]:
    assert all(len(own) == 1 and own[0].read().ndim == 1 for own in audios)
    return [len(text_of(completion)) * float(np.abs(own[0].read()).mean()) for completion, own in zip(
        completions, audios, strict=True)]  # fmt: skip


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("one")
    return folder, train(folder, "controllers=1")


def test_any_number_of_controllers(tmp_path, one):
    found = train(tmp_path, "controllers=2")
    assert [untimed(row) for row in found] == [untimed(row) for row in one[1]]  # to the last bit
    assert len({row["samples_digest"] for row in steps(found)}) == 3
    assert max(row["rollout/logprob_diff_max"] for row in steps(found)) < 1e-5  # engine against trainer
    assert all(row["controller/media_bytes_all"] > 1e5 for row in steps(found))
    logged = [json.loads(line) for p in (tmp_path / "runs/tiny/samples").glob("*.jsonl") for line in p.open()]
    assert logged and all(row["images"][0].startswith("data:audio/wav;base64,") for row in logged)
    assert "media-src data:" in (tmp_path / "runs/tiny/samples.html").read_text()


def test_adapters_train_and_rewards_hear(tmp_path):
    lora = {"rank": 4, "parts": ["text", "vision"]}
    functions = [{"name": "loudness", "path": "tests.e2e.test_audio:loudness"}]
    more = {"model": {"build": BUILD, "lora": lora}, "rewards": {"functions": functions}}
    found = steps(train(tmp_path, "controllers=2", "training.vision_lr=1e-3", **more))
    assert max(row["rollout/logprob_diff_max"] for row in found) < 1e-5  # engines have the merged weights
    assert all(row["actor/grad_norm"] > 0 for row in found) and found[-1]["actor/kl"] > 0


def test_an_export_loads_in_transformers(tmp_path, one):
    from transformers import AutoModelForSeq2SeqLM, AutoProcessor

    ended = gcore("export", str(one[0] / "runs" / "tiny"), str(tmp_path / "hf"))
    assert ended.returncode == 0, ended.stderr
    theirs, processor = (each.from_pretrained(tmp_path / "hf") for each in (AutoModelForSeq2SeqLM, AutoProcessor))
    assert type(theirs).__name__ == "Qwen2AudioForConditionalGeneration"
    model = Model(path=str(tmp_path / "hf"))
    tokenizer = load_tokenizer(model)
    ours = load_model(model, tokenizer, 0, torch.float32, torch.device("cpu"))
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())
    clip = np.random.default_rng(0).standard_normal(4_000).astype(np.float32) / 9
    text = "<|audio_bos|><|AUDIO|><|audio_eos|>="
    (medium,) = (content := load_processor(model, tokenizer, None).content(text, [("audio", clip)])).media
    made = processor(text=text, audio=[clip], sampling_rate=16_000, return_tensors="pt")
    assert made["input_ids"][0].tolist() == content.tokens_P.tolist()
    features = resolve(medium.inputs["input_features"])
    assert np.abs(made["input_features"][0, :, : features.shape[1]].numpy() - features).max() < 1e-3


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ({"model": {"build": {**RECIPE["model"]["build"], "max_length": 64}}}, "the model takes no audio clips"),
        ({"data": {**SMALL["data"], "media": {"max_seconds": 0.1}}}, "of 40 rows have media that cannot be used"),
        ({"model": {"build": {**BUILD, "architecture": "qwen3"}}}, "audio needs architecture=qwen2, got qwen3"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(tmp_path, top, message):
    recipe = write_recipe(tmp_path, **{**SMALL, **top})
    ended = gcore("train", str(recipe), "runtime=local")
    assert ended.returncode == 2 and message in ended.stderr, ended.stdout + ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_dry_run_shows_a_prompt(tmp_path):
    ended = gcore("train", str(write_recipe(tmp_path, **SMALL)), "--dry-run")
    assert ended.returncode == 0 and "<|audio_bos|><|AUDIO|><|audio_eos|>=" in ended.stdout, ended.stderr


@pytest.mark.release
def test_the_recipe_learns(tmp_path):
    recipe = Path(__file__).parents[2] / "recipes" / "audio.yaml"
    done = gcore_process("train", str(recipe), f"run.dir={tmp_path}", "run.steps=30")
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(tmp_path / "audio")
    accuracy = [row["eval/accuracy"] for row in found if "eval/accuracy" in row]
    assert accuracy[0] <= 0.4 and accuracy[-1] >= 0.8, accuracy
