"""Hub ids through the command line, against a hub on loopback: downloaded once, pinned, and then found in the cache."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import yaml

from gcore.config.base import Model
from gcore.models.networks import load_model, load_scorer
from gcore.prompts.tokenizer import load_tokenizer
from tests.e2e.helpers import RECIPE, environment, rows
from tests.fakehub import DATASETS, serving

BUILD = Model.model_validate({"build": RECIPE["model"]["build"]})
CARD = b"""---
configs:
- config_name: default
  data_files: [{split: train, path: t.jsonl}, {split: test, path: e.jsonl}]
---
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    pytest.importorskip("datasets")
    cpu, tokenizer = torch.device("cpu"), load_tokenizer(BUILD)
    with serving() as hub:
        for name in ("policy", "scorer"):
            folder = tmp_path_factory.mktemp(name)
            if name == "policy":
                load_model(BUILD, tokenizer, 0, torch.float32, cpu).save_pretrained(folder)
            else:
                made = load_scorer(BUILD, 0, torch.float32, cpu, tokenizer=tokenizer, new_head=True)
                made.config.architectures = ["Qwen3ForSequenceClassification"]
                made.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            hub.add_folder(f"org/{name}", folder)
        sums = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
        lines = ["".join(json.dumps(row) + "\n" for row in part).encode() for part in (sums[:80], sums[80:])]
        hub.add(DATASETS, "org/sums", {"README.md": CARD, "t.jsonl": lines[0], "e.jsonl": lines[1]})
        pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": str(n)} for n in range(3, 9)]
        hub.add(DATASETS, "org/pairs", {"train.jsonl": "".join(json.dumps(p) + "\n" for p in pairs).encode()})
        yield hub


