"""An OpenAI-compatible endpoint of the policy, for agents that only know HTTP: `ctx.serve(prompt)` of a workflow.

    workflow ──base_url, api_key──> agent ──POST BASE_URL/chat/completions──> Session ──> engines of the policy
                                                                                 └── records tokens and logprobs
    workflow <── session.rollout

A session is one sample: its identity is in its address. Requests that continue a conversation continue from the
recorded tokens: what the policy sampled is never tokenised again. A history that the agent or the chat template
rewrites, a summary, a sub-agent and a parallel branch are conversations of their own, and segments of the session's one
trajectory (`session.rollout`): each sampled token is trained once, in the context that it was sampled in. The server
runs in the controller, listens on the loopback interface only, while sessions are open, and asks for a token that is
made for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from gcore.content.text import PromptTooLong, RewritesHistory, TextModality
from gcore.generation.noise import noise_key
from gcore.types import Message, Prompt, Rollout, UserError
from gcore.workflows.openai_format import (
    BadRequest,
    Body,
    Turn,
    assistant_message,
    chat_response,
    checked_messages,
    events,
    identity,
    sampling_params,
    text_response,
)

if TYPE_CHECKING:
    from gcore.workflows.context import SampleContext

HOST = "127.0.0.1"
MAX_BODY = 32 * 2**20  # bytes
TOO_LONG = "context_length_exceeded"
ROUTES = "POST chat/completions, POST completions or GET models, at session.base_url"
MODELS = {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "gcore"}]}


@dataclasses.dataclass(slots=True)
class Node:
    """A conversation after a turn of the policy. `said`: the messages, or the text, up to the end of the turn."""

    said: tuple[str, ...] | str
    tools: str
    rollout: Rollout
    before: Node | None = None  # the turn that this one continues
    taken: set[int] = dataclasses.field(default_factory=set)  # numbers of its continuations, also of those under way

    def begins(self, said: tuple[str, ...] | str, tools: str) -> bool:
        """Whether the request continues it."""
        length = len(self.said)
        return (
            type(said) is type(self.said) and tools == self.tools and length < len(said) and said[:length] == self.said
        )


class Session:
    """One sample of the policy. `base_url` and `api_key` are for the agent's client, such as OpenAI(...)."""

    def __init__(self, context: SampleContext, modality: TextModality, prompt: Prompt, sibling: int) -> None:
        self._context, self._modality, self.prompt, self.sibling = context, modality, prompt, sibling
        self.base_url = self.api_key = ""  # set by Endpoint.open
        self.model = "policy"
        self.failure: Exception | None = None  # of G-Core: the workflow cannot continue
        self._nodes: list[Node] = []
        self._begun: set[int] = set()  # sibling numbers of its conversations
        self._max_tokens = modality.params({}, greedy=False).max_tokens
        self._requests = itertools.count()

    @property
    def rollouts(self) -> list[Rollout]:
        """The conversations, in the order of their last turns, for workflows that train each as a sample of its own:
        turns that several begin with are then trained in each of them."""
        return [node.rollout for node in self._nodes if not node.taken]

    @property
    def rollout(self) -> Rollout:
        """The whole trajectory. The conversation that ended last is its first segment, which rewards score."""
        ends = [node for node in reversed(self._nodes) if not node.taken]
        if not ends:
            raise RuntimeError(f"the agent of sample {self.sibling} has ended without a response of the policy")
        trained: set[int] = set()  # turns that an earlier segment has
        segments = list[Rollout]()
        for end in ends:
            turns = [end]
            while turns[-1].before is not None:
                turns.append(turns[-1].before)
            known = next((turn.rollout.num_steps for turn in turns if id(turn) in trained), 0)
            segments.append(dataclasses.replace(end.rollout, shared=known))
            trained |= set(map(id, turns))
        return dataclasses.replace(segments[0], segments=tuple(segments[1:]))

    @property
    def client(self) -> Any:
        """An object like openai.AsyncOpenAI for code in this process: `await client.chat.completions.create(...)`."""
        chat = SimpleNamespace(completions=_client_of(self.chat))
        return SimpleNamespace(chat=chat, completions=_client_of(self.complete), base_url=self.base_url)

    async def chat(self, body: Body) -> Body:
        """POST chat/completions."""
        params, messages, tools = self._params(body), checked_messages(body), body.get("tools") or None
        said = tuple(map(identity, messages))
        rollout, before = await self._next_turn(said, messages, tools, params)
        turn = self._turn(rollout)
        message = assistant_message(turn.text, tools is not None, len(self._nodes))
        self._nodes.append(Node((*said, identity(message)), json.dumps(tools, sort_keys=True), rollout, before))
        return chat_response(self._name(), turn, message, body)

    async def complete(self, body: Body) -> Body:
        """POST completions: the prompt is used as it is, without the chat template."""
        params, text = self._params(body), body.get("prompt")
        if isinstance(text, list) and len(text) == 1:
            text = text[0]
        if not isinstance(text, str) or not text:
            raise BadRequest("prompt: expected one string")
        rollout, before = await self._next_turn(text, text, None, params)
        turn = self._turn(rollout)
        self._nodes.append(Node(text + turn.text, json.dumps(None), rollout, before))
        return text_response(self._name(), turn, body)

    def _params(self, body: Body) -> dict[str, Any]:
        return {"max_tokens": self._max_tokens, **sampling_params(body)}

    def _name(self) -> str:
        return f"p{self.prompt.id}s{self.sibling}r{next(self._requests)}"

    async def _next_turn(
        self, said: tuple[str, ...] | str, whole: str | Sequence[Message], tools: Any, params: dict[str, Any]
    ) -> tuple[Rollout, Node | None]:
        """Of the longest conversation that the request continues (of equal ones, the one that was continued least), or
        of a new one. Also the turn that it continues. `whole`: all messages, or the text, of the request."""
        described = json.dumps(tools, sort_keys=True)
        continued = [node for node in self._nodes if node.begins(said, described)]
        if continued:
            node = max(continued, key=lambda node: (len(node.said), -len(node.taken)))
            if isinstance(whole, str) or not self._is_rewritten(node, whole):
                with contextlib.suppress(RewritesHistory):
                    return await self._continue(node, whole[len(node.said) :], params), node
            # Else the messages, as the chat template writes them now, are the context of another conversation.
        # By its messages: the noise of conversations that begin in parallel does not depend on which one is first.
        begun = noise_key(json.dumps([said, described]))
        others = (noise_key("conversation", self.sibling, begun, i) >> 16 for i in itertools.count())
        sibling = next(s for s in itertools.chain([self.sibling], others) if s not in self._begun)
        self._begun.add(sibling)
        try:
            content = self._modality.opening(whole, tools, has_history=bool(self._nodes))
            room = self._max_tokens - self._modality.excess(content)
            params = {**params, "max_tokens": min(params["max_tokens"], room)}
            (rollout,) = await self._context.first_turn(self.prompt, [sibling], content, params)
        except BaseException as error:
            self._begun.discard(sibling)
            if isinstance(error, PromptTooLong):
                raise BadRequest(str(error), TOO_LONG) from None
            raise
        return rollout, None

    def _is_rewritten(self, end: Node, messages: Sequence[Message]) -> bool:
        """By the chat template, with the turns as the policy said them."""
        history, turn = list(messages[: len(end.said)]), end
        while True:
            history[len(turn.said) - 1] = {"role": "assistant", "content": str(turn.rollout.turn)}
            if turn.before is None:
                return self._modality.rewrites(history, messages[len(end.said) :])
            turn = turn.before

    async def _continue(self, node: Node, feedback: str | Sequence[Message], params: dict[str, Any]) -> Rollout:
        start, number = node.rollout, next(i for i in itertools.count() if i not in node.taken)
        sibling = start.sibling
        if number:  # another continuation of the same turn: a sample of its own
            sibling = noise_key("fork", start.sibling, start.num_steps, number) >> 16
        node.taken.add(number)
        try:
            excess = self._modality.excess(start.content)
            (rollout,) = await self._context.next_turns(start, [sibling], feedback, params, excess)
            if rollout.num_steps == start.num_steps:
                node.rollout = dataclasses.replace(start, finish="length")
                raise BadRequest(
                    f"the conversation has {start.num_steps} tokens after its first messages; generation."
                    "max_response_length leaves none for another turn",
                    TOO_LONG,
                )
        except BaseException:
            node.taken.discard(number)  # without others, it is still the end of its conversation
            raise
        return rollout

    def _turn(self, rollout: Rollout) -> Turn:
        steps = rollout.num_steps
        own = next((i for i in range(steps) if not rollout.mask_S[steps - 1 - i]), steps)  # of the last turn
        texts = self._modality.step_texts(rollout.content)[steps - own :]
        logprobs = [(text, float(p)) for text, p in zip(texts, rollout.logprobs_S[steps - own :], strict=True)]
        return Turn(str(rollout.turn), rollout.finish, rollout.content.size - own, logprobs)


