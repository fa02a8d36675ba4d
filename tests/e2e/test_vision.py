"""Runs of a small vision-language model: the number of controllers, a kill, and wrong pairs of model and dataset."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from gcore.config.base import Model
from gcore.config.tree import Config
from gcore.content.media import png_url
from gcore.prompts.processor import load_processor
from gcore.prompts.tokenizer import load_tokenizer
from gcore.rewarding.rules import text_of
from gcore.runtime.local import LocalGroup
from tests.e2e.helpers import RECIPE, environment, gcore, held, rows, steps, untimed, write_recipe
from tests.vision_families import picture, save

DIGITS = {"task": "digits", "size": 40, "args": {"count": 2, "answer": "sum"}}
VISION = {"hidden_size": 32, "intermediate_size": 32, "layers": 1, "heads": 2}
SMALL: dict[str, Any] = {
    "model": {"build": {**RECIPE["model"]["build"], "max_length": 48, "vision": VISION}},
    "data": {
        "train": DIGITS,
        "eval": {**DIGITS, "size": 10, "args": {**DIGITS["args"], "split": "eval"}},
        "max_prompt_length": 24,
    },
    "algorithm": {"kl_coef": 0.05, "mini_batches": 2},
}
NAMED = {"train": [{"prompt": "1+2=", "answer": "3", "picture": "pictures/12.png"}], "max_prompt_length": 24}
PARTS, WEIGHTS = ("text", "vision"), "model.safetensors"
TEXT = {"build": {**RECIPE["model"]["build"], "max_length": 48}}


def train(folder: Path, *overrides: str, **top: Any) -> list[dict[str, Any]]:
    recipe = write_recipe(folder, **{**SMALL, **top})
    ended = gcore("train", str(recipe), "runtime=local", "run.steps=3", *overrides)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return rows(folder / "runs" / "tiny")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(tmp_path_factory.mktemp("one"), "controllers=1", "checkpoint.every=1")


@pytest.mark.parametrize("controllers", [2, pytest.param(4, marks=pytest.mark.release)])
def test_any_number_of_controllers(tmp_path, one, controllers):
    found = train(tmp_path, f"controllers={controllers}", "checkpoint.every=1")
    assert [untimed(row) for row in found] == [untimed(row) for row in one]  # to the last bit
    assert len({row["samples_digest"] for row in steps(one)}) == 3
    logged = [json.loads(line) for p in (tmp_path / "runs/tiny/samples").glob("*.jsonl") for line in p.open()]
    assert all(len(row["images"]) == 2 and row["images"][0].startswith("data:image/png") for row in logged)
    assert max(row["rollout/logprob_diff_max"] for row in steps(found)) < 1e-5  # engine against trainer


def test_any_number_of_controllers_with_a_delta_rule(tmp_path):
    heads = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4)
    sizes = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }
    build = {**SMALL["model"]["build"], "architecture": "qwen3_5_text", "config": {**heads, **sizes}}
    found = []
    for controllers in (1, 2):
        folder = tmp_path / str(controllers)
        folder.mkdir()
        found.append([untimed(row) for row in train(folder, f"controllers={controllers}", model={"build": build})])
    assert found[0] == found[1]  # to the last bit
    assert max(row["rollout/logprob_diff_max"] for row in steps(found[0])) < 1e-5


def brightness(prompts: Any, completions: Any, images: Any, **_: Any) -> list[float]:
    return [float(own[0].read().mean()) / 255 for own in images]


def variety(prompts: Any, completions: Any, **_: Any) -> list[float]:
    return [float(len(set(text_of(completion)))) for completion in completions]


def length(prompts: Any, completions: Any, images: Any, **_: Any) -> list[float]:
    assert all(video.read().ndim == 4 for own in images for video in own)
    return [float(len(text_of(completion))) for completion in completions]


def test_ppo_with_a_critic_that_sees(tmp_path):
    functions = [{"name": "brightness", "path": "tests.e2e.test_vision:brightness"}]
    more = {"algorithm": {"preset": "ppo", "mini_batches": 2}, "critic": {"lr": 1e-3}}
    found = steps(train(tmp_path, "controllers=2", **more, rewards={"functions": functions}))
    assert found[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)  # values are 0
    assert len(found) == 3 and all(row["critic/loss"] > 0 and row["critic/grad_norm"] > 0 for row in found)
    assert all(abs(row["critic/value_mean"]) > 1e-4 for row in found[1:])
    assert max(row["rollout/logprob_diff_max"] for row in found) < 1e-5
    more |= {"placement": {"trainer": {"threads": 1}, "critic": {"ranks": 1}}}
    apart = steps(train(tmp_path, "controllers=2", **more, rewards={"functions": functions}))
    assert [row["critic/loss"] for row in apart] == [row["critic/loss"] for row in found]


def test_videos_train(tmp_path):
    """Two videos in each row, as lists of frames. The model sees timestamps: its alphabet needs their characters."""
    rng = np.random.default_rng(0)

    def row(number: int) -> dict[str, Any]:
        videos = [[png_url(picture(int(rng.integers(1000)))) for _ in range(frames)] for frames in (2, 3)]
        return {"prompt": "<video>1+<video>1=", "videos": videos, "answer": str(number % 3)}

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(12)))
    build = {**SMALL["model"]["build"], "max_length": 128, "alphabet": "0123456789+= .<>cdenos"}
    data = {"train": {"path": str(tmp_path / "rows.jsonl")}, "max_prompt_length": 100, "media": {"fps": 4.0}}
    functions = [{"name": "length", "path": "tests.e2e.test_vision:length"}]
    more = {"model": {"build": build}, "data": data, "rewards": {"functions": functions}}
    found = train(tmp_path, "controllers=2", "run.steps=2", **more)
    assert max(row["rollout/logprob_diff_max"] for row in steps(found)) < 1e-5  # engine against trainer
    assert all(row["actor/grad_norm"] > 0 for row in steps(found))
    decoded = sum(row["controller/media_bytes_all"] for row in steps(found))
    assert decoded >= 2 * 12 * 5 * 16 * 16 * 3  # 12 prompts per step with 5 frames each
    logged = [json.loads(line) for p in (tmp_path / "runs/tiny/samples").glob("*.jsonl") for line in p.open()]
    assert logged and all(len(row["images"]) == 2 for row in logged)  # a frame of each video


def test_a_critic_that_takes_no_images_is_refused(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"lm_head.weight": np.zeros((2, 2), np.float32)}, tmp_path / "text" / "model.safetensors")
    critic = {"model": {"path": str(tmp_path / "text")}}
    recipe = write_recipe(tmp_path, **{**SMALL, "algorithm": {"preset": "ppo"}, "critic": critic})
    ended = gcore("train", str(recipe), "runtime=local")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "takes no images; the policy takes images (qwen3_vl), expected the same family" in ended.stderr


def test_a_controller_decodes_its_share_and_collectives_carry_no_pixels(tmp_path, monkeypatch):
    """Pictures of 64 times the bytes: the controllers decode 64 times as much, one share each; collectives, requests
    and samples have the same size. 512 samples with 4 images of 1 MB each: bench/media_bytes.py"""
    gathered, original = dict[str, int](), LocalGroup.all_gather
    name = ""

    async def counted(self: LocalGroup, about: str, value: Any) -> list[Any]:
        if "metrics" not in about:  # of times
            gathered[name] = gathered.get(name, 0) + len(pickle.dumps(value))
        return await original(self, about, value)

    monkeypatch.setattr(LocalGroup, "all_gather", counted)
    found: dict[str, list[dict[str, Any]]] = {}
    for edge in (16, 128):
        name = f"{edge:03d}"
        (tmp_path / name).mkdir()
        data = {**SMALL["data"], "train": {**DIGITS, "args": {**DIGITS["args"], "edge": edge}}, "eval": None}
        options = ("controllers=4", "run.steps=2", "training.warm_start=null", "observe.trackers=[]")
        found[name] = steps(train(tmp_path / name, *options, data=data))
    small, large = found.values()
    for before, after in zip(small, large, strict=True):
        assert after["controller/media_bytes_all"] == 64 * before["controller/media_bytes_all"]
        assert after["controller/media_bytes_all"] >= 12 * 2 * 128 * 128 * 3
        assert after["controller/media_bytes"] <= 1.2 / 4 * after["controller/media_bytes_all"]
        assert after["controller/bytes"] < 20_000  # tokens; their number depends on what the model sees
    assert gathered["128"] == pytest.approx(gathered["016"], rel=0.02) and gathered["128"] < 2 * 128 * 128 * 3


@pytest.mark.release
def test_kill_and_resume(tmp_path, one):
    recipe = write_recipe(tmp_path, **SMALL)
    hold, go = held(tmp_path, first=RECIPE["sampling"]["prompts_per_step"])  # step_1 is not deleted yet
    command = ["train", str(recipe), "runtime=local", "run.steps=3", "controllers=1", "checkpoint.every=1", hold]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-m", "gcore.cli", *command], env=environment(), **quiet)
    run, deadline = tmp_path / "runs" / "tiny", time.monotonic() + 300
    while not (run / "step_1").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    go.touch()
    resumed = gcore(*command, "run.resume=auto")
    assert resumed.returncode == 0 and "resumed from" in resumed.stdout, resumed.stderr
    assert [untimed(row) for row in rows(run)] == [untimed(row) for row in one]


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ({"model": TEXT}, "column 'images' holds"),
        ({"data": NAMED}, "the column 'picture' holds media (row 0); expected them in the column image or images"),
        ({"data": {**SMALL["data"], "media": {"max_pixels": 100}}}, "of 40 rows have media that cannot be used"),
        ({"training": {"vision_lr": 1e-3}, "model": TEXT, "data": RECIPE["data"]}, "training.vision_lr"),
        ({"training": {"context_parallel": 2}}, "training.context_parallel=2"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(tmp_path, top, message):
    recipe = write_recipe(tmp_path, **{**SMALL, **top})
    ended = gcore("train", str(recipe), "runtime=local")
    assert ended.returncode == 2 and message in ended.stderr, ended.stdout + ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "runs" / "tiny" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("family", "how"),
    [
        *(("qwen3_5", how) for how in ("whole", "lora", "sft")),
        ("qwen3_5_moe", "lora"),
        ("gemma4", "whole"),
        ("llama4", "whole"),
    ],
)
def test_text_alone_trains_a_model_that_could_see(tmp_path, family, how):
    """A model as it is downloaded: its outer configuration, with a tower. It is exported under the same names."""
    source, later = save(family, tmp_path / "model"), {}
    if "qwen3_5" in family:  # layers that transformers does not read
        later = {"mtp.fc.weight": np.ones((2, 3), np.float32)}
        save_file({**load_file(source / WEIGHTS), **later}, source / WEIGHTS, {"format": "pt"})
    if how == "whole":  # a base model, which reads prompts as they are
        (source / "chat_template.jinja").unlink()
    if how == "lora":  # without the settings of its processor
        (source / "preprocessor_config.json").unlink()
    model = {"path": str(source), **({"lora": {"rank": 2}} if how == "lora" else {})}
    functions = [{"name": "variety", "path": "tests.e2e.test_vision:variety"}]
    more = {"objective": "sft"} if how == "sft" else {"rewards": {"functions": functions}}
    recipe = write_recipe(tmp_path, **{**RECIPE, "model": model, **more})
    ended = gcore("train", str(recipe), "runtime=local", "run.steps=2", "training.warm_start=null")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "data.train: no image in 80 rows: the model takes images, and reads text alone here" in ended.stdout
    found = steps(rows(tmp_path / "runs" / "tiny"))
    assert len(found) == 2
    if how != "sft":
        assert max(row["rollout/logprob_diff_max"] for row in found) < 5e-5  # with a delta rule
    assert gcore("export", str(tmp_path / "runs" / "tiny"), str(tmp_path / "hf")).returncode == 0
    before, after = load_file(source / WEIGHTS), load_file(tmp_path / "hf" / WEIGHTS)
    if later:
        after |= load_file(tmp_path / "hf" / "model-left-out.safetensors")
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == after.keys()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert after.keys() == before.keys() and changed and not any("vis" in name for name in changed)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "hf")]
    for config in (*configs, *(config[f"{part}_config"] for config in configs for part in PARTS)):
        config.pop("dtype", None)
    assert configs[0] == configs[1] and configs[0]["architectures"][0].endswith("ForConditionalGeneration")


def test_an_export_is_a_folder_that_a_run_can_start_from(tmp_path):
    train(tmp_path, "controllers=1", "run.steps=1")
    ended = gcore("export", str(tmp_path / "runs" / "tiny"), str(tmp_path / "hf"))
    assert ended.returncode == 0, ended.stderr
    model = Model(path=str(tmp_path / "hf"))
    tokenizer = load_tokenizer(model)
    built = load_processor(
        Config.model_validate(yaml.safe_load((tmp_path / "tiny.yaml").read_text())).model, tokenizer, None
    )
    again = load_processor(model, tokenizer, None)
    text = "<|vision_start|><|image_pad|><|vision_end|>="
    a, b = (p.content(text, [("image", picture(3))]) for p in (built, again))
    assert a.context_bytes() == b.context_bytes()
    assert np.array_equal(a.media[0].inputs["pixel_values"], b.media[0].inputs["pixel_values"])
