"""`gcore train-rm`: from pairs in a file to a folder that serves, and one clear line for what cannot be."""

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
from gcore.config.tree import Model, ScalarReward
from gcore.content.tokens import Tokens
from gcore.models import load_model, load_scorer
from gcore.prompts.tokenizer import load_tokenizer
from gcore.rewarding.scalar import ScalarModel, ScalarSource
from gcore.types import Prompt, Rollout
from tests.e2e.helpers import gcore, gcore_process, rows

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
        "run": {"name": "evens", "dir": str(folder / "runs")},
        "model": {"build": {**BUILD, "alphabet": "0123456789+="}},
        "data": {split: {"path": str(folder / f"{split}.jsonl")} for split in ("train", "eval")},
        "training": {"steps": 40, "batch_size": 16, "lr": 1.0e-2, "warmup_steps": 4, "threads": 1},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(scope="module")
def trained(recipe):
    done = gcore("train-rm", str(recipe))
    assert done.returncode == 0, done.stderr
    return recipe.parent / "runs" / "evens", done.stdout


def scores(folder: Path, *answers: str) -> list[float]:
    """As a run would have them: the folder's own tokenizer and template, through the source and the served model."""
    spec = ScalarReward(name="evens", model=Model(path=str(folder)))
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
    found = asyncio.run(asyncio.wait_for(source.answer(group, 0), 30)).values
    model.close()
    assert None not in found
    return [value for value in found if value is not None]


def test_the_folder_serves(trained):
    folder, _ = trained
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "metrics.jsonl", "train_rm.yaml"} <= names
    assert "saving" not in names
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForSequenceClassification"]
    assert AutoTokenizer.from_pretrained(folder).chat_template
    good, bad, also_good, also_bad = scores(folder, "12", "13", "18", "17")
    assert min(good, also_good) > max(bad, also_bad)


def test_what_is_printed_and_logged(trained):
    folder, printed = trained
    lines = printed.splitlines()
    assert lines[0] == "data.train: dropped 1 of 301 pairs, longer than 23 tokens"
    assert re.fullmatch(r"\d+ pairs to train on, \d+ held out; [\d,]+ parameters on cpu", lines[1])
    steps = [line for line in lines if line.startswith("step ")]
    assert re.fullmatch(r"step  0/40   held out: accuracy 0\.\d+, margin -?\d+\.\d+", steps[0])
    last = r"step 40/40   loss \d\.\d{4}   accuracy 1\.000   held out: accuracy 0\.975, margin \d+\.\d+"
    assert re.fullmatch(last, steps[-1]) and 10 <= len(steps) <= 22
    assert re.fullmatch(
        rf"accuracy on held-out pairs 0\.9750, margin \d+\.\d+; wrote {re.escape(str(folder))}", lines[-1]
    )
    found = rows(folder)
    train = [row for row in found if "train/loss" in row]
    assert [row["step"] for row in train] == list(range(1, 41))
    assert train[-1]["train/loss"] < train[0]["train/loss"] and sum(row["train/skipped"] for row in train) == 0
    evaluated = [row for row in found if "eval/accuracy" in row]
    assert [row["step"] for row in evaluated] == list(range(0, 41, 4))
    assert evaluated[-1]["eval/accuracy"] == 0.975 and evaluated[-1]["eval/margin"] > evaluated[0]["eval/margin"]


def test_starting_from_a_language_model_and_from_a_scorer(recipe, trained, tmp_path, capsys):
    """And the same name again keeps the first model aside; without held-out pairs the training ones are reported."""
    folder, _ = trained
    model = Model.model_validate({"build": {**BUILD, "alphabet": "0123456789+="}})
    tokenizer = load_tokenizer(model)
    load_model(model, tokenizer, 0, torch.float32, CPU).save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    here = [f"run.dir={tmp_path}", "model.build=", "data.eval=", "training.lr=0"]
    assert main(["train-rm", str(recipe), *here, f"model.path={tmp_path / 'lm'}", "training.steps=1"]) == 0
    assert "accuracy on training pairs" in capsys.readouterr().out
    assert len(set(scores(tmp_path / "evens", "12", "13"))) == 2
    assert main(["train-rm", str(recipe), *here, f"model.path={folder}", "training.steps=1"]) == 0
    assert scores(tmp_path / "evens", "12", "13") == scores(folder, "12", "13")  # lr=0: unchanged
    assert scores(tmp_path / "evens.1", "12", "13") != scores(folder, "12", "13")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["training.lrr=1"], "training.lrr: unknown key; did you mean training.lr?"),
        (["data.train.path=nowhere.jsonl"], "data.train.path: no such file or folder: nowhere.jsonl"),
        (
            ["data.eval.chosen_column=good"],
            "data.eval.chosen_column: no column 'good'; the dataset has chosen, prompt,",
        ),
        (["model.build=", "model.path=./nowhere"], "model.path: no such folder: nowhere"),
        (["data.max_length=3"], "none of the 301 pairs fits in 3 tokens (key: data.max_length)"),
        (["run.dir=/proc/nowhere"], "run.dir: cannot write /proc/nowhere/evens"),
    ],
)
def test_one_line_for_what_cannot_be(recipe, capsys, overrides, words):
    assert main(["train-rm", str(recipe), *overrides]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("gcore: ") and len(line.splitlines()) == 1 and words in line, line


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_resuming_gives_the_same_model(recipe, tmp_path, capsys):
    """The last of the checkpoints is lost: the steps after the one before are made again, to the last bit."""
    short = ["training.steps=6", "training.checkpoint_every=2", "training.keep_last=2", f"run.dir={tmp_path}"]
    assert main(["train-rm", str(recipe), *short]) == 0
    folder = tmp_path / "evens"
    assert [path.name for path in sorted(folder.glob("step_*"))] == ["step_4", "step_6"]
    expected, written = weights(folder), rows(folder)
    shutil.rmtree(folder / "step_6")
    (folder / "model.safetensors").unlink()
    capsys.readouterr()
    assert main(["train-rm", str(recipe), *short, "run.resume=auto"]) == 0
    assert f"resumed from {folder / 'step_4'} at step 4" in capsys.readouterr().out
    again = weights(folder)
    assert all(torch.equal(expected[name], again[name]) for name in expected)
    assert [row["step"] for row in rows(folder)] == [row["step"] for row in written]
    (folder / "model.safetensors").unlink()
    capsys.readouterr()
    assert main(["train-rm", str(recipe), *short, "run.resume=auto"]) == 0  # it ended while it wrote the model
    assert f"no step was left; wrote {folder}" in capsys.readouterr().out
    assert all(torch.equal(expected[name], value) for name, value in weights(folder).items())
    shutil.rmtree(folder / "step_6")
    assert main(["train-rm", str(recipe), *short, "run.resume=auto", "training.lr=1e-3"]) == 2
    assert "was made by a recipe that differs: lr: 0.001; lr: 0.01" in capsys.readouterr().err


@pytest.mark.release
def test_two_ranks_train_the_same_model(recipe, tmp_path):
    here = ["training.steps=4", f"run.dir={tmp_path}", "data.eval="]
    one = gcore_process("train-rm", str(recipe), *here, "run.name=one")
    two = gcore_process("train-rm", str(recipe), *here, "run.name=two", "training.ranks=2")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert "parameters on cpu, 2 ranks" in two.stdout
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)
    assert [row["train/loss"] for row in rows(tmp_path / "two")] == pytest.approx(
        [row["train/loss"] for row in rows(tmp_path / "one")], abs=1e-5
    )
