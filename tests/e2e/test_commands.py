"""The command line as a user meets it: what works, and one clear line with exit code 2 for what cannot."""

from __future__ import annotations

import json
import os
import re

import pytest
import yaml

from gcore import cli
from tests.e2e.helpers import RECIPE, gcore, gcore_process, rows, train, write_recipe
from tests.unit.test_full_disk import no_file_above


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    train(folder, "done", "runtime=local", "run.steps=2", "controllers=2")
    return folder / "runs" / "done"


def test_the_run_directory(finished):
    names = {path.name for path in finished.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "tensorboard", "trace.json", "reward.png", "step_2", "warm_6"} <= names
    assert {"report.html", "samples.html", "samples"} <= names and "logs" not in names  # one process has the terminal
    found = rows(finished)
    evaluations = [row["step"] for row in found if "eval/accuracy" in row]
    assert evaluations == [0, 2]
    step = next(row for row in found if row["step"] == 2 and "samples_digest" in row)
    for name in (
        "reward/mean", "reward/std", "reward/zero_spread_frac", "actor/pg_loss", "actor/entropy", "actor/grad_norm",
        "actor/clip_frac", "response_length/mean", "response_length/max", "response_length/clipped_frac",
        "timing_s/step", "timing_s/generation", "timing_s/rewarding", "timing_s/preparation", "timing_s/training",
        "timing_s/weights", "perf/tokens_per_s", "rollout/logprob_diff_mean", "controller/peak_rss_mb",
    ):  # fmt: skip
        assert isinstance(step[name], float | int), name
    assert step["rollout/logprob_diff_mean"] < 1e-5
    trace = json.loads((finished / "trace.json").read_text())
    spans = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"rollout", "preparation", "training", "weights", "generate", "update"} <= spans
    lanes = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert {"controller-0", "controller-1", "engine-0", "trainer-0"} <= lanes


def test_eval_of_a_run(finished):
    done = gcore("eval", str(finished), "runtime=local")
    last = [row for row in rows(finished) if "eval/accuracy" in row][-1]
    assert done.returncode == 0, done.stderr
    assert re.search(rf"eval/accuracy +{last['eval/accuracy']:.4f}\n", done.stdout)
    assert "step 0/" not in done.stdout and re.search(r"eval/prompts +20\n", done.stdout)


def test_export(finished, tmp_path):
    done = gcore("export", str(finished), str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    assert "after reloading, its 24 tensors equal those of the checkpoint" in done.stdout
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template and (tmp_path / "model" / "model.safetensors").is_file()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.model_type == "qwen3"
    # and it is a model to start from
    recipe = {**RECIPE, "model": {"path": str(tmp_path / "model")}, "training": {"lr": 1e-4}}
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(recipe))
    more = gcore("train", str(path), f"run.dir={tmp_path / 'runs'}", "run.steps=1", "runtime=local")
    assert more.returncode == 0, more.stderr


@pytest.mark.parametrize("place", ["/proc/model", "/sys/model", "file", "file/model"])
def test_export_to_a_place_that_cannot_be_written(finished, tmp_path, place):
    (tmp_path / "file").write_text("")
    done = gcore("export", str(finished), str(tmp_path / place))
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert f"{tmp_path / place}: cannot write to it: " in done.stderr


@pytest.mark.parametrize("size", [0, 4000, 40_000])
def test_export_to_a_disk_that_becomes_full(finished, tmp_path, size):
    """With space for nothing, for config.json and for half of the weights."""
    with no_file_above(size):
        done = gcore("export", str(finished), str(tmp_path / "model"))
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert f"{tmp_path / 'model'}: not exported: " in done.stderr and "File too large" in done.stderr


def test_sft_only(tmp_path):
    done = gcore("sft", str(write_recipe(tmp_path)), "runtime=local")
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "runs" / "tiny")
    losses = [row["warm_start/loss"] for row in found if "warm_start/loss" in row]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert (tmp_path / "runs" / "tiny" / "step_0").is_dir()


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path):
    done = gcore("train", str(write_recipe(tmp_path)), "--dry-run", "controllers=4")
    assert done.returncode == 0, done.stderr
    assert "12 prompts x 4 = 48 samples" in done.stdout and "4 controller(s)" in done.stdout
    assert not (tmp_path / "runs" / "tiny").exists()


def test_doctor():
    done = gcore_process("doctor")
    assert done.returncode == 0 and "training    fsdp       ready" in done.stdout


def bad(tmp_path, change, *overrides):
    """Exit code and the one line for a recipe with something wrong in it."""
    recipe = yaml.safe_load(write_recipe(tmp_path).read_text())
    change(recipe)
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(recipe))
    done = gcore("train", str(path), *overrides)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr.strip()


def assert_refused(result, *words):
    code, line = result
    assert code == 2
    assert line.startswith("gcore: ") and len(line.splitlines()) == 1, line
    for word in words:
        assert word in line, line


def test_missing_file(tmp_path):
    done = gcore_process("train", str(tmp_path / "none.yaml"))
    assert_refused((done.returncode, done.stderr.strip()), "none.yaml", "no such recipe")


