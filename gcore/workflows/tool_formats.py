"""How families of models write their thoughts and tool calls: what a turn of the policy says, by its chat template.

    chat template ──format_of──> ToolFormat        text of a turn ──ToolFormat.read──> AssistantTurn

FORMATS has one row per family. The first row whose marks are in the chat template is the format of a policy, unless
model.tool_format names another. A row names the special tokens that its calls are written with: they are kept in the
text that is read here, and left out of the text that rewards and people read.

A call that cannot be parsed stays in the content, as text, and is also in `calls`, with its error.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gcore.types import Message

Schemas = Sequence[Mapping[str, Any]]  # of the tools, in OpenAI's form
THINK = ("<think>", "</think>")
CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """ToolCall("add", {"a": 27, "b": 58}). `error`: why the text is not a call; then the name is empty. `id`: if the
    policy wrote one."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """AssistantTurn("I need the sum.", "One moment.", (ToolCall("add", {"a": 27, "b": 58}),))"""

    reasoning: str
    content: str  # the rest of the text, with the calls that cannot be parsed
    calls: tuple[ToolCall, ...] = ()

    @property
    def parsed(self) -> tuple[ToolCall, ...]:
        return tuple(call for call in self.calls if not call.error)


Reader = Callable[["ToolFormat", str, Schemas | None], AssistantTurn]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`read(text, tools)`: without `tools` (None), calls are not parsed and stay in the content."""

    name: str
    marks: tuple[tuple[str, ...], ...]  # one of these groups is in the chat template, all of its strings
    call: re.Pattern[str]  # a block of calls; its first group that matches is their text
    calls_of: Callable[[str, Schemas], list[ToolCall]]  # raises ValueError if the text is not a call
    special: tuple[str, ...] = ()  # special tokens that it is written with
    thought: tuple[str, str] = THINK
    openers: tuple[str, ...] = ()  # a call begins with one of them
    bare: bool = False  # a whole turn of JSON, or a list, may be a call too
    reader: Reader | None = None  # instead of `call` and `thought`
    partial: Callable[[str], str] | None = None  # for `reader`: what is certain of a turn that goes on

    def read(self, text: str, tools: Schemas | None = ()) -> AssistantTurn:
        if self.reader is not None:
            return self.reader(self, text, tools)
        reasoning, said = self._split(text, () if tools is None else self.openers)
        if tools is None:
            return AssistantTurn(reasoning, said)
        calls, rest = self.find_calls(said, tools)
        return AssistantTurn(reasoning, rest, tuple(calls))

    def with_thought(self, message: Message) -> Message:
        """A message of the assistant with its thought in the content."""
        thought = message.get("reasoning_content")
        if self.reader is not None or not thought:
            return message
        rest = {name: value for name, value in message.items() if name != "reasoning_content"}
        return {**rest, "content": f"{self.thought[0]}\n{thought}\n{self.thought[1]}\n\n{message['content']}"}

    def is_in(self, template: str) -> bool:
        return any(all(mark in template for mark in group) for group in self.marks)

    def find_calls(self, text: str, tools: Schemas = ()) -> tuple[list[ToolCall], str]:
        """All calls, and the rest of the text."""
        calls, rest, end = list[ToolCall](), list[str](), 0
        for match in self.call.finditer(text):
            try:
                found = self.calls_of(next(group for group in match.groups() if group is not None), tools)
            except (ValueError, RecursionError) as error:
                found = [ToolCall("", error=str(error) or type(error).__name__)]
            if all(not call.error for call in found):
                rest.append(text[end : match.start()])
                end = match.end()
            calls += found
        if not calls:
            return [], text
        return calls, "".join([*rest, text[end:]]).strip()

    def so_far(self, text: str, tools: Schemas | None = ()) -> AssistantTurn:
        """Of a turn that goes on: only what its end cannot change. What may be the beginning of a call or of the end of
        a thought waits."""
        if self.partial is not None:
            text = self.partial(text)
            return replace(self.read(text, tools), calls=())
        start, end = self.thought
        if (said := text.lstrip()) and len(said) < len(start) and start.startswith(said):
            return AssistantTurn("", "")
        calls = self.openers if tools is not None else ()
        if said.startswith(start) and end not in said:
            return AssistantTurn(_before(said.removeprefix(start), (end, *calls)).strip(), "")
        reasoning, content = self._split(text, calls)
        if calls and self.bare and content.lstrip().startswith(("{", "[")):
            return AssistantTurn(reasoning, "")
        content = _before(content, calls).rstrip() if calls else content
        return AssistantTurn(reasoning, content)

    def _split(self, text: str, calls: Sequence[str]) -> tuple[str, str]:
        """The thought and what follows it. One that is not closed ends where a call begins: with one of `calls`."""
        start, end = self.thought
        if not (said := text.lstrip()).startswith(start):
            return "", text
        thought, closed, rest = said.removeprefix(start).partition(end)
        if not closed and (begun := [at for mark in calls if (at := thought.find(mark)) >= 0]):
            thought, rest = thought[: min(begun)], thought[min(begun) :]
        return thought.strip(), rest.lstrip("\n")


