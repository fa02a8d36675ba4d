"""What a turn of each family says: thought, content and calls, and how a family is recognised."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest

from gcore.config.base import ToolFormatName
from gcore.workflows.tool_formats import BY_NAME, HERMES, AssistantTurn, ToolCall, format_of

ADD, FIND = ToolCall("add", {"a": 27, "b": 58}), ToolCall("find", {"city": "7", "days": 3, "near": ["x"], "on": True})
SCHEMAS: list[dict[str, Any]] = [
    {"function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}},
    {"function": {"name": "find", "parameters": {"properties": {"city": {"type": "string"}}}}},
]
XML_FIND = (("city", "7"), ("days", "3"), ("near", '["x"]'), ("on", "true"))


def harmony(channel: str, text: str, to: str = "") -> str:
    return f"<|channel|>{channel}{to and f' to=functions.{to} <|constrain|>json'}<|message|>{text}"


# format, text -> thought, content, calls
TURNS: list[tuple[str, str, str, str, list[ToolCall]]] = [
    (
        "hermes",
        '<think>\nlook\n</think>\n\nwait\n<tool_call>\n{"name": "add", "arguments": {"a": 27, "b": 58}}\n</tool_call>',
        *("look", "wait", [ADD]),
    ),
    (
        "qwen3_coder",
        "wait\n<tool_call>\n<function=add>\n<parameter=a>\n27\n</parameter>\n<parameter=b>\n58\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=find>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in XML_FIND)
        + "</function>\n</tool_call>",
        *("", "wait", [ADD, FIND]),
    ),
    (
        "glm",
        "\n<think>look</think>\nwait\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>27</arg_value>\n<arg_key>b"
        "</arg_key>\n<arg_value>58</arg_value>\n</tool_call>\n<tool_call>find"
        + "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in XML_FIND)
        + "</tool_call>",
        *("look", "wait", [ADD, FIND]),
    ),
    (
        "minimax",
        '<think>\nlook\n</think>\n\nwait\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">'
        '27</parameter>\n<parameter name="b">58</parameter>\n</invoke>\n<invoke name="find">\n'
        + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in XML_FIND)
        + "</invoke>\n</minimax:tool_call>",
        *("look", "wait", [ADD, FIND]),
    ),
    (
        "deepseek_v32",
        '<think>look</think>wait\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="find">\n'
        '<｜DSML｜parameter name="city" string="true">7</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="near" string="false">["x"]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="on" string="false">true</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        *("look", "wait", [FIND]),
    ),
    (
        "deepseek",
        '<think>look</think>wait<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 27, "b": 58}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        *("look", "wait", [ADD, ToolCall("now")]),
    ),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 27, "b": 58}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        *("", "", [ADD]),
    ),
    (
        "kimi",
        "<think>look</think>wait<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 27, "b": 58}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        *(
            "look",
            "wait",
            [ToolCall("add", ADD.arguments, id="functions.add:0"), ToolCall("now", id="functions.now:1")],
        ),
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 27, "b": 58}, "id": "abcdefghi"}, {"name": "now"}]',
        *("", "", [ToolCall("add", ADD.arguments, id="abcdefghi"), ToolCall("now")]),
    ),
    (
        "mistral",
        '[THINK]look[/THINK]wait[TOOL_CALLS]add[ARGS]{"a": 27, "b": 58}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}',
        *("look", "wait", [ADD, ToolCall("now", id="abcdefghi")]),
    ),
    ("llama3", '{"name": "add", "parameters": {"a": 27, "b": 58}}', "", "", [ADD]),
    (
        "llama3",
        'wait<|python_tag|>{"name": "add", "parameters": {"a": 27, "b": 58}}; {"type": "function", "name": "now"}',
        *("", "wait", [ADD, ToolCall("now")]),
    ),
    ("llama3", '<|python_tag|>search.call(query="x")', "", "", [ToolCall("search", {"query": "x"})]),
    ("llama4", '[add(a=27, b=58), find(city="7", days=3, near=["x"], on=true)]', "", "", [ADD, FIND]),
    ("llama4", '<|python_start|>{"name": "add", "parameters": {"a": 27, "b": 58}}<|python_end|>', "", "", [ADD]),
    (
        "harmony",
        harmony("analysis", "look")
        + "<|end|><|start|>assistant"
        + harmony("commentary", "wait")
        + "<|end|><|start|>assistant"
        + harmony("commentary", '{"a": 27, "b": 58}', to="add"),
        *("look", "wait", [ADD]),
    ),
    (
        "harmony",
        harmony("analysis", "look")
        + '<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 27, "b": 58}<|call|>',
        *("look", "", [ADD]),
    ),
    (
        "harmony",
        harmony("analysis", "look") + "<|end|><|start|>assistant" + harmony("final", "85"),
        *("look", "85", []),
    ),
]


@pytest.mark.parametrize(("name", "text", "thought", "content", "calls"), TURNS)
def test_a_turn_of_each_family(name, text, thought, content, calls):
    row = BY_NAME[name]
    assert row.read(text, SCHEMAS) == AssistantTurn(thought, content, tuple(calls))
    unread = row.read(text, None)
    assert unread.reasoning == thought and not unread.calls
    assert not calls or calls[0].name in unread.content


@pytest.mark.parametrize(("name", "text", "thought", "content", "calls"), TURNS)
def test_what_is_certain_of_a_turn_that_goes_on(name, text, thought, content, calls):
    """It is the beginning of what the whole turn says."""
    row, shown = BY_NAME[name], set[str]()
    for end in range(len(text)):
        if any(
            text[end:].startswith(mark[i:]) and text[:end].endswith(mark[:i])
            for mark in row.special
            for i in range(1, len(mark))
        ):
            continue  # in the middle of a special token
        turn = row.so_far(text[:end], SCHEMAS)
        assert thought.startswith(turn.reasoning) and content.startswith(turn.content) and not turn.calls
        shown.add(turn.content)
    assert row.so_far(text, SCHEMAS).content == content
    assert not content or content[:1] in shown  # before the end


@pytest.mark.parametrize("name", BY_NAME)
def test_any_text_can_be_read(name):
    """Marks, halves of calls and other pieces, in any order: no exception, and what was certain stays the beginning."""
    row, rng = BY_NAME[name], random.Random(0)
    turns = [text for other, text, *_ in TURNS if other == name]
    halves = [half for text in turns for half in (text[: len(text) // 2], text[len(text) // 2 :])]
    pieces = [
        *row.special,
        *row.openers,
        *row.thought,
        *turns,
        *halves,
        *'{}[]":=(),;<>1a \n\\',
        '{"name": "a"}',
        "</tool_call>",
    ]
    for _ in range(1000):
        parts = rng.choices(pieces, k=rng.randint(0, 8))
        for tools in (SCHEMAS, None):
            whole = row.read("".join(parts), tools)
            assert tools is not None or not whole.calls
            for end in range(len(parts)):
                sure = row.so_far("".join(parts[:end]), tools)
                assert whole.reasoning.startswith(sure.reasoning)
                assert whole.content.lstrip().startswith(sure.content.lstrip())


def test_what_is_certain_of_text_without_calls():
    for row in BY_NAME.values():
        if row.partial is None:
            assert row.so_far("1 < 2 [c] {x}", SCHEMAS).content == "1 < 2 [c] {x}"
            assert row.so_far("<tool_call>", None).content == "<tool_call>"  # without tools
    assert HERMES.so_far("85 <tool_", ()).content == "85" and HERMES.so_far("<thi").content == ""
    assert BY_NAME["llama3"].so_far(' {"a').content == "" == BY_NAME["harmony"].so_far("<|channel|>final").content


# format, text: what is left of it, and what is said about it
BROKEN = [
    ("hermes", "so <tool_call>{'name'</tool_call>", "not JSON"),
    ("hermes", '<tool_call>["add"]</tool_call>', 'expected {"name"'),
    ("qwen3_coder", "<tool_call>add(1)</tool_call>", "expected <function=name>"),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>27</tool_call>", "expected <arg_key>"),
    ("minimax", "<minimax:tool_call>add</minimax:tool_call>", "expected <invoke"),
    ("deepseek_v32", "<｜DSML｜function_calls>add</｜DSML｜function_calls>", "expected <invoke"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{27<｜tool▁call▁end｜>", "not JSON"),
    ("kimi", "<|tool_call_begin|>functions.add:0{}<|tool_call_end|>", "expected functions.name:0"),
    ("mistral", "[TOOL_CALLS] add 27", "expected name[ARGS]"),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": [27]}]', "expected an object"),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {', "not JSON"),
    ("llama4", "<|python_start|>[add(27)]<|python_end|>", "expected [name(key=value)"),
    ("llama4", "[add(a=b)]", "malformed node"),
    ("harmony", "<|start|>assistant" + harmony("commentary", "{27", to="add"), "not JSON"),
]


@pytest.mark.parametrize(("name", "text", "error"), BROKEN)
def test_a_call_that_cannot_be_parsed_stays_in_the_text(name, text, error):
    turn = BY_NAME[name].read(text, SCHEMAS)
    assert turn.content == text and turn.parsed == ()
    (call,) = turn.calls
    assert error in call.error and call.name == ""


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize(
    "text", [" 85 ", "", '{"answer": 3}', '{"name": "Ada", "age": 36}', "[1, 2]", "[note] see (a)"]
)
def test_text_without_calls_stays_as_it_is(name, text):
    assert BY_NAME[name].read(text) == AssistantTurn("", text)


def test_a_part_of_the_calls_can_be_parsed():
    good = '<tool_call>{"name": "now"}</tool_call>'
    turn = HERMES.read(f"one {good} two <tool_call>{{</tool_call> three")
    assert turn.content == "one  two <tool_call>{</tool_call> three" and turn.parsed == (ToolCall("now"),)
    assert [bool(call.error) for call in turn.calls] == [False, True]


def test_where_a_thought_ends():
    call = '<tool_call>{"name": "now"}</tool_call>'
    now = (ToolCall("now"),)
    assert HERMES.read(f"<think>I could {call}</think>85") == AssistantTurn(f"I could {call}", "85")
    assert HERMES.read(f"I could {call}</think>85").calls == now  # nothing has opened a thought
    assert HERMES.read(f"<think>so {call}") == AssistantTurn("so", "", now)  # models forget to close it
    assert HERMES.read("<think>still at it") == AssistantTurn("still at it", "")
    tag = '<tool_call>{"name": "say", "arguments": {"x": "</think>"}}</tool_call>'
    assert HERMES.read(tag) == AssistantTurn("", "", (ToolCall("say", {"x": "</think>"}),))


def test_values_of_tags_have_the_types_of_the_schema():
    text = "<tool_call>find\n<arg_key>city</arg_key>\n<arg_value>7</arg_value></tool_call>"
    assert BY_NAME["glm"].read(text, SCHEMAS).calls[0].arguments == {"city": "7"}
    assert BY_NAME["glm"].read(text).calls[0].arguments == {"city": 7}


# what the templates of each family have and no other has
TEMPLATES = {
    "hermes": '<|im_start|>...<tool_call>\n{"name": ...',
    "qwen3_coder": "<|im_start|>...<tool_call>\n<function=example>\n<parameter=x>",
    "glm": "[gMASK]<sop><|system|>...<tool_call>{name}\n<arg_key>{key}</arg_key>",
    "mistral": "[INST]...[TOOL_CALLS]",
    "deepseek": "<｜User｜>...<｜Assistant｜>...<｜tool▁sep｜>",
    "deepseek_v32": "<｜User｜>...<｜Assistant｜>...<｜DSML｜function_calls>",
    "kimi": "<|im_system|>tool_declare<|im_middle|>...<|tool_call_argument_begin|>",
    "harmony": "<|start|>assistant<|channel|>final<|message|>",
    "minimax": "]~b]ai...<minimax:tool_call>",
    "llama3": "<|start_header_id|>user<|end_header_id|>",
    "llama4": "<|header_start|>user<|header_end|>",
}


def test_the_chat_template_chooses_the_format():
    assert {name: format_of(template).name for name, template in TEMPLATES.items()} == {name: name for name in BY_NAME}
    assert format_of(None) is format_of("{{ messages }}") is HERMES
    assert format_of({"default": "<|im_start|>", "tool_use": TEMPLATES["glm"]}).name == "glm"
    assert format_of(TEMPLATES["glm"], "mistral").name == "mistral"
    assert set(get_args(ToolFormatName)) == {"auto", *BY_NAME}