def gcore(hub, home, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    kept = {k: v for k, v in environment().items() if not k.startswith("HF_")}
    command = [sys.executable, "-m", "gcore.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=kept | own | env)


def recipe(folder) -> str:
    tree = {
        **RECIPE,
        "run": {**RECIPE["run"], "dir": str(folder / "runs"), "steps": 1},
        "model": {"path": "org/policy"},
        "data": {"train": {"path": "org/sums"}, "eval": {"path": "org/sums", "split": "test"}, "max_prompt_length": 12},
        "rewards": {**RECIPE["rewards"], "models": [{"name": "taste", "model": {"path": "org/scorer"}, "weight": 0.1}]},
    }
    path = folder / "hub.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


@pytest.fixture(scope="module")
def trained(hub, tmp_path_factory):
    """With Ray: every process opens the id in the cache by itself."""
    folder = tmp_path_factory.mktemp("hub")
    done = gcore(hub, folder / "home", "train", recipe(folder))
    assert done.returncode == 0, done.stderr
    return folder


def commits(hub) -> dict[str, str]:
    return {name: revisions["main"] for (_, name), revisions in hub.revisions.items()}


def test_the_recipe_that_the_page_of_keys_opens_with(hub, tmp_path):
    """recipes/gsm8k.yaml, with a small model of the same id, a smaller step and an engine that is installed."""
    alphabet = "".join(chr(code) for code in range(32, 127)) + "\n"
    shape = {**RECIPE["model"]["build"], "alphabet": alphabet, "max_length": 1024}
    small = Model.model_validate({"build": shape})
    tokenizer = load_tokenizer(small)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    load_model(small, tokenizer, 0, torch.float32, torch.device("cpu")).save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    hub.add_folder("Qwen/Qwen2.5-0.5B-Instruct", tmp_path / "small")
    sums = [{"question": f"{n}+1?", "answer": f"One more.\n#### {n + 1}"} for n in range(8)]
    lines = "".join(json.dumps(row) + "\n" for row in sums).encode()
    card = CARD.replace(b"default", b"main")
    hub.add(DATASETS, "openai/gsm8k", {"README.md": card, "t.jsonl": lines, "e.jsonl": lines})
    smaller = ("generation.engine=embedded", "run.steps=1", f"run.dir={tmp_path}", "runtime=local", "data.eval.size=2")
    smaller += ("sampling.prompts_per_step=4", "sampling.samples_per_prompt=2", "generation.max_response_length=8")
    done = gcore(hub, tmp_path / "home", "train", "gsm8k", *smaller)
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "gsm8k")
    assert [row["eval/prompts"] for row in found if "eval/prompts" in row] == [2, 2]
    assert [row["batch/samples"] for row in found if "batch/samples" in row] == [8]


def test_ids_are_pinned_into_the_run(hub, trained):
    config = yaml.safe_load((trained / "runs" / "tiny" / "config.yaml").read_text())
    pinned = commits(hub)
    assert (config["model"]["path"], config["model"]["revision"]) == ("org/policy", pinned["org/policy"])
    assert config["rewards"]["models"][0]["model"]["revision"] == pinned["org/scorer"]
    train, held_out = config["data"]["train"], config["data"]["eval"]
    assert (train["path"], train["revision"]) == ("org/sums", pinned["org/sums"])
    assert (train["subset"], train["split"]) == ("default", "train")
    assert [held_out[k] for k in ("revision", "split")] == [pinned["org/sums"], "test"]
    assert [row["eval/prompts"] for row in rows(trained / "runs" / "tiny") if "eval/prompts" in row] == [20, 20]


def test_weights_travel_once(hub, trained):
    weights = [line for line in hub.asked if line.startswith("GET /org/") and line.endswith("/model.safetensors")]
    assert len(weights) == 2  # one of each model, whatever the number of processes


@pytest.mark.release
def test_everything_goes_on_without_the_hub(hub, trained):
    """The hub is not asked where it could be, nor missed where nothing listens."""
    away = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    asked, run = len(hub.asked), str(trained / "runs" / "tiny")
    for command, env in (
        (["eval", run, "runtime=local"], {}),
        (["train", recipe(trained), "run.resume=auto", "run.steps=2", "runtime=local"], {}),
        (["export", run, str(trained / "exported")], away),
        (["train", recipe(trained), "run.name=again", "--dry-run"], away),
    ):
        done = gcore(hub, trained / "home", *command, **env)
        assert done.returncode == 0, (command, done.stderr)
        assert hub.asked[asked:] == []


def test_a_reward_model_and_plan_take_ids(hub, tmp_path):
    tree = {
        "run": {"name": "rm", "dir": str(tmp_path), "steps": 1},
        "model": {"path": "org/policy"},
        "data": {"train": {"path": "org/pairs"}, "max_prompt_length": 12},
        "generation": {"max_response_length": 11},
        "objective": "reward_model",
        "runtime": "local",
        "sampling": {"prompts_per_step": 4},
    }
    (tmp_path / "rm.yaml").write_text(yaml.safe_dump(tree))
    done = gcore(hub, tmp_path / "home", "train", str(tmp_path / "rm.yaml"))
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((tmp_path / "rm" / "config.yaml").read_text())
    assert config["model"]["revision"] == commits(hub)["org/policy"]
    assert config["data"]["train"]["revision"] == commits(hub)["org/pairs"]
    done = gcore(hub, tmp_path / "home", "plan", "--model", "org/policy", "--gpus", "1")
    assert done.returncode == 0, done.stderr


def test_an_id_that_does_not_exist_is_one_line(hub, tmp_path):
    for change, said in (
        ("model.path=org/none", "model.path=org/none: no such file or folder here, and no such model on the hub"),
        ("data.train.path=org/none", "data.train.path=org/none: no such file or folder here, and no such dataset"),
    ):
        done = gcore(hub, tmp_path / "home", "train", recipe(tmp_path), change)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert done.stderr.strip().splitlines()[-1].startswith(f"gcore: {said}"), done.stderr