def _before(text: str, marks: Sequence[str]) -> str:
    """Up to the first mark, or to what may be the beginning of one at the end."""
    found = [at for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        return text[: min(found)]
    longest = max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
    return text[: len(text) - longest]


# ---- JSON -----------------------------------------------------------------------------------------------------------


def _call(call: Any, key: str = "arguments") -> ToolCall:
    """{"name": ..., "arguments": {...}}. `key`: where the arguments are; other families' keys are read too."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise ValueError(f'expected {{"name": ..., "{key}": {{...}}}}')
    given = next((call[name] for name in (key, "arguments", "parameters") if name in call), None)
    own = call.get("id")
    return ToolCall(call["name"], _arguments(given, key), id=own if isinstance(own, str) else "")


def _arguments(given: Any, key: str = "arguments") -> dict[str, Any]:
    if isinstance(given, str):
        given = _json(given) if given.strip() else None
    if given is not None and not isinstance(given, dict):
        raise ValueError(f"{key}: expected an object of JSON")
    return given or {}


def _json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except ValueError as error:
        raise ValueError(f"the call is not JSON: {error}") from None


def _hermes(body: str, _: Schemas) -> list[ToolCall]:
    return [_call(_json(body))]


def _mistral(body: str, _: Schemas) -> list[ToolCall]:
    """[{"name": ..., "arguments": {...}}], or since version 11 of its tokenizer name[CALL_ID]id[ARGS]{...}."""
    if body.startswith(("[{", "[ {", "{")) or body == "[]":
        calls = _json(body)
        made = [_call(call) for call in (calls if isinstance(calls, list) else [calls])]
        return [call if re.fullmatch(r"[A-Za-z0-9]{9}", call.id) else replace(call, id="") for call in made]
    match = re.fullmatch(r"([\w.:-]+)\s*(?:\[CALL_ID\]([A-Za-z0-9]{9}))?\s*(?:\[ARGS\])?\s*(\{.*\})?", body, re.DOTALL)
    if match is None:
        raise ValueError("expected name[ARGS]{...}")
    return [ToolCall(match[1], _arguments(match[3]), id=match[2] or "")]


def _llama(body: str, _: Schemas) -> list[ToolCall]:
    """{"name": ..., "parameters": {...}}, several after each other; or [name(key=value), ...] in Python's syntax."""
    body = body.strip()
    if not body.startswith("{") and not re.match(r"\[\s*\{", body):
        return _pythonic(body)
    calls, decoder = list[Any](), json.JSONDecoder(strict=False)
    while body:
        try:
            value, end = decoder.raw_decode(body)
        except ValueError as error:
            raise ValueError(f"the call is not JSON: {error}") from None
        calls += value if isinstance(value, list) else [value]
        body = body[end:].lstrip("; \n\t")
    return [_call(call, "parameters") for call in calls]


def _pythonic(body: str) -> list[ToolCall]:
    try:
        tree = ast.parse(body, mode="eval").body
    except (SyntaxError, MemoryError) as error:
        raise ValueError(f"the call is not Python: {error}") from None
    calls = []
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
            raise ValueError("expected [name(key=value), ...]")
        arguments = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
        calls.append(ToolCall(ast.unparse(node.func).removesuffix(".call"), arguments))
    return calls


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_literal(key): _literal(value) for key, value in zip(keys, values, strict=True) if key is not None}
    return ast.literal_eval(node)


def _deepseek(body: str, _: Schemas) -> list[ToolCall]:
    """name<sep>{...}, and before version 3.1 type<sep>name, then {...} as a block of code."""
    head, _sep, rest = body.partition("<｜tool▁sep｜>")
    if (old := re.fullmatch(r"(\S+)\s*```json\s*(.*?)\s*```", rest.strip(), re.DOTALL)) is not None:
        head, rest = old.groups()
    return [ToolCall(_name(head), _arguments(_json(rest)))]