class Endpoint:
    """The server of one controller. It runs while at least one session is open."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._token = ""
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def open(self, sessions: Sequence[Session]) -> AsyncIterator[None]:
        names = [f"p{s.prompt.id}-s{s.sibling}-{secrets.token_hex(4)}" for s in sessions]
        try:
            async with self._lock:
                self._sessions |= dict(zip(names, sessions, strict=True))
                if self._runner is None:
                    await self._start()
            for name, session in zip(names, sessions, strict=True):
                session.base_url, session.api_key = f"http://{HOST}:{self._port}/{name}/v1", self._token
            yield
        except Exception as error:
            for session in sessions:
                if session.failure is not None:  # what the agent raised is a consequence of it
                    raise session.failure from error
            raise
        finally:
            for name in names:
                self._sessions.pop(name, None)
            async with self._lock:
                if not self._sessions and self._runner is not None:
                    runner, self._runner = self._runner, None
                    await runner.cleanup()
        for session in sessions:
            if session.failure is not None:
                raise session.failure

    async def _start(self) -> None:
        self._token = secrets.token_urlsafe(24)
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/{session}/v1/chat/completions", self._serve(Session.chat))
        app.router.add_post("/{session}/v1/completions", self._serve(Session.complete))
        app.router.add_get("/{session}/v1/models", self._models)
        app.router.add_route("*", "/{rest:.*}", self._unsupported)
        # a request that its client gave up is cancelled
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        try:
            await runner.setup()
            await web.TCPSite(runner, HOST, 0).start()
        except BaseException:  # also if the workflow is cancelled: the next one starts it again
            await runner.cleanup()
            raise
        self._runner, self._port = runner, runner.addresses[0][1]

    def _session(self, request: web.Request) -> Session | web.Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not secrets.compare_digest(given.encode(), self._token.encode()):
            return _error(401, "the token (api_key) does not belong to this base_url", "invalid_api_key")
        session = self._sessions.get(request.match_info["session"])
        return session or _error(404, "no such session: its workflow has ended", "session_not_found")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        return session if isinstance(session, web.Response) else web.json_response(MODELS)

    async def _unsupported(self, request: web.Request) -> web.Response:
        path = request.path.partition("/v1/")[2] or request.path
        return _error(404, f"{request.method} {path} is not supported; expected {ROUTES}", "unsupported_route")

    def _serve(self, method: Callable[[Session, Body], Any]) -> Callable[[web.Request], Any]:
        async def handler(request: web.Request) -> web.StreamResponse:
            session = self._session(request)
            if isinstance(session, web.Response):
                return session
            try:
                body = await request.json()
                if not isinstance(body, dict):
                    raise BadRequest("expected a JSON object")
                response = await method(session, body)
            except UserError as error:
                return _error(400, str(error), getattr(error, "code", "invalid_request_error"))
            except ValueError as error:
                return _error(400, f"the body is not valid: {error}", "invalid_request_error")
            except Exception as error:  # an engine died, or an error in G-Core: the workflow raises it
                session.failure = session.failure or error
                return _error(500, f"{type(error).__name__}: {error}", "server_error")
            if not body.get("stream"):
                return web.json_response(response)
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await stream.prepare(request)
            for event in events(response, body):
                await stream.write(event)
            await stream.write_eof()
            return stream

        return handler


def _error(status: int, message: str, code: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "code": code}}, status=status)


def _client_of(method: Callable[[Body], Any]) -> SimpleNamespace:
    """`create(messages=..., ...)`: the response with attributes, as OpenAI's library returns it."""

    async def create(**body: Any) -> Any:
        extra = body.pop("extra_body", None) or {}
        return json.loads(json.dumps(await method({**body, **extra})), object_hook=Fields)

    return SimpleNamespace(create=create)


class Fields(dict[str, Any]):
    """A JSON object with attributes; fields that are missing are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return self
