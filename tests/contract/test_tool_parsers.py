"""Turns of each family, as its chat template writes them: vLLM's parsers and ours find the same calls and content."""

from __future__ import annotations

import json

import pytest

from gcore.config.generation import Generation
from gcore.content.text import TextModality
from gcore.workflows.tool_formats import BY_NAME
from tests.unit.test_turn_tokens import FAMILIES, QUESTION, TOOLS, said_by, tokenizer_of

PARSERS = {
    "qwen3": "hermes",
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3_1": "llama3_json",
    "llama4": "llama4_pythonic",
    "mistral": "mistral",
    "glm4_5": "glm45",
    "deepseek_v3_1": "deepseek_v31",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax_m2",
}


@pytest.mark.parametrize("name", PARSERS)
def test_parsers_of_vllm_read_the_same(name):
    parsers = pytest.importorskip("vllm.tool_parsers")
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    modality = TextModality(Generation(), tokenizer, ())
    request = protocol.ChatCompletionRequest(messages=[QUESTION], model="m", tools=TOOLS, tool_choice="auto")
    parser = parsers.ToolParserManager.get_tool_parser(PARSERS[name])(tokenizer, request.tools)
    calls = 0
    for message in said_by(family):
        before = modality._render([QUESTION], add_generation_prompt=True, tools=TOOLS)
        text = modality._render([QUESTION, message], tools=TOOLS)[len(before) :].rstrip("\n")
        for stop in family.stops.split():
            text = text.removesuffix(stop)
        opened = "<think>" if before.rstrip().endswith("<think>") else ""
        ours = BY_NAME[family.format].read(opened + text, TOOLS)
        theirs = parser.extract_tool_calls(text.split("</think>")[-1], request)
        found = [(call.function.name, json.loads(call.function.arguments)) for call in theirs.tool_calls]
        assert found == [(call.name, call.arguments) for call in ours.calls]
        assert (theirs.content or "").strip() == ours.content.strip()
        calls += len(found)
    assert calls == sum(len(message.get("tool_calls", ())) for message in said_by(family)) > 3
