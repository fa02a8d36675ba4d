"""One form of requests and turns for all dialects of the endpoint, and what the dialects share. Pure.

    body ──read of a dialect──> Ask ──Session──> Turn ──answer of the same dialect──> body
                                         └── parts of the text ──Stream of the same dialect──> server-sent events

Messages are those of chat templates: `role`, `content` (a text, or parts of text and images), `tool_calls` with
arguments as objects, `reasoning_content`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gcore.types import Message, UserError
from gcore.workflows.tool_formats import AssistantTurn

Body = dict[str, Any]
Event = tuple[str, Body]  # name and data of a server-sent event; "": without a name


class BadRequest(UserError):
    """Answered with status 400. `code`: for agents that handle some errors, such as context_length_exceeded."""

    def __init__(self, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Ask:
    """What an agent asks for. Ask(messages=[{"role": "user", "content": "27+58="}], params={"temperature": 0.7})"""

    messages: Sequence[Message] = ()
    text: str | None = None  # instead of messages: continue it as it is
    tools: Sequence[Mapping[str, Any]] | None = None  # as {"type": "function", "function": {"name": ...}}
    params: Mapping[str, Any] = field(default_factory=dict)  # of ctx.generate
    model: str = "policy"
    stream: bool = False
    logprobs: bool = False
    instructions: Sequence[Message] = ()  # before all messages, of this request alone
    previous: str | None = None  # name of the turn that `messages` follow
    keep: bool = False  # later requests may refer to this turn


@dataclass(frozen=True, slots=True)
class Call:
    """Call("c00000001", "add", {"a": 27, "b": 58})"""

    id: str
    name: str
    arguments: Mapping[str, Any]

    @property
    def json(self) -> str:
        return json.dumps(self.arguments)


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of the policy. Turn("p7s0r1", "policy", content="85", finish="stop", prompt_tokens=9)"""

    name: str
    model: str
    content: str = ""
    reasoning: str = ""
    calls: Sequence[Call] = ()
    finish: str = "stop"
    prompt_tokens: int = 0
    num_tokens: int = 0
    logprobs: Sequence[tuple[str, float]] = ()  # token, logprob; if the request wants them

    @property
    def message(self) -> Message:
        """For the chat template, in later turns."""
        functions = {call.id: {"name": call.name, "arguments": call.json} for call in self.calls}
        calls = [{"id": id, "type": "function", "function": function} for id, function in functions.items()]
        return {
            "role": "assistant",
            "content": self.content,
            **({"reasoning_content": self.reasoning} if self.reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
        }


class Stream(Protocol):
    """The events of one turn. Each method is called in this order; `delta` any number of times, reasoning first."""

    def begin(self, head: Turn) -> Iterable[Event]:
        """`head`: the turn without its content."""
        ...

    def delta(self, part: str, text: str) -> Iterable[Event]:
        """More of the `reasoning` or of the `content`."""
        ...

    def end(self, turn: Turn) -> Iterable[Event]: ...


@dataclass(frozen=True, slots=True)
class Route:
    """How one path is served."""

    read: Callable[[Body], Ask]
    answer: Callable[[Turn, Body], Body]
    stream: Callable[[Body], Stream] | None = None
    error: Callable[[int, str, str], Body] | None = None  # of status, message, code; None: OpenAI's form
    counts: bool = False  # only the tokens of the request: Turn.prompt_tokens


# ---- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reader:
    """Sampling parameters of a dialect. A field that would change the response and is not supported is refused; a field
    without effect here is ignored."""

    sampling: Mapping[str, str]  # field -> parameter of ctx.generate
    own: Sequence[str]  # fields that the dialect reads itself
    ignored: Sequence[str]
    neutral: Mapping[str, Sequence[Any]]  # the only values that are supported

    def params(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Fields that are null count as not given."""
        params: dict[str, Any] = {}
        for name, value in body.items():
            if value is None or name in self.own or name in self.ignored:
                continue
            if name in self.sampling:
                params[self.sampling[name]] = _sampling(name, value)
            elif name not in self.neutral:
                raise BadRequest(f"{name}: this field is not supported; remove it")
            elif value not in self.neutral[name]:
                only = json.dumps(self.neutral[name][0])
                raise BadRequest(f"{name}: got {json.dumps(value)}; only {only} is supported")
        return params


def _sampling(name: str, value: Any) -> Any:
    if name in ("stop", "stop_sequences"):
        right = isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value))
    elif name in ("temperature", "top_p"):
        right = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    else:
        right = isinstance(value, int) and not isinstance(value, bool) and value >= (name != "top_k")
    if not right:
        raise BadRequest(f"{name}: got {json.dumps(value)}, which is not a valid value")
    return value


def conversation(messages: Sequence[Message]) -> list[Message]:
    """Checked: it ends before a turn of the policy. Developers write system messages."""
    if messages[-1]["role"] == "assistant":
        raise BadRequest("messages: the last one is the assistant's; expected one of the user or of a tool")
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def merged(messages: Sequence[Message]) -> list[Message]:
    """Neighbouring messages of the assistant are one turn."""
    found = list[Message]()
    for message in messages:
        last = found[-1] if found else {}
        if not message["role"] == last.get("role") == "assistant":
            found.append({"content": "", **message})
            continue
        texts = [last["content"], message.get("content", "")]
        if not all(isinstance(text, str) for text in texts):
            raise BadRequest("an image in a message of the assistant; expected text")
        together = {**last, "content": "".join(texts)}
        for name, empty in (("reasoning_content", ""), ("tool_calls", [])):
            if whole := last.get(name, empty) + message.get(name, empty):
                together[name] = whole
        found[-1] = together
    return found


def joined(parts: Sequence[Message]) -> str | list[Message]:
    """The content of a message: a text, if no part is an image."""
    if any(part["type"] == "image" for part in parts):
        return list(parts)
    return "".join(part["text"] for part in parts)


def image(url: Any) -> Message:
    if not isinstance(url, str) or not re.match(r"data:image/[\w.+-]+;base64,", url):
        got = json.dumps(url)[:60]
        raise BadRequest(f"an image at {got}; expected a URL data:image/...;base64,... because nothing is downloaded")
    return {"type": "image", "url": url}


def arguments_of(value: Any) -> Any:
    """Chat templates expect an object; most dialects have it as a string of JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def identity(message: Message) -> str:
    """Equal for a message and its copy that comes back from an agent's library, which may drop or add other fields.
    Thoughts are among them: most agents do not send them back."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(_shown(part) for part in content)
    calls = [
        [call["function"].get("name"), arguments_of(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    is_ours = message["role"] == "assistant"
    return json.dumps([message["role"], content.strip() if is_ours else content, calls], sort_keys=True)


def _shown(part: Message) -> str:
    return str(part["text"]) if "text" in part else hashlib.blake2b(part["url"].encode()).hexdigest()


# ---- turns ----------------------------------------------------------------------------------------------------------


def calls_of(turn: AssistantTurn, number: int) -> list[Call]:
    """The tool calls of a turn. `number`: of the turn, for the ids of calls without one: 9 letters and digits, as some
    chat templates demand."""
    found = dict[str, Call]()
    for i, call in enumerate(turn.parsed):
        id = call.id if call.id and call.id not in found else f"c{number:04d}{i:04d}"
        found[id] = Call(id, call.name, call.arguments)
    return list(found.values())


class Deltas:
    """From the growing text of a turn to the events of a dialect."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._sent = {"reasoning": "", "content": ""}
        self.begun = False

    def so_far(self, turn: Turn) -> Iterator[Event]:
        if not self.begun:
            self.begun = True
            yield from self._stream.begin(turn)
        yield from self._more(turn.reasoning, turn.content)

    def end(self, turn: Turn) -> Iterator[Event]:
        if not self.begun:
            yield from self._stream.begin(turn)
        yield from self._more(turn.reasoning, turn.content)
        yield from self._stream.end(turn)

    def _more(self, reasoning: str, content: str) -> Iterator[Event]:
        for part, whole in (("reasoning", reasoning), ("content", content)):
            sent = self._sent[part]
            if len(whole) > len(sent) and whole.startswith(sent):
                self._sent[part] = whole
                yield from self._stream.delta(part, whole[len(sent) :])


def encoded(events: Iterable[Event]) -> bytes:
    lines = []
    for name, data in events:
        head = f"event: {name}\n" if name else ""
        lines.append(f"{head}data: {json.dumps(data) if data else '[DONE]'}\n\n")
    return "".join(lines).encode()