def _kimi(body: str, _: Schemas) -> list[ToolCall]:
    """functions.name:0<arguments>{...}: the head is the call's id, too."""
    head, sep, rest = body.partition("<|tool_call_argument_begin|>")
    if not sep:
        raise ValueError("expected functions.name:0<|tool_call_argument_begin|>{...}")
    name = head.strip().rpartition(":")[0] or head.strip()
    return [ToolCall(_name(name.removeprefix("functions.")), _arguments(_json(rest)), id=head.strip())]


def _name(text: str) -> str:
    if not re.fullmatch(r"[\w.:-]+", text := text.strip()):
        raise ValueError(f"{text!r} is not the name of a tool")
    return text


# ---- tags, whose values have no types -------------------------------------------------------------------------------


def _qwen3_coder(body: str, tools: Schemas) -> list[ToolCall]:
    """<function=name><parameter=key>value</parameter></function>"""
    calls = []
    for name, inside in re.findall(r"<function=([^>]*)>(.*?)(?:</function>|\Z)", body, re.DOTALL):
        pairs = re.findall(r"<parameter=([^>]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", inside, re.DOTALL)
        calls.append(_tagged(name, [(key, re.sub(r"\A\n|\n\Z", "", value)) for key, value in pairs], tools))
    if not calls:
        raise ValueError("expected <function=name>...</function>")
    return calls


def _glm(body: str, tools: Schemas) -> list[ToolCall]:
    """name<arg_key>key</arg_key><arg_value>value</arg_value>"""
    name, pairs = body.partition("<arg_key>")[0], []
    if name != body:
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
        if len(pairs) != body.count("<arg_key>"):
            raise ValueError("expected <arg_key>key</arg_key><arg_value>value</arg_value>")
    return [_tagged(name, [(key.strip(), value) for key, value in pairs], tools)]


def _invoked(body: str, tools: Schemas) -> list[ToolCall]:
    """<invoke name="f"><parameter name="key">value</parameter></invoke>, of MiniMax and of DeepSeek V3.2."""
    body, calls = body.replace("｜DSML｜", ""), []
    for name, inside in re.findall(r'<invoke name="?([^">]*)"?>(.*?)</invoke>', body, re.DOTALL):
        pattern = r'<parameter name="?([^">]*)"?(?: string="(?:true|false)")?>(.*?)</parameter>'
        calls.append(_tagged(name, re.findall(pattern, inside, re.DOTALL), tools))
    if not calls:
        raise ValueError('expected <invoke name="...">...</invoke>')
    return calls


def _tagged(name: str, pairs: Sequence[tuple[str, str]], tools: Schemas) -> ToolCall:
    """Values have the types of the tool's schema. Without one, what is JSON is read as JSON."""
    name = _name(name)
    functions = [tool.get("function") or tool for tool in tools]
    schema = next((function for function in functions if function.get("name") == name), {})
    properties = (schema.get("parameters") or {}).get("properties") or {}
    return ToolCall(name, {key: _typed(value, properties.get(key)) for key, value in pairs})


def _typed(value: str, schema: Any) -> Any:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return CONSTANTS.get(value.strip(), value)


# ---- harmony --------------------------------------------------------------------------------------------------------


def _harmony(row: ToolFormat, text: str, tools: Schemas | None) -> AssistantTurn:
    """Messages of one turn: `analysis` is thought; what has a recipient is a call; the rest is for the user.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f ...<|message|>{...}
    """
    if "<|message|>" not in text:
        return AssistantTurn("", text)
    thoughts, said, calls = list[str](), list[str](), list[ToolCall]()
    for part in re.split(r"<\|end\|>|<\|call\|>|<\|return\|>", text):
        header, sep, body = part.partition("<|message|>")
        recipient = re.search(r"\bto=([^\s<]+)", header)
        if not sep:
            said.append(part)
        elif recipient is not None and tools is not None:
            try:
                calls.append(ToolCall(_name(recipient[1].removeprefix("functions.")), _arguments(_json(body))))
            except ValueError as error:
                calls.append(ToolCall("", error=str(error)))
                said.append(part)
        elif recipient is not None:
            said.append(part)
        else:
            (thoughts if "<|channel|>analysis" in header else said).append(body)
    return AssistantTurn(_joined(thoughts), _joined(said), tuple(calls))


def _whole_messages(text: str) -> str:
    """Without a last message that is a call, or may become one."""
    *before, last = re.split(r"(<\|end\|>|<\|call\|>|<\|return\|>)", text)
    header, sep, body = last.partition("<|message|>")
    rest = "" if not sep or re.search(r"\bto=", header) else header + sep + body.rstrip()
    whole = "".join([*before, rest])
    return whole if "<|message|>" in whole else ""