def test_threads_that_wait_do_not_spin(tmp_path, monkeypatch):
    """In a run with several threads on a busy machine, spinning took most of the time."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert cli.main(["train", str(tmp_path / "none.yaml")]) == 2
    assert os.environ["OMP_WAIT_POLICY"] == "passive"


def test_bad_yaml(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("run: [unclosed\n  x: 1")
    done = gcore("train", str(path))
    assert_refused((done.returncode, done.stderr.strip()), "not valid YAML", "line 2")


def test_unknown_key(tmp_path):
    assert_refused(bad(tmp_path, lambda r: r["training"].update(lrr=1)), "training.lrr", "did you mean training.lr?")


def test_wrong_type(tmp_path):
    assert_refused(bad(tmp_path, lambda r: r["training"].update(lr="fast")), "training.lr", "'fast'")


def test_dataset_without_a_prompt_column(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "1+1=", "answer": "2"}\n')
    result = bad(tmp_path, lambda r: r["data"].update(train={"path": str(file)}))
    assert_refused(result, "prompt", "text", "data.train.prompt_column")


def test_missing_dataset(tmp_path):
    assert_refused(
        bad(tmp_path, lambda r: r["data"].update(train={"path": "nowhere.jsonl"})), "nowhere.jsonl", "data.train"
    )


def test_a_base_model_trains_on_strings(finished, tmp_path):
    """As Llama's: no pad token, no chat template. Messages and system prompts need one."""
    from gcore.prompts.tokenizer import build_char_tokenizer

    assert gcore("export", str(finished), str(tmp_path / "model")).returncode == 0
    tokenizer = build_char_tokenizer("0123456789+=")
    tokenizer.pad_token = tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write_recipe(tmp_path, model={"path": str(tmp_path / "model"), "tokenizer": str(tmp_path / "tokenizer")})
    done = gcore("train", str(path), "run.steps=1", "runtime=local")
    assert done.returncode == 0, done.stderr
    done = gcore("train", str(path), "data.system_prompt=add", "--dry-run")
    assert_refused((done.returncode, done.stderr.strip()), "data.system_prompt", "model.chat_template")
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}) + "\n")
    done = gcore("train", str(path), f"data.train={{path: {file}}}", "--dry-run")
    assert_refused((done.returncode, done.stderr.strip()), "column 'messages'", "model.chat_template")


@pytest.mark.parametrize("engine", ["embedded", "vllm", "sglang"])
def test_context_window_too_short(tmp_path, engine):
    """Of the policy, for every engine, installed or not."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 19}')
    path = write_recipe(tmp_path, model={"path": str(tmp_path / "model")}, generation={"max_response_length": 8})
    done = gcore("train", str(path), f"generation.engine={engine}")
    words = ("data.max_prompt_length + generation.max_response_length = 20", "context window", "19 tokens")
    assert_refused((done.returncode, done.stderr.strip()), *words)


def test_reward_that_does_not_import(tmp_path):
    path = {"functions": [{"name": "x", "path": "no_such_module:reward"}]}
    assert_refused(bad(tmp_path, lambda r: r.update(rewards=path)), "no_such_module", "rewards.functions")


def test_no_disk_space(tmp_path):
    assert_refused(bad(tmp_path, lambda r: None, "observe.min_free_disk_mb=1000000000"), "run.dir", "MB free")


def test_run_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(bad(tmp_path, lambda r: None, f"run.dir={tmp_path}/file/runs"), "run.dir", "cannot write")


def test_a_run_that_is_ruined_ends_with_one_line(tmp_path):
    """Whatever `max_bad_updates` says: later updates would all be skipped, and the run would end as a success."""
    recipe, ruin = str(write_recipe(tmp_path)), ("training.lr=1e20", "training.weight_decay=1e20")
    done = gcore("train", recipe, "runtime=local", *ruin, "training.max_bad_updates=100")
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("gcore: the weights of the policy became NaN or infinite in the update of step 1 ")


def test_a_run_whose_last_updates_were_skipped_is_no_success(tmp_path):
    """Its weights are finite, but so large that no later gradient is. The checkpoint is complete."""
    (tmp_path / "reward.py").write_text(
        "def spread(completions, **kw): return [float(len(c) % 3) for c in completions]"
    )
    ruin = ("training.warm_start=null", "training.lr=1e29", "training.max_bad_updates=1000", "run.steps=3")
    functions = f"rewards.functions=[{{name: spread, path: '{tmp_path}/reward.py:spread'}}]"
    done = gcore("train", str(write_recipe(tmp_path)), "runtime=local", functions, *ruin)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 2 and re.match(r"gcore: the last \d update\(s\) of the run were skipped", line), line
    assert (tmp_path / "runs" / "tiny" / "step_3" / "manifest.json").is_file()


def test_workflow_of_the_wrong_shape(tmp_path):
    (tmp_path / "flow.py").write_text("def workflow(prompt): return []\n")
    assert_refused(
        bad(tmp_path, lambda r: None, f"workflow={tmp_path}/flow.py:workflow"), "async def workflow(ctx, prompt)"
    )
