"""Hub ids: resolved through huggingface_hub and datasets against a hub on loopback, pinned, and found in the cache."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gcore.hub import is_id, wanted
from tests.fakehub import DATASETS, MODELS, FakeHub, serving

TEMPLATE = json.dumps({"chat_template": "{{ messages }}"}).encode()
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "tokenizer_config.json": TEMPLATE,
    "model.safetensors": b"tensors",
    "pytorch_model.bin": b"the same tensors",
    "consolidated.safetensors": b"the same tensors",
    "onnx/model.safetensors": b"the same tensors",
    "model.gguf": b"the same tensors",
    "README.md": b"",
}
SHARDED = {
    **{name: MODEL[name] for name in ("config.json", "tokenizer.json", "tokenizer_config.json")},
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    ).encode(),
    "m-1.safetensors": b"1",
    "m-2.safetensors": b"2",
}
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""
NOWHERE = "http://127.0.0.1:9"  # nothing listens there


def parquet(*questions: str) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{"question": q, "answer": "a"} for q in questions]), file)
    return file.getvalue()


@pytest.fixture
def hub():
    with serving() as hub:
        yield hub


@pytest.fixture
def gsm8k(hub) -> str:
    files = {f"main/{name}-00000-of-00001.parquet": parquet(*q) for name, q in (("train", "ab"), ("test", "c"))}
    socratic = {"socratic/train-00000-of-00001.parquet": parquet("s")}
    return hub.add(DATASETS, "openai/gsm8k", {"README.md": CARD, **files, **socratic})


def run(hub: FakeHub, home: Path, code: str, **env: str) -> list[str]:
    """Lines that the code prints in a fresh process; a UserError is printed."""
    code = "from gcore.types import UserError\ntry:\n  " + "\n  ".join(code.splitlines()) + "\n"
    code += "except UserError as error:\n  print(error)\n"
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run([sys.executable, "-c", code], env=inherited | own | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def pin(path: str = "org/model", more: str = "") -> str:
    return (
        "from gcore.config.base import Model\nfrom gcore.hub import model_folder, pin_model\n"
        f"model = pin_model(Model(path={path!r}{more}))\nprint(model.revision)\n"
    )


WEIGHTS = "print(*sorted(f.name for f in model_folder(model, weights=True).iterdir()))\n"


def test_what_can_be_an_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert all(map(is_id, ["Qwen/Qwen3-0.6B", "gpt2", "a/b_c.d"]))
    assert not any(map(is_id, ["/models/x", "./x", "../x", "~/x", "a/b/c", "a/", "", "x y/z"]))
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert not is_id("org/model")  # a folder of that name comes first


def test_weights_come_in_one_format_alone():
    small = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert wanted(MODEL, weights=False, code=False) == small
    assert wanted(MODEL, weights=True, code=False) == [*small, "model.safetensors"]
    assert wanted(["config.json", "pytorch_model.bin", "training_args.bin"], weights=True, code=False) == [
        "config.json",
        "pytorch_model.bin",
    ]
    assert wanted(["modeling.py", "a.jinja"], weights=True, code=True) == ["modeling.py", "a.jinja"]


def test_a_model_is_pinned_downloaded_once_and_then_found_without_a_hub(hub, tmp_path):
    commit = hub.add(MODELS, "org/model", MODEL)
    assert run(hub, tmp_path, pin()) == [commit]
    assert hub.downloads() == ["config.json", "tokenizer.json", "tokenizer_config.json"]  # no weights for the checks
    names = "config.json model.safetensors tokenizer.json tokenizer_config.json"
    assert run(hub, tmp_path, pin() + WEIGHTS) == [commit, names]
    assert hub.downloads().count("model.safetensors") == 1 and len(hub.downloads()) == 4
    asked = len(hub.asked)
    assert run(hub, tmp_path, pin() + WEIGHTS) == [commit, names]  # the local cache first
    assert hub.asked[asked:] == []
    assert run(hub, tmp_path, pin() + WEIGHTS, HF_ENDPOINT=NOWHERE) == [commit, names]
    assert run(hub, tmp_path, pin() + WEIGHTS, HF_HUB_OFFLINE="1") == [commit, names]


def test_half_of_the_weights_in_the_cache_are_not_a_model(hub, tmp_path):
    commit = hub.add(MODELS, "org/model", {k: v for k, v in SHARDED.items() if k != "m-2.safetensors"})
    run(hub, tmp_path, pin() + WEIGHTS)
    [_, said] = run(hub, tmp_path, pin() + WEIGHTS, HF_HUB_OFFLINE="1")
    assert "model.path=org/model" in said and "not in the local cache" in said
    hub.files[MODELS, "org/model"] = SHARDED
    for tree in tmp_path.rglob(f"trees/{commit}.json"):
        tree.unlink()  # a commit never changes on a real hub
    assert "m-2.safetensors" in run(hub, tmp_path, pin() + WEIGHTS)[1]


def test_a_cached_base_model_is_looked_up_for_a_template_and_used_when_the_hub_is_away(hub, tmp_path):
    files = {**MODEL, "tokenizer_config.json": b"{ }"}
    commit = hub.add(MODELS, "org/model", files)
    run(hub, tmp_path, pin())
    hub.files[MODELS, "org/model"] = {**files, "chat_template.jinja": b"{{ messages }}"}
    for tree in tmp_path.rglob(f"trees/{commit}.json"):
        tree.unlink()  # as if another tool had downloaded a part
    assert run(hub, tmp_path, pin(), HF_ENDPOINT=NOWHERE) == [commit]
    run(hub, tmp_path, pin())
    assert "chat_template.jinja" in hub.downloads()


def test_revisions_and_tokenizers_of_their_own(hub, tmp_path):
    hub.add(MODELS, "org/model", MODEL, v2="2" * 40)
    tokenizer = hub.add(MODELS, "org/tokenizer", {k: v for k, v in MODEL.items() if k.startswith("tokenizer")})
    code = pin(more=", revision='v2', tokenizer='org/tokenizer'") + "print(model.tokenizer_revision)"
    assert run(hub, tmp_path, code) == ["2" * 40, tokenizer]
    assert run(hub, tmp_path, code, HF_HUB_OFFLINE="1") == ["2" * 40, tokenizer]


@pytest.mark.parametrize(
    ("path", "more", "env", "words"),
    [
        ("org/none", "", {}, "model.path=org/none: no such file or folder here, and no such model on the hub"),
        ("org/model", ", revision='v9'", {}, "model.revision=v9: org/model has no such branch, tag or commit"),
        ("org/gated", "", {}, "model.path=org/gated: gated on the hub; accept its terms at http"),
        ("org/model", "", {"HF_HUB_OFFLINE": "1"}, "not in the local cache (HOME/hub), and HF_HUB_OFFLINE forbids"),
        ("org/model", "", {"HF_ENDPOINT": NOWHERE}, f"and {NOWHERE} does not respond: Connect"),
        ("a--b/c", "", {}, "model.path=a--b/c: no such folder here, and not an id of the hub"),
        ("/none/of/it", "", {}, "model.path: no such folder: /none/of/it (expected a Hugging Face folder"),
        ("HOME", ", revision='v1'", {}, "model.revision=v1: model.path=HOME is a folder; expected a hub id"),
    ],
)
def test_one_line_for_a_model_that_is_not_there(hub, tmp_path, path, more, env, words):
    hub.add(MODELS, "org/model", MODEL)
    hub.add(MODELS, "org/gated", MODEL)
    hub.gated.add("org/gated")
    [said] = run(hub, tmp_path, pin(path.replace("HOME", str(tmp_path)), more), **env)
    assert words.replace("HOME", str(tmp_path)) in said


def test_plan_needs_the_config_alone(hub, tmp_path):
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    hub.add(MODELS, "org/model", {**MODEL, "config.json": json.dumps({**config, "intermediate_size": 128}).encode()})
    code = "from gcore.cost.shapes import shape_of\nshape = shape_of('org/model')\nprint(shape.name, shape.hidden)"
    assert run(hub, tmp_path, code) == ["model 64"]
    assert hub.downloads() == ["config.json"]
    assert run(hub, tmp_path, code, HF_HUB_OFFLINE="1") == ["model 64"]


def test_plan_does_not_repeat_a_request_that_no_hub_answers(tmp_path):
    """The download of huggingface_hub repeats it five times, with growing delays and a warning for each."""
    code = "import time\nwaits = []\ntime.sleep = waits.append\n"
    code += "from gcore.cost.shapes import shape_of\ntry:\n  shape_of('org/model')\nfinally:\n  print(waits)"
    nowhere = FakeHub()
    nowhere.url = NOWHERE
    [waits, said] = run(nowhere, tmp_path, code)
    assert waits == "[]" and "does not respond" in said


# --- datasets


def rows(more: str, key: str = "data.train") -> str:
    return (
        "from gcore.config.data import Dataset\nfrom gcore.prompts.rows import load_rows\n"
        "from gcore.prompts.stored import pin_rows\n"
        f"spec = pin_rows(Dataset(path='openai/gsm8k'{more}), {key!r})\nprint(spec.revision, spec.subset, spec.split)\n"
        f"print(*(row['question'] for row in load_rows(spec, {key!r})))"
    )


def test_a_dataset_is_pinned_downloaded_once_and_then_found_without_a_hub(hub, gsm8k, tmp_path):
    pytest.importorskip("datasets")
    expected = [f"{gsm8k} main train", "a b"]
    assert run(hub, tmp_path, rows(", subset='main'")) == expected
    asked = len(hub.asked)
    assert run(hub, tmp_path, rows(", subset='main'")) == expected
    assert hub.asked[asked:] == []
    test = ", subset='main', split='test'"
    assert run(hub, tmp_path, rows(test, "data.eval"), HF_HUB_OFFLINE="1") == [f"{gsm8k} main test", "c"]
    assert run(hub, tmp_path, rows(", size=1"), HF_ENDPOINT=NOWHERE) == [f"{gsm8k} main train", "a"]
    pinned = f", subset='main', split='train[1:]', revision={gsm8k!r}"
    assert run(hub, tmp_path, rows(pinned), HF_HUB_OFFLINE="1") == [f"{gsm8k} main train[1:]", "b"]


@pytest.mark.parametrize(
    ("more", "key", "env", "words"),
    [
        ("", "data.train", {}, "data.train.subset: not set, and openai/gsm8k has main, socratic"),
        (", subset='x'", "data.train", {}, "data.train.subset: 'x', and openai/gsm8k has main, socratic"),
        (", subset='main'", "data.eval", {}, "data.eval.split: not set, and openai/gsm8k has train, test"),
        (
            ", subset='main', split='dev'",
            "data.eval",
            {},
            "data.eval.split=dev: no such split in openai/gsm8k; expected one of train, test",
        ),
        (", subset='main', revision='v9'", "data.train", {}, "data.train.revision=v9: openai/gsm8k has no such branch"),
        (
            ", subset='main'",
            "data.train",
            {"HF_HUB_OFFLINE": "1"},
            "data.train.path=openai/gsm8k: no such file or folder",
        ),
        (", subset='main'", "data.train", {"HF_ENDPOINT": NOWHERE}, f"{NOWHERE} does not respond"),
    ],
)
def test_one_line_for_a_dataset_that_is_not_there(hub, gsm8k, tmp_path, more, key, env, words):
    pytest.importorskip("datasets")
    [said] = run(hub, tmp_path, rows(more, key), **env)
    assert words in said


def test_datasets_that_cannot_be_read(hub, tmp_path):
    pytest.importorskip("datasets")
    hub.add(DATASETS, "openai/gsm8k", {"README.md": b"", "notes.bin": b"x"})
    [said] = run(hub, tmp_path, rows(""))
    assert said.startswith("data.train.path=openai/gsm8k: cannot be loaded from the hub: ")


def test_a_process_takes_nothing_from_the_hub_that_the_driver_found_in_a_folder(hub, gsm8k, tmp_path):
    """Relative paths mean something else in another working directory."""
    hub.add(MODELS, "org/model", MODEL)
    code = "from gcore.config.base import Model\nfrom gcore.config.data import Dataset\n"
    code += "from gcore.hub import model_folder\nfrom gcore.prompts.rows import load_rows\n"
    [said] = run(hub, tmp_path, code + "model_folder(Model(path='org/model'))")
    assert said.startswith("model.path: no such folder: org/model")
    [said] = run(hub, tmp_path, code + "load_rows(Dataset(path='openai/gsm8k', subset='main'))")
    assert said.startswith("data.train.path: no such file or folder: openai/gsm8k")
    assert hub.asked == []


def test_a_copy_of_a_hub_dataset_is_a_folder(hub, gsm8k, tmp_path):
    pytest.importorskip("datasets")
    for name, content in hub.files[DATASETS, "openai/gsm8k"].items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(content)
    code = (
        "from gcore.config.data import Dataset\nfrom gcore.prompts.rows import load_rows\n"
        f"print(load_rows(Dataset(path={str(tmp_path / 'copy')!r}, subset='main', split='test'))[0]['question'])"
    )
    assert run(hub, tmp_path, code, HF_HUB_OFFLINE="1") == ["c"]
    assert hub.asked == []