def _joined(parts: Sequence[str]) -> str:
    return "\n".join(part.strip() for part in parts if part.strip())


def _no_calls(body: str, _: Schemas) -> list[ToolCall]:
    raise ValueError("no call")


# ---- the table ------------------------------------------------------------------------------------------------------


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


TAGGED = _pattern(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)")
# a whole turn that begins as a call; other JSON and lists are answers
BARE_LLAMA = (
    r'\A\s*(\[?\s*\{\s*"(?:name|type)"\s*:(?=.*"(?:parameters|arguments)"\s*:).*'
    r"|\[\s*[A-Za-z_][\w.]*\(.*\)\s*\])\s*\Z"
)
HERMES = ToolFormat("hermes", (("<tool_call>",),), TAGGED, _hermes, openers=("<tool_call>",))
FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        "harmony",
        (("<|channel|>", "<|message|>"),),
        _pattern(r"(?!)()"),
        _no_calls,
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        reader=_harmony,
        partial=_whole_messages,
    ),
    ToolFormat(
        "kimi",
        (("<|tool_call_argument_begin|>",), ("<|im_middle|>",)),
        _pattern(
            r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>(.*?)(?:<\|tool_call_end\|>|\Z)"
            r"(?:\s*<\|tool_calls_section_end\|>)?"
        ),
        _kimi,
        (
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>", *THINK),
        ),
        openers=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ),
    ToolFormat(
        "deepseek_v32",
        (("｜DSML｜",),),
        _pattern(r"<｜DSML｜(?:function|tool)_calls>(.*?)(?:</｜DSML｜(?:function|tool)_calls>|\Z)"),
        _invoked,
        ("｜DSML｜", *THINK),
        openers=("<｜DSML｜",),
    ),
    ToolFormat(
        "deepseek",
        (("<｜tool▁sep｜>",), ("<｜Assistant｜>",)),
        _pattern(
            r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)"
            r"(?:\s*<｜tool▁calls▁end｜>)?"
        ),
        _deepseek,
        (
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", *THINK),
        ),
        openers=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    ),
    ToolFormat(
        "minimax",
        (("<minimax:tool_call>",),),
        _pattern(r"<minimax:tool_call>(.*?)(?:</minimax:tool_call>|\Z)"),
        _invoked,
        ("<minimax:tool_call>", "</minimax:tool_call>", *THINK),
        openers=("<minimax:tool_call>",),
    ),
    ToolFormat(
        "glm",
        (("<arg_key>",),),
        TAGGED,
        _glm,
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *THINK),
        openers=("<tool_call>",),
    ),
    ToolFormat(
        "qwen3_coder",
        (("<function=", "<parameter="),),
        _pattern(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)|(<function=.*?(?:</function>|\Z))"),
        _qwen3_coder,
        ("<tool_call>", "</tool_call>", *THINK),
        openers=("<tool_call>", "<function="),
    ),
    HERMES,
    ToolFormat(
        "mistral",
        (("[TOOL_CALLS]",),),
        _pattern(r"\[TOOL_CALLS\]\s*(.*?)\s*(?=\[TOOL_CALLS\]|\Z)"),
        _mistral,
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        thought=("[THINK]", "[/THINK]"),
        openers=("[TOOL_CALLS]",),
    ),
    ToolFormat(
        "llama4",
        (("<|header_start|>",),),
        _pattern(
            r"<\|python_start\|>\s*(.*?)\s*(?:<\|python_end\|>|\Z)"
            r"|" + BARE_LLAMA
        ),
        _llama,
        ("<|python_start|>", "<|python_end|>"),
        openers=("<|python_start|>",),
        bare=True,
    ),
    ToolFormat(
        "llama3",
        (("<|start_header_id|>",),),
        _pattern(r"<\|python_tag\|>\s*(.*?)\s*\Z|" + BARE_LLAMA),
        _llama,
        ("<|python_tag|>",),
        openers=("<|python_tag|>",),
        bare=True,
    ),
)
BY_NAME = {row.name: row for row in FORMATS}


def format_of(template: str | Mapping[str, str] | None, override: str = "auto") -> ToolFormat:
    """The format of a chat template. Without marks of a family, calls are those of Hermes."""
    if override != "auto":
        return BY_NAME[override]
    text = template if isinstance(template, str) else "\n".join((template or {}).values())
    return next((row for row in FORMATS if row.is_in(text)), HERMES)
