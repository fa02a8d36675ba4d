"""`objective: reward_model`: from pairs in a file to a folder that serves, and one clear line for what cannot be."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer

from gcore.cli import main
from gcore.config.base import Model, StoredModel
from gcore.config.rewards import ScalarReward
from gcore.content.tokens import Tokens
from gcore.hub import pin_model
from gcore.models.networks import load_model, load_scorer
from gcore.prompts.tokenizer import load_tokenizer
from gcore.rewarding.scalar import ScalarModel, ScalarSource
from gcore.types import Prompt, Rollout
from tests.e2e.helpers import gcore, gcore_process, rows, steps

BUILD = {"hidden_size": 32, "intermediate_size": 64, "layers": 1, "heads": 2, "kv_heads": 1, "max_length": 24}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """Even answers are preferred; one pair is too long, and one of the 40 held out was labelled the wrong way."""
    folder, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    for split, num in (("train", 300), ("eval", 40)):
        pairs = [
            {"prompt": f"{a}+{b}=", "chosen": f"{2 * c}", "rejected": f"{2 * d + 1}"}
            for a, b, c, d in rng.integers(5, 10, size=(num, 4)).tolist()
        ]
        if split == "train":
            pairs.append({"prompt": "1+1=", "chosen": "2" * 30, "rejected": "3"})
        else:
            pairs[7] |= {"chosen": pairs[7]["rejected"], "rejected": pairs[7]["chosen"]}
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    tree = {
        "run": {"name": "evens", "dir": str(folder / "runs"), "steps": 40},
        "objective": "reward_model",
        "runtime": "local",
        "model": {"build": {**BUILD, "alphabet": "0123456789+="}},
        "data": {**{s: {"path": str(folder / f"{s}.jsonl")} for s in ("train", "eval")}, "max_prompt_length": 12},
        "generation": {"max_response_length": 11},
        "sampling": {"prompts_per_step": 16},
        "training": {"lr": 1.0e-2, "schedule": "linear", "warmup_steps": 4},
        "placement": {"trainer": {"threads": 1}},
        "observe": {"progress": "plain", "eval_every": 4},
        "checkpoint": {"every": 0, "export": True},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(scope="module")
def trained(recipe):
    done = gcore("train", str(recipe))
    assert done.returncode == 0, done.stderr
    return recipe.parent / "runs" / "evens", done.stdout


def scores(folder: Path, *answers: str) -> list[float]:
    """As a run would have them: the folder's own tokenizer and template, through the source and the served model."""
    spec = ScalarReward(name="evens", model=StoredModel(path=str(folder)))
    model = ScalarModel(load_scorer(spec.model, 0, torch.float32, CPU), max_tokens_per_batch=1024)
    prompt = Prompt(0, 0, ({"role": "user", "content": "3+4="},), "", Tokens(np.array([1], np.int32)))
    steps = np.zeros(1, np.float32)
    group = [
        Rollout(
            prompt, i, Tokens.steps(np.array([4], np.int32)), steps, steps == 0, answer, np.zeros(1, np.int32), "stop"
        )
        for i, answer in enumerate(answers)
    ]
    source = ScalarSource(spec, load_tokenizer(spec.model), model.score, attempts=1)
    source.check([])
    found = asyncio.run(asyncio.wait_for(source.answer(group), 30)).values
    model.close()
    assert None not in found
    return [value for value in found if value is not None]


def test_the_folder_of_the_run_serves(trained):
    """It stands for the newest model that the run exported."""
    folder, _ = trained
    exported = folder / "hf" / "step_40"
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in exported.iterdir()}
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["Qwen3ForSequenceClassification"]
    assert AutoTokenizer.from_pretrained(exported).chat_template
    good, bad, also_good, also_bad = scores(folder, "12", "13", "18", "17")
    assert min(good, also_good) > max(bad, also_bad)
    assert pin_model(StoredModel(path=str(folder))).path == str(exported)


def test_what_is_printed_and_logged(trained):
    """The pair that is too long is dropped; of the 40 held out, the one that was labelled the wrong way stays wrong."""
    folder, printed = trained
    assert "data.train: dropped 1 of 301 prompts over data.max_prompt_length=12 or answers over" in printed
    assert re.search(r"held-out accuracy  0\.\d+ -> 0\.975", printed)
    found = rows(folder)
    train = [row for row in found if "preference/loss" in row]
    assert [row["step"] for row in train] == list(range(1, 41))
    assert train[-1]["preference/loss"] < train[0]["preference/loss"]
    assert sum(row["actor/skipped_updates"] for row in train) == 0
    evaluated = [row for row in found if "eval/accuracy" in row]
    assert [row["step"] for row in evaluated] == list(range(0, 41, 4))
    assert evaluated[-1]["eval/accuracy"] == 0.975 and evaluated[-1]["eval/margin"] > evaluated[0]["eval/margin"]


def test_starting_from_a_language_model_and_from_a_scorer(recipe, trained, tmp_path):
    folder, _ = trained
    model = Model.model_validate({"build": {**BUILD, "alphabet": "0123456789+="}})
    tokenizer = load_tokenizer(model)
    load_model(model, tokenizer, 0, torch.float32, CPU).save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    here = [f"run.dir={tmp_path}", "model.build=", "data.eval=", "training.lr=0", "run.steps=1"]
    assert main(["train", str(recipe), *here, f"model.path={tmp_path / 'lm'}"]) == 0
    assert len(set(scores(tmp_path / "evens", "12", "13"))) == 2
    assert main(["train", str(recipe), *here, f"model.path={folder}", "run.name=again"]) == 0
    assert scores(tmp_path / "again", "12", "13") == scores(folder, "12", "13")  # lr=0: unchanged


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("hf/step_*/model.safetensors")
    return load_file(file)


def test_resuming_gives_the_same_model(recipe, tmp_path):
    """The last of the checkpoints is lost: the steps after the one before are made again, to the last bit."""
    short = ["run.steps=6", "checkpoint.every=2", f"run.dir={tmp_path}"]
    whole, again = (["train", str(recipe), *short, f"run.name={name}"] for name in ("whole", "again"))
    assert main(whole) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for lost in ("step_6", "hf/step_6", "hf/step_4"):
        shutil.rmtree(tmp_path / "again" / lost)
    assert main([*again, "run.resume=auto"]) == 0
    shutil.rmtree(tmp_path / "whole" / "hf" / "step_4")
    expected, found = (weights(tmp_path / name) for name in ("whole", "again"))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.release
def test_two_ranks_train_the_same_model(recipe, tmp_path):
    here = ["run.steps=4", f"run.dir={tmp_path}", "data.eval="]
    one = gcore_process("train", str(recipe), *here, "run.name=one")
    two = ["runtime=ray", "placement.trainer.ranks=2", "controllers=2"]
    both = gcore_process("train", str(recipe), *here, "run.name=two", *two)
    assert one.returncode == both.returncode == 0, one.stderr + both.stderr
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)
    assert [row["preference/loss"] for row in steps(rows(tmp_path / "two"))] == pytest.approx(
        [row["preference/loss"] for row in steps(rows(tmp_path / "one"))], abs=1e-5
    )
