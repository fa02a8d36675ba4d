"""OpenAI's Responses API. Pure.

The items of an input that the policy made one after another (reasoning, message, function calls) are one turn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
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
    arguments_of,
    conversation,
    image,
    joined,
    merged,
)

READER = Reader(
    sampling={"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_output_tokens": "max_tokens"},
    own=("input", "instructions", "model", "tools", "stream", "previous_response_id", "store", "include", "text"),
    ignored=(
        *("reasoning", "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options"),
        *("prompt_cache_retention", "parallel_tool_calls", "max_tool_calls", "top_logprobs", "client_metadata"),
    ),
    neutral={"tool_choice": ("auto", "none"), "truncation": ("disabled",), "background": (False,)},
)
LOGPROBS = "message.output_text.logprobs"


def read(body: Body) -> Ask:
    form = (body.get("text") or {}).get("format") or {"type": "text"}
    if form != {"type": "text"}:
        raise BadRequest(f"text.format: got {json.dumps(form)}; only {json.dumps({'type': 'text'})} is supported")
    given, instructions = body.get("input"), body.get("instructions")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
        raise BadRequest("input: expected a text, or a list of items")
    messages, previous = merged(list(map(_message, given))), body.get("previous_response_id")
    return Ask(
        messages=conversation(messages) if previous is None else messages,
        instructions=[{"role": "system", "content": str(instructions)}] if instructions else (),
        tools=None if body.get("tool_choice") == "none" else [*map(_tool, body.get("tools") or ())] or None,
        params=READER.params(body),
        model=str(body.get("model") or "policy"),
        stream=bool(body.get("stream")),
        logprobs=LOGPROBS in (body.get("include") or ()),
        previous=previous,
        keep=body.get("store") is not False,
    )


def _tool(tool: Any) -> Body:
    match tool:
        case {"type": "function", "name": str(name)}:
            function = {key: tool[key] for key in ("description", "parameters") if tool.get(key) is not None}
            return {"type": "function", "function": {"name": name, **function}}
    raise BadRequest(f"tools: got {json.dumps(tool)[:80]}; only tools of type function are supported")


def _message(item: Message) -> Message:
    match item:
        case {"type": "function_call", "call_id": id, "name": name}:
            function = {"name": name, "arguments": arguments_of(item.get("arguments") or "{}")}
            return {"role": "assistant", "tool_calls": [{"id": id, "type": "function", "function": function}]}
        case {"type": "function_call_output", "call_id": id, "output": output}:
            return {"role": "tool", "tool_call_id": id, "content": _content(output)}
        case {"type": "reasoning"}:
            parts = item.get("content") or item.get("summary") or ()
            return {"role": "assistant", "reasoning_content": "".join(str(part.get("text", "")) for part in parts)}
        case {"role": str(role), "content": content} if item.get("type", "message") == "message":
            return {"role": role, "content": _content(content)}
    raise BadRequest(
        f"input: got an item {json.dumps(item)[:80]}; only message, function_call, function_call_output and reasoning "
        "are supported"
    )


def _content(content: Any) -> str | list[Message]:
    return joined([_part(part) for part in content]) if isinstance(content, list) else str(content)


def _part(part: Any) -> Message:
    match part:
        case {"type": "input_text" | "output_text" | "text" | "refusal"}:
            return {"type": "text", "text": str(part.get("text") or part.get("refusal") or "")}
        case {"type": "input_image", "image_url": url}:
            return image(url)
    raise BadRequest("input: a part of a content is neither input_text nor input_image; only these are supported")


def answer(turn: Turn, body: Body) -> Body:
    return _response(turn, body, "incomplete" if turn.finish == "length" else "completed", _items(turn))


def _response(turn: Turn, body: Body, status: str, output: list[Body]) -> Body:
    made, is_done = turn.num_tokens, status != "in_progress"
    given = (
        "instructions",
        "metadata",
        "max_output_tokens",
        "previous_response_id",
        "reasoning",
        "temperature",
        "top_p",
    )
    usage = {
        "input_tokens": turn.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": turn.prompt_tokens + made,
    }
    return {
        **{name: body.get(name) for name in given},
        "id": turn.name,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": turn.model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": usage if is_done else None,
    }


def _items(turn: Turn) -> list[Body]:
    """What the policy made, in order."""
    items = list[Body]()
    if turn.reasoning:
        part = {"type": "reasoning_text", "text": turn.reasoning}
        items.append({"type": "reasoning", "summary": [], "content": [part]})
    if turn.content or not turn.calls:
        logprobs = [{"token": t, "logprob": p, "bytes": [], "top_logprobs": []} for t, p in turn.logprobs]
        text = {"type": "output_text", "text": turn.content, "annotations": [], "logprobs": logprobs}
        items.append({"type": "message", "role": "assistant", "content": [text]})
    for call in turn.calls:
        items.append({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.json})
    return [{**item, "id": _id(turn, i), "status": "completed"} for i, item in enumerate(items)]


def _id(turn: Turn, index: int) -> str:
    return f"{turn.name}i{index}"


class ResponseStream:
    """Implements form.Stream. An item is added, filled by deltas, and done, before the next one."""

    def __init__(self, body: Body) -> None:
        self._body, self._number, self._index = body, -1, -1
        self._head = Turn("", "")
        self._part, self._text = "", ""  # of the item that is being filled

    def begin(self, head: Turn) -> Iterator[Event]:
        self._head = head
        for name in ("created", "in_progress"):
            yield self._event(name, response=_response(head, self._body, "in_progress", []))

    def delta(self, part: str, text: str) -> Iterator[Event]:
        if part != self._part:
            yield from self._close()
            yield from self._open(part)
        self._text += text
        yield self._event(f"{_kind(part)}.delta", **self._place(), delta=text, **_no_logprobs(part))

    def end(self, turn: Turn) -> Iterator[Event]:
        if not (self._part or turn.calls):  # a turn without any text
            yield from self._open("content")
        items = _items(turn)
        yield from self._close(items)
        for index in range(self._index + 1, len(items)):
            self._index, item = index, items[index]
            filled = {"item_id": item["id"], "output_index": index}
            started = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("output_item.added", output_index=index, item=started)
            arguments, delta = "function_call_arguments", item["arguments"]
            yield self._event(f"{arguments}.delta", **filled, delta=delta)
            yield self._event(f"{arguments}.done", **filled, arguments=delta, name=item["name"])
            yield self._event("output_item.done", output_index=index, item=item)
        response = answer(turn, self._body)
        yield self._event(response["status"], response=response)

    def _open(self, part: str) -> Iterator[Event]:
        self._part, self._text, self._index = part, "", self._index + 1
        yield self._event("output_item.added", output_index=self._index, item=self._item("in_progress", ()))
        yield self._event("content_part.added", **self._place(), part=_filled(part, ""))

    def _close(self, items: Iterable[Body] = ()) -> Iterator[Event]:
        if not self._part:
            return
        own = next((item for item in items if item["id"] == _id(self._head, self._index)), None)
        item = own or self._item("completed", [_filled(self._part, self._text)])
        place, part = self._place(), item["content"][0]
        yield self._event(f"{_kind(self._part)}.done", **place, text=part["text"], **_no_logprobs(self._part))
        yield self._event("content_part.done", **place, part=part)
        yield self._event("output_item.done", output_index=self._index, item=item)

    def _item(self, status: str, content: Iterable[Body]) -> Body:
        is_message = self._part == "content"
        kind = {"type": "message", "role": "assistant"} if is_message else {"type": "reasoning", "summary": []}
        return {**kind, "id": _id(self._head, self._index), "status": status, "content": list(content)}

    def _place(self) -> Body:
        return {"item_id": _id(self._head, self._index), "output_index": self._index, "content_index": 0}

    def _event(self, event: str, **data: Any) -> Event:
        self._number += 1
        return f"response.{event}", {"type": f"response.{event}", "sequence_number": self._number, **data}


def _kind(part: str) -> str:
    return "output_text" if part == "content" else "reasoning_text"


def _filled(part: str, text: str) -> Body:
    return {"type": _kind(part), "text": text, **({"annotations": [], "logprobs": []} if part == "content" else {})}


def _no_logprobs(part: str) -> Body:
    return {"logprobs": []} if part == "content" else {}


ROUTES = {"responses": Route(read, answer, ResponseStream)}
