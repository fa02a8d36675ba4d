"""`gcore doctor --families`: a row per family, from a small network of it that is run."""

import re

from gcore.cli import main


def rows(capsys, *names: str) -> dict[str, list[str]]:
    code = main(["doctor", "--families", *names])
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert code == sum(line[2].startswith("no") for line in lines[2:])
    return {line[0]: line[1:] for line in lines}


def test_what_works_and_why_not(capsys):
    table = rows(capsys, "qwen3", "qwen3_5_text", "nemotron_h", "deepseek_v32", "mamba", "gpt2", "bert")
    header = table.pop("family")
    assert header[:3] == ["layers", "embedded", "trainer"] and header[6] == "Megatron"
    assert re.match(r"vLLM \d", header[7]) and re.match(r"SGLang \d", header[8])
    assert table["qwen3"] == ["full", "yes", "yes", "yes", "yes", "yes", "yes", "yes", "yes"]
    assert table["qwen3_5_text"][:4] == ["full, linear", "yes", "yes", "yes"]
    assert table["qwen3_5_text"][5] == "no: has layers of kind linear_attention"
    assert table["nemotron_h"][:4] == ["full, linear, mlp, moe", "yes", "yes", "yes"]
    assert table["deepseek_v32"][:3] == ["indexed", "yes", "yes"]
    assert table["mamba"][1] == "no: has layers of kind linear_attention"
    assert table["gpt2"][1].startswith("no: gives packed samples different logprobs")
    assert table["bert"][1].startswith("no: ")
    assert table["deepseek_v32"][7:] == table["nemotron_h"][7:] == ["yes", "yes"]


def test_a_name_that_transformers_does_not_know(capsys):
    assert "no: " in rows(capsys, "qwen33")["qwen33"][1]
