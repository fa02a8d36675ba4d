"""`gcore doctor --families`: a row per family, from a small network of it that is run."""

import re

import torch

from gcore.cli import main


def rows(capsys, *names: str) -> dict[str, list[str]]:
    code = main(["doctor", "--families", *names])
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert code == sum(line[2].startswith("no") for line in lines[2:])
    return {line[0]: line[1:] for line in lines}


def test_what_works_and_why_not(capsys):
    table = rows(capsys, "qwen3", "qwen3_5_text", "nemotron_h", "deepseek_v32", "mamba", "zamba", "bert")
    header = table.pop("family")
    assert header[:4] == ["layers", "embedded", "trainer", "media"] and header[7] == "Megatron"
    assert re.match(r"vLLM \d", header[8]) and re.match(r"SGLang \d", header[9])
    assert table["qwen3"] == ["full", "yes", "yes", "", "yes", "yes", "yes", "yes", "yes", "yes"]
    assert table["qwen3_5_text"][:5] == ["full, linear", "yes", "yes", "", "yes"]
    assert table["qwen3_5_text"][6] == "no: has layers of kind linear_attention"
    assert table["nemotron_h"][:5] == ["full, linear, mlp, moe", "yes", "yes", "", "yes"]
    assert table["deepseek_v32"][:3] == ["indexed", "yes", "yes"]
    assert table["mamba"][:3] == ["linear", "yes", "yes"]
    assert table["zamba"][1].startswith("no: has layers of kind hybrid")
    assert table["bert"][1] == "no: has no list of layers"
    assert table["deepseek_v32"][8:] == table["nemotron_h"][8:] == ["yes", "yes"]


def test_models_that_take_media(capsys, monkeypatch):
    table = rows(capsys, "qwen3_5", "gemma4", "llama4", "qwen2_audio", "gemma3n")
    assert table["qwen3_5"][:5] == ["full, linear", "yes", "yes", "images, videos", "yes"]
    assert table["gemma4"][3] == table["llama4"][3] == "images" and "timm" in table["gemma3n"][1]
    assert table["qwen2_audio"][3] == "audio clips"
    monkeypatch.setattr("gcore.generation.media_prefill.encode", lambda network, _: [(torch.zeros(1, 32),)])  # blind
    assert rows(capsys, "qwen3_5")["qwen3_5"][3].startswith("no: logprobs differ by")


def test_a_name_that_transformers_does_not_know(capsys):
    assert "no: " in rows(capsys, "qwen33")["qwen33"][1]
