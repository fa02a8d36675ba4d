"""OpenAI's format of requests and responses, for the endpoint of the policy. Pure.

    body ──sampling_params──> temperature, max_tokens, ...        Turn ──chat_response, text_response──> body
                                                                  body ──events──> server-sent events

A field that would change the response and is not supported is refused; a field without effect here is ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gcore.types import Message, UserError
from gcore.workflows.tool_formats import AssistantTurn

Body = dict[str, Any]
SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop": "stop",
}
OWN = ("messages", "prompt", "model", "tools", "stream", "stream_options", "logprobs")
IGNORED = (
    *("user", "seed", "metadata", "store", "parallel_tool_calls", "service_tier", "reasoning_effort", "top_logprobs"),
    *("prompt_cache_key", "safety_identifier", "verbosity"),
)
NEUTRAL: dict[str, tuple[Any, ...]] = {  # the only values that are supported
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "echo": (False,),
    "suffix": ("",),
}


class BadRequest(UserError):
    """Answered with status 400. `code`: for agents that handle some errors, such as context_length_exceeded."""

    def __init__(self, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of the policy. Turn("27+58=85", "stop", prompt_tokens=9, logprobs=[("8", -0.1), ("5", -0.2)])"""

    text: str
    finish: str
    prompt_tokens: int
    logprobs: Sequence[tuple[str, float]]  # token, logprob


def sampling_params(body: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters for ctx.generate. Fields that are null count as not given."""
    params: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in OWN or name in IGNORED:
            continue
        if name in SAMPLING:
            params[SAMPLING[name]] = _sampling(name, value)
        elif name not in NEUTRAL:
            raise BadRequest(f"{name}: this field is not supported; remove it")
        elif value not in NEUTRAL[name]:
            raise BadRequest(f"{name}: got {json.dumps(value)}; only {json.dumps(NEUTRAL[name][0])} is supported")
    return params


def _sampling(name: str, value: Any) -> Any:
    if name == "stop":
        right = isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value))
    elif name in ("temperature", "top_p"):
        right = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    else:
        right = isinstance(value, int) and not isinstance(value, bool) and value >= (name != "top_k")
    if not right:
        raise BadRequest(f"{name}: got {json.dumps(value)}, which is not a valid value")
    return value


def checked_messages(body: Mapping[str, Any]) -> list[Message]:
    """Messages whose content is a string; null fields are removed."""
    given = body.get("messages")
    if not isinstance(given, list) or not given or not all(isinstance(m, dict) and m.get("role") for m in given):
        raise BadRequest("messages: expected a list of messages with a role and content")
    if given[-1]["role"] == "assistant":
        raise BadRequest("messages: the last one is the assistant's; expected one of the user or of a tool")
    return [_checked(message) for message in given]


def _checked(message: Message) -> Message:
    fields = {name: value for name, value in message.items() if value is not None}
    content = fields.get("content", "")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise BadRequest("messages: a part of a content is not text; only text is supported")
        content = "".join(str(part.get("text", "")) for part in content)
    given = fields.get("tool_calls", [])
    if not isinstance(given, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in given
    ):
        raise BadRequest('messages: tool_calls: expected a list of {"function": {"name": ..., "arguments": ...}}')
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"].get("arguments"))}}
        for call in given
    ]
    return {**fields, "content": str(content), **({"tool_calls": calls} if calls else {})}


def _arguments(value: Any) -> Any:
    """Chat templates expect an object; OpenAI's format has it as a string of JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def identity(message: Message) -> str:
    """Equal for a message and its copy that comes back from an agent's library, which may drop or add other fields."""
    content = str(message.get("content") or "")
    calls = [
        [call["function"].get("name"), _arguments(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    is_ours = message["role"] == "assistant"
    return json.dumps([message["role"], content.strip() if is_ours else content, calls], sort_keys=True)


def assistant_message(turn: AssistantTurn, number: int) -> Message:
    """What the policy said. `number`: of the turn, for the ids of calls."""
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.reasoning:
        message |= {"reasoning_content": turn.reasoning}
    calls = [
        {
            "id": call.id or f"c{number:05}{i:03}",  # some templates require nine letters and digits
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for i, call in enumerate(turn.parsed)
    ]
    return {**message, "tool_calls": calls} if calls else message


def chat_response(name: str, turn: Turn, message: Message, body: Mapping[str, Any]) -> Body:
    tokens: list[Body] = [{"token": t, "logprob": p, "bytes": None, "top_logprobs": []} for t, p in turn.logprobs]
    shown = {"content": tokens}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if "tool_calls" in message else turn.finish,
        "logprobs": shown if body.get("logprobs") else None,
    }
    return _response(name, "chat.completion", turn, choice, body)


def text_response(name: str, turn: Turn, body: Mapping[str, Any]) -> Body:
    shown: Body = {"tokens": [t for t, _ in turn.logprobs], "token_logprobs": [p for _, p in turn.logprobs]}
    choice = {
        "index": 0,
        "text": turn.text,
        "finish_reason": turn.finish,
        "logprobs": shown if body.get("logprobs") is not None else None,
    }
    return _response(name, "text_completion", turn, choice, body)


def _response(name: str, kind: str, turn: Turn, choice: Body, body: Mapping[str, Any]) -> Body:
    made = len(turn.logprobs)
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": str(body.get("model") or "policy"),
        "choices": [choice],
        "usage": {
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": turn.prompt_tokens + made,
        },
    }


def events(response: Body, body: Mapping[str, Any]) -> Iterator[bytes]:
    """The response as a stream: it is complete when the stream begins."""
    (choice,) = response["choices"]
    head = {**response, "object": response["object"].removesuffix(".completion") + ".completion.chunk"}
    if response["object"] == "text_completion":
        head, deltas = response, [{**choice}]
    else:
        message = choice["message"]
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
        delta = {**message, **({"tool_calls": calls} if calls else {})}
        deltas = [
            {"index": 0, "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]},
            {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]},
        ]
    for one in deltas:
        yield _event({**head, "choices": [one], "usage": None})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield _event({**head, "choices": []})
    yield b"data: [DONE]\n\n"


def _event(value: Body) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
