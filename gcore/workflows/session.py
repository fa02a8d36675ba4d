"""A session of the endpoint: what an agent asks for in one address, and what the policy samples for it, as one sample.

    Ask ──continues a recorded turn, or begins a conversation──> context of the workflow ──> Turn
    session.rollout: the conversations, as segments of one trajectory

Requests that continue a conversation continue from the recorded tokens: what the policy sampled is never tokenised
again. A history that the agent or the chat template rewrites, a summary, a sub-agent and a parallel branch are
conversations of their own. Each sampled token is trained once, in the context that it was sampled in.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gcore.content.base import Content
from gcore.content.text import PromptTooLong, TextModality, last_turn
from gcore.generation.noise import noise_key
from gcore.types import Completion, Message, Prompt, Rollout
from gcore.workflows.dialects import ROUTES
from gcore.workflows.dialects.form import Ask, BadRequest, Body, Turn, calls_of, conversation, identity
from gcore.workflows.tool_formats import AssistantTurn

if TYPE_CHECKING:
    from gcore.workflows.context import SampleContext, Tell

TOO_LONG = "context_length_exceeded"
SoFar = Callable[[Turn], Awaitable[None]]  # the turn with as much of its content as is certain


@dataclasses.dataclass(slots=True)
class Node:
    """A conversation after a turn of the policy. `said`: the messages, or the text, up to the end of the turn."""

    said: tuple[str, ...] | str
    tools: str
    rollout: Rollout
    message: Message  # the turn
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
        self._turns: dict[str, list[Message]] = {}  # messages up to a turn, by its name, for requests that refer to it
        self._max_tokens = modality.params({}, greedy=False).max_tokens
        self._requests = itertools.count()
        self._active, self._last = 0, asyncio.get_running_loop().time()  # requests under way; when the last one ended
        self._collected = False  # by the workflow: its agent has ended

    # ---- for the workflow -----------------------------------------------------------------------------------------

    @property
    def rollouts(self) -> list[Rollout]:
        """The conversations, in the order of their last turns, for workflows that train each as a sample of its own:
        turns that several begin with are then trained in each of them."""
        self._collected = True
        return [node.rollout for node in self._nodes if not node.taken]

    @property
    def rollout(self) -> Rollout:
        """The whole trajectory. The conversation that ended last is its first segment, which rewards score."""
        self._collected = True
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
        chat = SimpleNamespace(completions=self._client_of("chat/completions"))
        return SimpleNamespace(chat=chat, completions=self._client_of("completions"), base_url=self.base_url)

    async def post(self, path: str, body: Body) -> Body:
        """The answer of a route, without HTTP."""
        route = ROUTES[path]
        return route.answer(await self.turn(route.read(body)), body)

    def _client_of(self, path: str) -> SimpleNamespace:
        """`create(messages=..., ...)`: the response with attributes, as OpenAI's library returns it."""

        async def create(**body: Any) -> Any:
            extra = body.pop("extra_body", None) or {}
            return json.loads(json.dumps(await self.post(path, {**body, **extra})), object_hook=Fields)

        return SimpleNamespace(create=create)

    # ---- requests -------------------------------------------------------------------------------------------------

    def idle_s(self) -> float:
        """Seconds without a request of the agent; 0 if the workflow has its rollout already."""
        return 0.0 if self._active or self._collected else asyncio.get_running_loop().time() - self._last

    async def turn(self, ask: Ask, so_far: SoFar | None = None) -> Turn:
        """The next turn of the policy. `so_far`: called while it is generated."""
        self._active += 1
        try:
            return await self._turn(ask, so_far)
        finally:
            self._active -= 1
            self._last = asyncio.get_running_loop().time()

    async def _turn(self, ask: Ask, so_far: SoFar | None) -> Turn:
        ask = self._whole(ask)
        said: tuple[str, ...] | str = tuple(map(identity, ask.messages)) if ask.text is None else ask.text
        head = Turn(f"p{self.prompt.id}s{self.sibling}r{next(self._requests)}", ask.model)

        async def tell(context: Content, made: Completion) -> None:
            if so_far is not None:
                (text,) = await self._modality.outputs([made.content])
                own = made.content.num_steps
                said = AssistantTurn("", text.rstrip("\ufffd"))
                if ask.text is None:
                    said = self._context.read_so_far(context.extended(made.content), own, text, ask.tools)
                shown = dataclasses.replace(head, reasoning=said.reasoning, content=said.content)
                await so_far(dataclasses.replace(shown, prompt_tokens=context.size, num_tokens=own))

        rollout, before = await self._next_turn(said, ask, tell if so_far is not None else None)
        after = rollout.mask_S[before.rollout.num_steps if before is not None else 0 :]
        own = last_turn(after)  # steps of the turn
        spoken = AssistantTurn("", str(rollout.turn))
        if ask.text is None:
            spoken = self._context.read(rollout, ask.tools)
        turn = dataclasses.replace(
            head,
            content=spoken.content,
            reasoning=spoken.reasoning,
            calls=calls_of(spoken, len(self._nodes)),
            finish=rollout.finish,
            prompt_tokens=rollout.content.size - own,
            num_tokens=own,
            logprobs=self._logprobs(rollout, own) if ask.logprobs else (),
        )
        end = (*said, identity(turn.message)) if isinstance(said, tuple) else said + turn.content
        self._nodes.append(Node(end, json.dumps(ask.tools, sort_keys=True), rollout, turn.message, before))
        if ask.keep:
            self._turns[turn.name] = [*ask.messages[len(ask.instructions) :], turn.message]
        return turn

    def count(self, ask: Ask) -> Turn:
        """A turn that has no more than the number of tokens before it."""
        ask = self._whole(ask)
        said = tuple(map(identity, ask.messages))
        node = self._continued(said, json.dumps(ask.tools, sort_keys=True))
        if node is not None and not self._is_rewritten(node, ask.messages):
            answered = self._seen(ask.messages[len(node.said) - 1 :])
            added = self._modality.between_turns(node.rollout.content, answered)
            return Turn("", ask.model, prompt_tokens=node.rollout.content.size + added.num_steps)
        content = self._modality.context(self._seen(ask.messages), ask.tools)
        return Turn("", ask.model, prompt_tokens=content.size)

    def _whole(self, ask: Ask) -> Ask:
        """With all messages before the turn."""
        if ask.previous is not None and ask.previous not in self._turns:
            raise BadRequest(f"previous_response_id: {ask.previous!r} is not a stored response of this session")
        messages = ask.messages
        if ask.previous is not None:
            messages = conversation([*self._turns[ask.previous], *messages])
        return dataclasses.replace(ask, messages=[*ask.instructions, *messages])

    def _logprobs(self, rollout: Rollout, own: int) -> list[tuple[str, float]]:
        texts = self._modality.step_texts(rollout.content)[rollout.num_steps - own :]
        logprobs = rollout.logprobs_S[rollout.num_steps - own :]
        return [(text, float(p)) for text, p in zip(texts, logprobs, strict=True)]

    def _seen(self, messages: Sequence[Message]) -> list[Message]:
        """With the pixels of their images."""
        return [
            {**message, "content": list(map(self._seen_part, content))} if isinstance(content, list) else message
            for message in messages
            for content in [message.get("content")]
        ]

    def _seen_part(self, part: Message) -> Message:
        return {"type": "image", "image": self._modality.image(part["url"])} if part["type"] == "image" else part

    # ---- conversations --------------------------------------------------------------------------------------------

    def _continued(self, said: tuple[str, ...] | str, tools: str) -> Node | None:
        """The longest conversation that the request continues; of equal ones, the one that was continued least."""
        continued = [node for node in self._nodes if node.begins(said, tools)]
        return max(continued, key=lambda node: (len(node.said), -len(node.taken)), default=None)

    async def _next_turn(self, said: tuple[str, ...] | str, ask: Ask, tell: Tell | None) -> tuple[Rollout, Node | None]:
        """Of the conversation that the request continues, or of a new one. Also the turn that it continues."""
        described = json.dumps(ask.tools, sort_keys=True)
        params = {"max_tokens": self._max_tokens, **ask.params}
        if (node := self._continued(said, described)) is not None:
            if ask.text is not None:
                return await self._continue(node, ask.text[len(node.said) :], params, tell), node
            if not self._is_rewritten(node, ask.messages):
                answered = self._seen(ask.messages[len(node.said) - 1 :])  # with the message of the policy
                return await self._continue(node, answered, params, tell), node
            # Else the messages, as the chat template writes them now, are the context of another conversation.
        # By its messages: the noise of conversations that begin in parallel does not depend on which one is first.
        begun = noise_key(json.dumps([said, described]))
        others = (noise_key("conversation", self.sibling, begun, i) >> 16 for i in itertools.count())
        sibling = next(s for s in itertools.chain([self.sibling], others) if s not in self._begun)
        self._begun.add(sibling)
        try:
            whole = self._seen(ask.messages) if ask.text is None else ask.text
            content = self._modality.opening(whole, ask.tools, has_history=bool(self._nodes))
            room = self._max_tokens - self._modality.excess(content)
            params["max_tokens"] = min(params["max_tokens"], room)
            (rollout,) = await self._context.first_turn(self.prompt, [sibling], content, params, tell)
        except BaseException as error:
            self._begun.discard(sibling)
            if isinstance(error, PromptTooLong):
                raise BadRequest(str(error), TOO_LONG) from None
            raise
        return rollout, None

    def _is_rewritten(self, end: Node, messages: Sequence[Message]) -> bool:
        """By the chat template, with the thoughts of the policy: in a field, and in the content, where some templates
        look for them."""
        history, added = list(messages[: len(end.said)]), messages[len(end.said) :]
        with_thoughts = list(history)
        turn: Node | None = end
        while turn is not None:
            place = len(turn.said) - 1
            history[place], with_thoughts[place] = turn.message, self._context.tool_format.with_thought(turn.message)
            turn = turn.before
        forms = [history, with_thoughts] if with_thoughts != history else [history]
        return any(self._modality.rewrites(form, added) for form in forms)

    async def _continue(
        self,
        node: Node,
        feedback: str | Sequence[Message],
        params: dict[str, Any],
        tell: Tell | None,
    ) -> Rollout:
        start, number = node.rollout, next(i for i in itertools.count() if i not in node.taken)
        sibling = start.sibling
        if number:  # another continuation of the same turn: a sample of its own
            sibling = noise_key("fork", start.sibling, start.num_steps, number) >> 16
        node.taken.add(number)
        try:
            excess = self._modality.excess(start.content)
            (rollout,) = await self._context.next_turns(start, [sibling], feedback, params, excess, tell)
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


class Fields(dict[str, Any]):
    """A JSON object with attributes; fields that are missing are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return self
