"""Anthropic's Messages API, with `count_tokens`. Its client puts /v1 before the paths itself. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from gcore.types import Message
from gcore.workflows.dialects.form import (
    Ask,
    BadRequest,
    Body,
    Event,
    Reader,
    Route,
    Turn,
    conversation,
    image,
    joined,
    merged,
)

READER = Reader(
    sampling={
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "max_tokens": "max_tokens",
        "stop_sequences": "stop",
    },
    own=("messages", "system", "model", "tools", "tool_choice", "stream"),
    ignored=("metadata", "service_tier", "thinking", "output_config", "cache_control", "inference_geo"),
    neutral={},
)
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
ERRORS = {401: "authentication_error", 404: "not_found_error", 500: "api_error"}


def read(body: Body) -> Ask:
    given = body.get("messages")
    if not isinstance(given, list) or not given or not all(isinstance(m, dict) and m.get("role") for m in given):
        raise BadRequest("messages: expected a list of messages with a role and content")
    choice = (body.get("tool_choice") or {"type": "auto"}).get("type")
    if choice not in ("auto", "none"):
        raise BadRequest(f"tool_choice: got {json.dumps(choice)}; only auto and none are supported")
    system = body.get("system")
    texts = [{"role": "system", "content": _content(system)}] if system else []
    tools = [_tool(tool) for tool in body.get("tools") or ()]
    return Ask(
        messages=conversation(merged([*texts, *(one for message in given for one in _messages(message))])),
        tools=None if choice == "none" else tools or None,
        params=READER.params(body),
        model=str(body.get("model") or "policy"),
        stream=bool(body.get("stream")),
    )


def _tool(tool: Any) -> Body:
    match tool:
        case {"name": str(name), "input_schema": dict(schema)}:
            about = {"description": tool["description"]} if tool.get("description") else {}
            return {"type": "function", "function": {"name": name, **about, "parameters": schema}}
    raise BadRequest(f"tools: got {json.dumps(tool)[:80]}; only tools with a name and an input_schema are supported")


def _messages(message: Message) -> list[Message]:
    """One per result of a tool, then one of the rest."""
    role, content = message["role"], message.get("content") or ""
    if not isinstance(content, list):
        return [{"role": role, "content": str(content)}]
    found, rest, said = list[Message](), list[Body](), Message()
    for block in content:
        match block:
            case {"type": "tool_result", "tool_use_id": id}:
                found.append({"role": "tool", "tool_call_id": id, "content": _content(block.get("content") or "")})
            case {"type": "tool_use", "id": id, "name": name}:
                function = {"name": name, "arguments": block.get("input") or {}}
                said.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})
            case {"type": "thinking"}:
                said["reasoning_content"] = said.get("reasoning_content", "") + str(block.get("thinking", ""))
            case {"type": "redacted_thinking"}:
                pass
            case _:
                rest.append(_part(block))
    return [*found, {"role": role, **said, "content": joined(rest)}] if rest or said else found


def _content(content: Any) -> str | list[Message]:
    return joined([_part(block) for block in content]) if isinstance(content, list) else str(content)


def _part(block: Any) -> Message:
    match block:
        case {"type": "text", "text": text}:
            return {"type": "text", "text": str(text)}
        case {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}:
            return image(f"data:{kind};base64,{data}")
        case {"type": "image", "source": {"url": url}}:
            return image(url)
    got = block.get("type") if isinstance(block, dict) else block
    raise BadRequest(
        f"a content block of type {json.dumps(got)}; only text, image, thinking, tool_use and tool_result are supported"
    )


def answer(turn: Turn, body: Body) -> Body:
    return {**_head(turn), "content": _blocks(turn), **_stopped(turn), "usage": _usage(turn, turn.num_tokens)}


def answer_count(turn: Turn, body: Body) -> Body:
    return {"input_tokens": turn.prompt_tokens}


def _head(turn: Turn) -> Body:
    return {"id": turn.name, "type": "message", "role": "assistant", "model": turn.model}


def _blocks(turn: Turn) -> list[Body]:
    blocks = [_block("reasoning", turn.reasoning)] if turn.reasoning else []
    blocks += [_block("content", turn.content)] if turn.content or not turn.calls else []
    return blocks + [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in turn.calls]


def _block(part: str, text: str) -> Body:
    if part == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}  # thoughts are not signed
    return {"type": "text", "text": text}


def _stopped(turn: Turn) -> Body:
    reason = "tool_use" if turn.calls else STOP_REASONS.get(turn.finish, "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(turn: Turn, made: int) -> Body:
    return {
        "input_tokens": turn.prompt_tokens,
        "output_tokens": made,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def error(status: int, message: str, code: str) -> Body:
    kind = ERRORS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


class MessageStream:
    """Implements form.Stream. A block starts, gets deltas, and stops, before the next one."""

    def __init__(self, body: Body) -> None:
        self._index, self._part = -1, ""

    def begin(self, head: Turn) -> Iterator[Event]:
        message = {**_head(head), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(head, 0)}
        yield _event("message_start", message=message)

    def delta(self, part: str, text: str) -> Iterator[Event]:
        if part != self._part:
            yield from self._stop()
            yield from self._start(part)
        kind, name = ("thinking_delta", "thinking") if part == "reasoning" else ("text_delta", "text")
        yield _event("content_block_delta", index=self._index, delta={"type": kind, name: text})

    def end(self, turn: Turn) -> Iterator[Event]:
        if not (self._part or turn.calls):  # a turn without any text
            yield from self._start("content")
        yield from self._stop()
        for call in turn.calls:
            self._index += 1
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield _event("content_block_start", index=self._index, content_block=block)
            delta = {"type": "input_json_delta", "partial_json": call.json}
            yield _event("content_block_delta", index=self._index, delta=delta)
            yield _event("content_block_stop", index=self._index)
        yield _event("message_delta", delta=_stopped(turn), usage=_usage(turn, turn.num_tokens))
        yield _event("message_stop")

    def _start(self, part: str) -> Iterator[Event]:
        self._part, self._index = part, self._index + 1
        yield _event("content_block_start", index=self._index, content_block=_block(part, ""))

    def _stop(self) -> Iterator[Event]:
        if self._part:
            yield _event("content_block_stop", index=self._index)


def _event(event: str, **data: Any) -> Event:
    return event, {"type": event, **data}


ROUTES = {
    "messages": Route(read, answer, MessageStream, error),
    "messages/count_tokens": Route(read, answer_count, None, error, counts=True),
}
