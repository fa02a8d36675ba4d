"""Before anything starts: context windows from config.json, and the revisions of a run that is resumed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from gcore.config.tree import Config
from gcore.launch.pins import check_models, context_window, pin
from gcore.types import UserError
from tests.e2e.helpers import RECIPE

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"model_type": "mamba"}, None),
        ({"max_position_embeddings": 32768, "rope_scaling": None}, 32768),
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072),  # scaled already
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4}}, 16384),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 4096),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 64,
                "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8}},
            },
            512,
        ),
    ],
)
def test_context_window(config, window):
    assert context_window(config) == window


def recipe(tmp_path, **rewards) -> Config:
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 30}))
    return Config.model_validate({**RECIPE, "rewards": {**RECIPE["rewards"], **rewards}})


def test_judges_and_scorers_that_are_too_short(tmp_path):
    model = {"path": str(tmp_path / "model")}
    judge = {"name": "critic", "model": model, "template": "{{ response }}", "max_prompt_length": 20}
    check_models(recipe(tmp_path, judges=[{**judge, "max_response_length": 10}]))
    with pytest.raises(
        UserError,
        match=r"^rewards\.judges\.0\.max_prompt_length \+ rewards\.judges\.0\.max_response_length = 31 exceeds the "
        r"context window of rewards\.judges\.0\.model\.path=.*model: 30 tokens$",
    ):
        check_models(recipe(tmp_path, judges=[{**judge, "max_response_length": 11}]))
    for length in (30, "auto"):
        check_models(recipe(tmp_path, models=[{"name": "taste", "model": model, "max_length": length}]))
    with pytest.raises(UserError, match=r"^rewards\.models\.0\.max_length = 31 exceeds .* 30 tokens$"):
        check_models(recipe(tmp_path, models=[{"name": "taste", "model": model, "max_length": 31}]))


def test_folders_that_are_no_models(tmp_path):
    def check(path):
        check_models(Config.model_validate({**RECIPE, "model": {"path": str(path)}}))

    with pytest.raises(UserError, match=r"^model\.path: no such folder: .*none"):
        check(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"^model\.path=.*empty: no config\.json there"):
        check(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"^model\.path=.*empty: its config\.json is not JSON"):
        check(tmp_path / "empty")


def test_windows_are_checked_without_torch(tmp_path):
    """Also not through an import of the driver."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 8}))
    tree = {**RECIPE, "model": {"path": str(tmp_path)}}
    code = (
        "import sys\nfrom gcore.config.tree import Config\nfrom gcore.driver.supervise import run\n"
        f"try:\n  run(Config.model_validate({tree!r}))\nexcept ValueError as error:\n  print(error)\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    said, modules = done.stdout.splitlines()
    assert "= 20 exceeds the context window" in said and modules == "False False"


def test_a_resumed_run_keeps_its_commits(tmp_path, monkeypatch):
    """The recipe names no revision; the run that goes on has one. A revision in the recipe comes first."""
    seen = {}

    def pin_model(model, key="model"):
        seen[key] = model.revision
        return model

    monkeypatch.setattr("gcore.launch.pins.pin_model", pin_model)
    scorer = {"name": "taste", "model": {"path": "org/scorer"}}
    tree = {**RECIPE, "model": {"path": "org/model"}, "rewards": {"models": [scorer]}}
    tree["run"] = {**RECIPE["run"], "dir": str(tmp_path)}
    old = json.loads(json.dumps(tree))
    old["model"]["revision"], old["rewards"]["models"][0]["model"]["revision"] = "a" * 40, "b" * 40
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.yaml").write_text(yaml.safe_dump(old))

    def pinned(resume, **model):
        run = {**tree["run"], "resume": resume}
        pin(Config.model_validate({**tree, "run": run, "model": {"path": "org/model", **model}}))
        return list(seen.values())

    assert pinned("never") == [None, None]
    assert sorted(pinned("auto")) == ["a" * 40, "b" * 40]
    assert sorted(pinned(str(tmp_path / "tiny" / "step_2"))) == ["a" * 40, "b" * 40]
    assert sorted(pinned("auto", revision="v2")) == ["b" * 40, "v2"]
    pinned("auto", path="org/other")
    assert seen == {"model": None, "rewards.models.0.model": "b" * 40}
