"""OpenAI's Chat Completions, and Completions, which continue a text. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
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
)

READER = Reader(
    sampling={
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "max_tokens": "max_tokens",
        "max_completion_tokens": "max_tokens",
        "stop": "stop",
    },
    own=("messages", "prompt", "model", "tools", "stream", "stream_options", "logprobs"),
    ignored=(
        *("user", "seed", "metadata", "store", "parallel_tool_calls", "service_tier", "reasoning_effort"),
        *("top_logprobs", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "verbosity"),
    ),
    neutral={
        "n": (1,),
        "best_of": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto", "none"),
        "echo": (False,),
        "suffix": ("",),
    },
)


def read_chat(body: Body) -> Ask:
    return _ask(body, messages=_messages(body), tools=None if body.get("tool_choice") == "none" else body.get("tools"))


def read_text(body: Body) -> Ask:
    text = body.get("prompt")
    if isinstance(text, list) and len(text) == 1:
        text = text[0]
    if not isinstance(text, str) or not text:
        raise BadRequest("prompt: expected one string")
    return _ask(body, text=text)


def _ask(body: Body, *, tools: Any = None, **content: Any) -> Ask:
    return Ask(
        **content,
        tools=tools or None,
        params=READER.params(body),
        model=str(body.get("model") or "policy"),
        stream=bool(body.get("stream")),
        logprobs=body.get("logprobs") is not None and body["logprobs"] is not False,  # 0: no alternatives
    )


def _messages(body: Mapping[str, Any]) -> list[Message]:
    given = body.get("messages")
    if not isinstance(given, list) or not given or not all(isinstance(m, dict) and m.get("role") for m in given):
        raise BadRequest("messages: expected a list of messages with a role and content")
    return conversation([_message(message) for message in given])


def _message(message: Message) -> Message:
    """Fields that are null are removed."""
    fields = {name: value for name, value in message.items() if value is not None}
    content = fields.get("content", "")
    given = fields.get("tool_calls", [])
    if not isinstance(given, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in given
    ):
        raise BadRequest('messages: tool_calls: expected a list of {"function": {"name": ..., "arguments": ...}}')
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments_of(call["function"].get("arguments"))}}
        for call in given
    ]
    content = joined(list(map(_part, content))) if isinstance(content, list) else str(content)
    return {**fields, "content": content, **({"tool_calls": calls} if calls else {})}


def _part(part: Any) -> Message:
    match part:
        case {"type": "text" | "refusal"}:
            return {"type": "text", "text": str(part.get("text") or part.get("refusal") or "")}
        case {"type": "image_url", "image_url": {"url": url}}:
            return image(url)
    raise BadRequest("messages: a part of a content is neither text nor image_url; only these are supported")


def answer_chat(turn: Turn, body: Body) -> Body:
    message = {**turn.message, "content": turn.content}
    choice = {"index": 0, "message": message, "finish_reason": _finish(turn), "logprobs": _logprobs(turn, body)}
    return {**_head(turn, "chat.completion"), "choices": [choice], "usage": _usage(turn)}


def answer_text(turn: Turn, body: Body) -> Body:
    return {**_head(turn, "text_completion"), "choices": [_text_choice(turn, body)], "usage": _usage(turn)}


def _text_choice(turn: Turn, body: Body) -> Body:
    shown: Body = {"tokens": [t for t, _ in turn.logprobs], "token_logprobs": [p for _, p in turn.logprobs]}
    given = body.get("logprobs") is not None
    return {"index": 0, "text": turn.content, "finish_reason": turn.finish, "logprobs": shown if given else None}


def _finish(turn: Turn) -> str:
    return "tool_calls" if turn.calls else turn.finish


def _logprobs(turn: Turn, body: Body) -> Body | None:
    tokens: list[Body] = [{"token": t, "logprob": p, "bytes": None, "top_logprobs": []} for t, p in turn.logprobs]
    return {"content": tokens} if body.get("logprobs") else None


def _head(turn: Turn, kind: str) -> Body:
    return {"id": turn.name, "object": kind, "created": int(time.time()), "model": turn.model}


def _usage(turn: Turn) -> Body:
    made = turn.num_tokens
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": turn.prompt_tokens + made,
    }


class ChatStream:
    """Implements form.Stream."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._head: Body = {}

    def begin(self, head: Turn) -> Iterator[Event]:
        self._head = _head(head, "chat.completion.chunk")
        yield self._chunk({"role": "assistant", "content": ""})

    def delta(self, part: str, text: str) -> Iterator[Event]:
        yield self._chunk({"reasoning_content" if part == "reasoning" else "content": text})

    def end(self, turn: Turn) -> Iterator[Event]:
        calls = [{"index": i, **call} for i, call in enumerate(turn.message.get("tool_calls", ()))]
        if calls:
            yield self._chunk({"tool_calls": calls})
        last = self._chunk({}, _finish(turn))
        last[1]["choices"][0]["logprobs"] = _logprobs(turn, self._body)
        yield last
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield "", {**self._head, "choices": [], "usage": _usage(turn)}
        yield "", {}

    def _chunk(self, delta: Body, finish: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return "", {**self._head, "choices": [choice], "usage": None}


class TextStream:
    """Implements form.Stream."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._head: Body = {}

    def begin(self, head: Turn) -> Iterator[Event]:
        self._head = _head(head, "text_completion")
        return iter(())

    def delta(self, part: str, text: str) -> Iterator[Event]:
        choice = {"index": 0, "text": text, "finish_reason": None, "logprobs": None}
        yield "", {**self._head, "choices": [choice], "usage": None}

    def end(self, turn: Turn) -> Iterator[Event]:
        choice = {**_text_choice(turn, self._body), "text": ""}
        yield "", {**self._head, "choices": [choice], "usage": None}
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield "", {**self._head, "choices": [], "usage": _usage(turn)}
        yield "", {}


ROUTES = {
    "chat/completions": Route(read_chat, answer_chat, ChatStream),
    "completions": Route(read_text, answer_text, TextStream),
}
