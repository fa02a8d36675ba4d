"""The OpenAI-compatible endpoint: what an agent samples by HTTP is recorded token for token."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest

from gcore.config.generation import Generation
from gcore.config.run import EndpointSettings
from gcore.content.media import Media, png_url
from gcore.content.text import TextModality
from gcore.content.tokens import SamplingMask, Tokens
from gcore.prompts.tokenizer import build_char_tokenizer
from gcore.protocols import RoleDied
from gcore.types import Completion, Prompt, Request
from gcore.workflows.context import ForAgents, SampleContext, SharedContext
from gcore.workflows.dialects.form import identity
from gcore.workflows.endpoint import Endpoint
from tests.unit.test_evaluation import config_of

ALPHABET = '0123456789+=[]; {}":,_<>/abcdefghijklmnopqrstuvwxyz'
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


class Engines:
    """In place of a pool: writes what the test says, with logprobs that identify every step."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self.tokenizer, self.texts, self.requests, self.made = tokenizer, texts, list[Request](), list[Completion]()
        self.hold, self.cancelled, self.num_turns, self.left = asyncio.Event(), 0, 0, dict[int, int]()
        self.hold.set()

    async def generate(self, requests: list[Request], priority: int, key: Any) -> list[Completion]:
        try:
            await asyncio.sleep(0)
            await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        found = []
        for request in requests:
            text = self.texts[self.num_turns % len(self.texts)]
            if text == "!":
                raise RoleDied("engine-0", "gone")
            ids = np.append(self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id)
            done = self.left.pop(request.noise_key, 0)  # by an earlier piece of a turn that is streamed
            ids = ids.astype(np.int32)[done:][: request.params.max_tokens]
            if ids[-1] == self.tokenizer.eos_token_id or request.params.max_tokens != 16:
                self.num_turns += 1
            else:
                self.left[request.noise_key] = done + len(ids)
            logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / (10 + len(self.made))
            finish = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
            self.made.append(Completion(Tokens.steps(ids), logprobs, np.zeros(len(ids), np.int32), finish))
            self.requests.append(request)
            found.append(self.made[-1])
        return found


class World:
    def __init__(self, *texts: str, greedy: bool = False, **endpoint: Any) -> None:
        self.tokenizer = build_char_tokenizer(ALPHABET)
        self.tokenizer.chat_template = TEMPLATE
        self.engines = Engines(self.tokenizer, list(texts))
        stops = (self.tokenizer.eos_token_id,)
        self.modality = TextModality(Generation(max_response_length=64), self.tokenizer, stops, 40)
        self.endpoint = Endpoint(EndpointSettings(**endpoint))
        parts: Any = config_of(), self.engines, SimpleNamespace(), self.modality
        self.shared = SharedContext(*parts, greedy=greedy, agents=ForAgents(self.endpoint))
        self.ctx = SampleContext(self.shared)
        self.prompt = Prompt(7, 7, ({"role": "user", "content": "1+1="},), "", Tokens(np.array([1], np.int32)))

    def long(self, tokens: int) -> None:
        """Responses of this length."""
        self.modality._max_tokens = tokens
        self.modality._params = self.modality._params.override({"max_tokens": tokens}, "")

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def run(self, agent: Any, n: int = 1) -> Any:
        async def main() -> Any:
            async with self.ctx.serve(self.prompt, n) as sessions, aiohttp.ClientSession() as http:
                return await agent(http, *sessions), sessions

        return asyncio.run(main())


async def post(http: Any, session: Any, path: str = "chat/completions", token: str | None = None, **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {session.api_key if token is None else token}"}
    async with http.post(f"{session.base_url}/{path}", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_conversation_continues_from_the_recorded_tokens():
    world = World("12", "34")

    async def agent(http: Any, session: Any) -> Any:
        messages = [{"role": "system", "content": "be brief"}, user("1+1=")]
        status, first = await post(http, session, messages=messages, model="x", logprobs=True)
        assert status == 200, first
        # an agent's library adds and drops fields of the message
        said = {"role": "assistant", "content": first["choices"][0]["message"]["content"] + " ", "refusal": None}
        return first, (await post(http, session, messages=[*messages, said, user("2+2=")]))[1]

    (first, second), (session,) = world.run(agent)
    one, two = world.engines.made
    rollout = session.rollout
    between = world.ids(";u:2+2=;a:")
    assert rollout.content.tokens_P.tolist() == world.ids("s:be brief;u:1+1=;a:")
    assert rollout.content.tokens_S.tolist() == [*one.content.tokens_S, *between, *two.content.tokens_S]
    assert rollout.mask_S.tolist() == [True] * 3 + [False] * len(between) + [True] * 3
    assert np.array_equal(rollout.logprobs_S[rollout.mask_S], np.concatenate([one.logprobs_S, two.logprobs_S]))
    assert world.engines.requests[1].content.tokens_T.tolist() == rollout.content.tokens_T[:-3].tolist()
    assert len({request.noise_key for request in world.engines.requests}) == 1  # one sample
    assert (rollout.prompt, rollout.sibling, rollout.turn) == (world.prompt, 0, "34")
    choice = first["choices"][0]
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": "12"}, "stop")
    shown = choice["logprobs"]["content"]
    assert [entry["token"] for entry in shown[:2]] == ["1", "2"] and shown[0]["logprob"] == float(one.logprobs_S[0])
    prompt_tokens = len(rollout.content.tokens_T) - 3
    assert (second["usage"]["prompt_tokens"], second["usage"]["completion_tokens"]) == (prompt_tokens, 3)


def trained(world: World, trajectory: Any) -> None:
    """Each sampled token is an action of one segment, with its logprob, after the context it was sampled in."""
    found = []
    for segment in trajectory.trajectory:
        ids, at = segment.content.tokens_T.tolist(), len(segment.content.tokens_P)
        actions = segment.mask_S & (np.arange(segment.num_steps) >= segment.shared)
        for step in np.flatnonzero(actions):
            found.append((tuple(ids[: at + step]), ids[at + step], float(segment.logprobs_S[step])))
    sampled = []
    for request, made in zip(world.engines.requests, world.engines.made, strict=True):
        ids = [*request.content.tokens_T.tolist(), *made.content.tokens_S.tolist()]
        first = request.content.size
        sampled += [(tuple(ids[:i]), ids[i], float(made.logprobs_S[i - first])) for i in range(first, len(ids))]
    assert sorted(found) == sorted(sampled)


def test_changed_messages_and_retries_are_segments_of_one_trajectory():
    world = World("1", "2", "3", "4")

    async def agent(http: Any, session: Any) -> None:
        asked = [user("5")]
        first = (await post(http, session, messages=asked))[1]["choices"][0]["message"]
        await post(http, session, messages=[*asked, first, user("6")])
        await post(http, session, messages=[*asked, first, user("6")])  # a retry: another continuation
        await post(http, session, messages=[user("7")])  # another conversation

    _, (session,) = world.run(agent)
    rollouts = session.rollouts
    assert [r.text for r in rollouts] == ["1;u:6;a:2", "1;u:6;a:3", "4"]
    assert len({r.sibling for r in rollouts}) == 3 and rollouts[0].sibling == 0
    assert [r.shared for r in rollouts] == [0, 0, 0]
    keys = [request.noise_key for request in world.engines.requests]
    assert keys[0] == keys[1] and len(set(keys)) == 3
    trajectory = session.rollout
    assert [(r.text, r.shared) for r in trajectory.trajectory] == [("4", 0), ("1;u:6;a:3", 0), ("1;u:6;a:2", 2)]
    trained(world, trajectory)


THINKS = (  # as DeepSeek-R1 and Qwen3: thoughts are stripped from turns before the last question
    "{% set last = messages | selectattr('role', 'equalto', 'user') | list | length %}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.n = ns.n + 1 %}{% endif %}"
    "{{ m['role'][0] + ':' }}{{ m['content'].split('</think>')[-1] if ns.n < last else m['content'] }}{{ ';' }}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def test_a_template_that_strips_thoughts_makes_a_segment_per_question():
    """Three questions, each with a tool call: the turns of one question are one segment."""
    world = World(*(f"<think>{i}</think>{i}" for i in range(6)))
    world.tokenizer.chat_template = THINKS
    world.long(80)

    async def agent(http: Any, session: Any) -> None:
        messages: list[Any] = []
        for question in "789":
            for said in (user(question), {"role": "tool", "content": "0"}):
                messages.append(said)
                status, answer = await post(http, session, messages=messages)
                assert status == 200, answer
                messages.append(answer["choices"][0]["message"])

    _, (session,) = world.run(agent)
    trajectory = session.rollout
    assert len(trajectory.trajectory) == 3 and trajectory.sibling != session.sibling
    last, second, first = (r.content.tokens_P.tolist() for r in trajectory.trajectory)
    assert first == world.ids("u:7;a:")
    assert second == world.ids("u:7;a:0;t:0;a:1;u:8;a:")
    assert last == world.ids("u:7;a:0;t:0;a:1;u:8;a:2;t:0;a:3;u:9;a:")
    assert trajectory.text == "<think>4</think>4;t:0;a:<think>5</think>5"
    trained(world, trajectory)
    asked = world.engines.requests[-1]  # the context may be longer than a prompt: the response has less room
    assert asked.content.size + asked.params.max_tokens <= 40 + 80


def test_a_template_that_ends_a_whole_conversation_with_eos_rewrites_nothing():
    """As Phi-3.5: without a turn to come it writes eos once more."""
    world = World("1", "2", "3")
    world.tokenizer.chat_template = TEMPLATE + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"

    async def agent(http: Any, session: Any) -> None:
        messages: list[Any] = []
        for question in "567":
            messages.append(user(question))
            answer = (await post(http, session, messages=messages))[1]
            messages.append(answer["choices"][0]["message"])

    _, (session,) = world.run(agent)
    assert session.rollout.text == "1;u:6;a:2;u:7;a:3" and session.rollout.segments == ()
    trained(world, session.rollout)


def test_each_step_of_a_session_is_stored_once():
    """Also of long conversations, and a branch from their middle goes on from the steps that it had."""
    world = World(*"123456789")
    world.long(200)

    async def agent(http: Any, session: Any) -> None:
        messages: list[Any] = []
        for turn in "12345":
            messages.append(user(turn))
            messages.append((await post(http, session, messages=messages))[1]["choices"][0]["message"])
        assert (await post(http, session, messages=[*messages[:4], user("9")]))[0] == 200
        messages.append(user("6"))
        assert (await post(http, session, messages=messages))[0] == 200

    _, (session,) = world.run(agent)
    stored = [node for node in session._nodes if node.rollout is not None]
    assert len(session._nodes) == 7 and len(stored) == 2
    trajectory = session.rollout
    assert trajectory.text.endswith("u:6;a:7") and [r.shared for r in trajectory.trajectory] == [0, 11]
    trained(world, trajectory)
    middle = session._rollout_of(session._nodes[1])
    assert np.shares_memory(middle.content.tokens_S, trajectory.content.tokens_S)
    assert np.shares_memory(middle.logprobs_S, trajectory.logprobs_S) and middle.num_steps == 11


def test_the_beginning_of_a_content():
    """What was sampled in pieces is cut between them: tokens, masks of top-p, experts and images."""
    mask = SamplingMask(np.array([1, 2, 3], np.int32), np.array([2, 1], np.int32))
    experts = np.arange(8, dtype=np.uint8)[:, None, None]
    medium = Media("image", "k", np.zeros((1, 1, 3), np.uint8), places=np.array([1], np.int32))
    start = Tokens(np.array([5, 6, 7], np.int32), own_context=True)
    first = start.extended(Tokens.steps(np.array([1, 2], np.int32), mask, experts=experts[:4]))
    whole = first.extended(
        Tokens.steps(np.array([8, 9], np.int32), media=(medium,)),
        Tokens.steps(np.array([3], np.int32), experts=experts[4:7]),
    )
    cut = whole.beginning(2)
    assert (cut.tokens_T.tolist(), cut.media, cut.digest()) == (first.tokens_T.tolist(), (), first.digest())
    assert cut.sampling_mask is not None and cut.sampling_mask.ids_K.tolist() == [1, 2, 3]
    assert cut.experts is not None and cut.experts.tolist() == experts[:4].tolist()
    assert len(whole.beginning(4).media) == 1 and whole.beginning(5).digest() == whole.digest()


def test_conversations_that_begin_in_parallel_have_the_noise_of_their_messages():
    def keys(order: str) -> dict[int, int]:
        world = World("1")

        async def main() -> None:
            async with world.ctx.serve(world.prompt, 1) as (session,):
                await session.post("chat/completions", {"messages": [user("5")]})
                await asyncio.gather(*(session.post("chat/completions", {"messages": [user(text)]}) for text in order))

        asyncio.run(main())
        return {request.content.size * 100 + int(request.content.tokens_P[2]): request.noise_key
                for request in world.engines.requests}  # fmt: skip

    assert keys("678") == keys("867") and len(set(keys("678").values())) == 4


def test_an_agent_that_gives_up_a_request_does_not_train_it():
    """The client disconnects: the engine's request is cancelled. The agent asks again, with the same noise."""
    world = World("1")
    world.engines.hold = asyncio.Event()

    async def agent(http: Any, session: Any) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(post(http, session, messages=[user("5")]), 0.3)
        while not world.engines.cancelled:
            await asyncio.sleep(0.01)
        world.engines.hold.set()
        assert (await post(http, session, messages=[user("5")]))[0] == 200

    _, (session,) = world.run(agent)
    assert session.rollout.segments == () and session.rollout.sibling == 0


def test_a_continuation_after_one_that_was_cancelled_is_a_sample_of_its_own():
    """Two continue the same turn. The first is cancelled while the second is under way, and asks again."""
    world = World("1")

    async def main() -> list[int]:
        async with world.ctx.serve(world.prompt, 1) as (session,):
            said = (await session.post("chat/completions", {"messages": [user("5")]}))["choices"][0]["message"]
            body = {"messages": [user("5"), said, user("6")]}
            first, second = (asyncio.ensure_future(session.post("chat/completions", body)) for _ in range(2))
            await asyncio.sleep(0)  # both have asked the engine
            first.cancel()
            await asyncio.wait([first])
            await session.post("chat/completions", body)
            await second
            return [rollout.sibling for rollout in session.rollouts]

    siblings = asyncio.run(main())
    assert len(set(siblings)) == len(siblings) == 2 and 0 in siblings


def test_several_samples_of_a_prompt_have_their_own_addresses():
    world = World("1")

    async def agent(http: Any, *sessions: Any) -> Any:
        return await asyncio.gather(*(post(http, s, messages=[user("5")]) for s in sessions))

    _, sessions = world.run(agent, n=3)
    assert [s.rollout.sibling for s in sessions] == [0, 1, 2] and len({s.base_url for s in sessions}) == 3
    assert len({request.noise_key for request in world.engines.requests}) == 3


def test_completions_continue_text():
    world = World("12", "34")

    async def agent(http: Any, session: Any) -> None:
        status, first = await post(http, session, "completions", prompt="1+", max_tokens=2, logprobs=0)
        assert (status, first["choices"][0]["text"], first["choices"][0]["finish_reason"]) == (200, "12", "length")
        assert first["choices"][0]["logprobs"]["tokens"] == ["1", "2"]
        await post(http, session, "completions", prompt="1+12[3]")

    _, (session,) = world.run(agent)
    rollout = session.rollout
    eos = world.tokenizer.eos_token_id
    assert rollout.content.tokens_S.tolist() == [*world.ids("12"), *world.ids("[3]"), *world.ids("34"), eos]
    assert rollout.mask_S.tolist() == [True] * 2 + [False] * 3 + [True] * 3


def test_tool_calls_come_back_as_objects():
    calls = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' * 2
    world = World("so " + calls, "2")
    world.long(300)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

    async def agent(http: Any, session: Any) -> Any:
        asked = [user("5")]
        choice = (await post(http, session, messages=asked, tools=tools))[1]["choices"][0]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "1"} for c in choice["message"]["tool_calls"]]
        await post(http, session, messages=[*asked, choice["message"], *results], tools=tools)
        return choice

    choice, (session,) = world.run(agent)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "so"
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["add", "add"]
    assert len({c["id"] for c in choice["message"]["tool_calls"]}) == 2
    assert session.rollout.text.endswith(";t:1;t:1;a:2")


async def streamed(http: Any, session: Any, path: str = "chat/completions", **body: Any) -> tuple[str, list[Any]]:
    """The content type, and the data of the events with the names that they have."""
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with http.post(f"{session.base_url}/{path}", json={**body, "stream": True}, headers=headers) as answer:
        text, kind = (await answer.read()).decode(), answer.headers["Content-Type"]
    events = []
    for block in text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"])
        events.append((lines["event"], data) if "event" in lines else data)
    return kind, events


LONG = "<think>1 < 2, so</think>abc 123 [4] " * 2 + "<5> end"


def test_streams():
    """Deltas come while the engine generates: pieces of 16 tokens, each of them a request with the same noise."""
    world = World(LONG)
    world.long(200)
    body = {"messages": [user("5")], "stream_options": {"include_usage": True}, "logprobs": True}

    async def agent(http: Any, session: Any) -> Any:
        found = await streamed(http, session, **body)
        return found, (await post(http, session, messages=[user("5")]))[1]

    ((kind, events), whole), (session,) = world.run(agent)
    assert kind == "text/event-stream"
    *chunks, done = events
    assert done == "[DONE]" and chunks[0]["object"] == "chat.completion.chunk"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""} and len(deltas) > 5
    message = {part: "".join(d.get(part, "") for d in deltas) for part in ("content", "reasoning_content")}
    assert message == {
        "reasoning_content": "1 < 2, so",
        "content": "abc 123 [4] <think>1 < 2, so</think>abc 123 [4] <5> end",
    }
    assert whole["choices"][0]["message"] == {"role": "assistant", **message}
    last, usage = chunks[-2:]
    assert last["choices"][0]["finish_reason"] == "stop" and usage["usage"] == whole["usage"]
    *requests, one = world.engines.requests
    assert len(requests) == -(-(len(LONG) + 1) // 16) and all(r.params.max_tokens <= 16 for r in requests)
    assert len({r.noise_key for r in requests}) == 1 != one.noise_key
    assert [r.position for r in requests] == list(range(0, len(LONG) + 1, 16))
    streamed_rollout, plain = session.rollouts
    assert streamed_rollout.content.tokens_S.tolist() == plain.content.tokens_S.tolist()
    assert len(last["choices"][0]["logprobs"]["content"]) == len(LONG) + 1


def test_a_stream_does_not_show_calls_as_text():
    world = World('so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    world.long(200)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

    async def agent(http: Any, session: Any) -> Any:
        return (await streamed(http, session, messages=[user("5")], tools=tools))[1]

    events, _ = world.run(agent)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(d.get("content", "") for d in deltas) == "so"
    (calls,) = [d["tool_calls"] for d in deltas if "tool_calls" in d]
    assert [(c["index"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
        (0, "add", {"a": 1})
    ]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_an_agent_that_leaves_in_the_middle_of_a_stream_trains_nothing_of_it():
    world = World("1" * 60, "2")

    async def agent(http: Any, session: Any) -> None:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        body = {"messages": [user("5")], "stream": True}
        async with http.post(f"{session.base_url}/chat/completions", json=body, headers=headers) as answer:
            await answer.content.readany()
            world.engines.hold.clear()
            answer.close()
        while not world.engines.cancelled:
            await asyncio.sleep(0.01)
        world.engines.hold.set()
        world.engines.texts, world.engines.left = ["2"], {}
        await post(http, session, messages=[user("5")])

    _, (session,) = world.run(agent)
    assert session.rollout.text == "2" and session.rollout.segments == ()


PNG = png_url(np.zeros((2, 2, 3), np.uint8))


def picture(url: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": "5"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"role": "user", "content": parts}


def test_refusals_say_what_is_wrong():
    world = World("12")
    asked = [user("5")]
    refused = {
        "n: got 2; only 1 is supported": {"messages": asked, "n": 2},
        "guided_json: this field is not supported": {"messages": asked, "guided_json": {}},
        "tool_choice: got": {"messages": asked, "tool_choice": "required"},
        "temperature: got": {"messages": asked, "temperature": "hot"},
        "messages: expected a list": {"messages": []},
        "neither text nor image_url": {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "nothing is downloaded": {"messages": [picture("https://example.com/a.png")]},
        "an image for a model that takes none": {"messages": [picture(PNG)]},
        "3 bytes that are no image": {"messages": [picture("data:image/png;base64,AAAA")]},
        "the last one is the assistant's": {"messages": [*asked, {"role": "assistant", "content": "x"}]},
        "expected at most data.max_prompt_length=40": {"messages": [user("5" * 50)]},
        "no token for the characters": {"messages": [user("Ü")]},
        "tool_calls: expected a list": {"messages": [{"role": "assistant", "tool_calls": [{"id": "call_0"}]}, *asked]},
    }

    async def agent(http: Any, session: Any) -> Any:
        found = {text: await post(http, session, **body) for text, body in refused.items()}
        found["token"] = await post(http, session, token="other", messages=asked)
        session.base_url = session.base_url.replace("p7", "p8")
        found["session"] = await post(http, session, messages=asked)
        return found

    found, _ = world.run(agent)
    assert found.pop("token")[0] == 401 and found.pop("session")[0] == 404
    for text, (status, body) in found.items():
        assert status == 400 and text in body["error"]["message"], (text, body)
    assert found["expected at most data.max_prompt_length=40"][1]["error"]["code"] == "context_length_exceeded"
    assert not world.engines.made


def test_other_routes_are_answered_with_those_that_there_are():
    world = World("12")

    async def agent(http: Any, session: Any) -> Any:
        found = [await post(http, session, "embeddings", input="5"), await post(http, session, "models")]
        session.base_url = session.base_url.removesuffix("/v1")
        return [*found, await post(http, session, messages=[user("5")])]

    found, _ = world.run(agent)
    routes = (
        "expected POST chat/completions, POST completions, POST responses, POST messages, POST messages/count_tokens "
        "or GET models, at session.base_url"
    )
    for (status, body), asked in zip(found, ("POST embeddings", "POST models", "POST /c0-p7-"), strict=True):
        assert status == 404 and body["error"]["code"] == "unsupported_route"
        assert body["error"]["message"].startswith(asked) and body["error"]["message"].endswith(routes)
    assert not world.engines.made


def test_the_length_limit_ends_a_conversation():
    world = World("1" * 60)

    async def agent(http: Any, session: Any) -> Any:
        first = (await post(http, session, messages=[user("5")]))[1]["choices"][0]["message"]
        return await post(http, session, messages=[user("5"), first, user("6")])

    (status, body), (session,) = world.run(agent)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert session.rollout.finish == "length" and session.rollout.num_steps == 61


def test_a_dead_engine_is_not_an_error_of_the_agent():
    async def agent(http: Any, session: Any) -> None:
        status, _ = await post(http, session, messages=[user("5")])
        raise AssertionError(f"the agent saw {status}")

    with pytest.raises(RoleDied, match="engine-0 died"):
        World("!").run(agent)


@pytest.mark.parametrize("turns", range(7))
def test_a_workflow_that_is_cancelled_while_the_server_starts(turns):
    """After any number of turns of the event loop. The next workflow gets a server that listens."""
    world = World("12")

    async def cancelled() -> None:
        async with world.ctx.serve(world.prompt, 1):
            await asyncio.Event().wait()

    async def main() -> None:
        first = asyncio.create_task(cancelled())
        for _ in range(turns):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        assert not world.ctx._shared.endpoint._sessions
        async with world.ctx.serve(world.prompt, 1) as (session,), aiohttp.ClientSession() as http:
            assert (await post(http, session, messages=[user("5")]))[0] == 200

    asyncio.run(main())


def test_evaluations_are_greedy_whatever_the_agent_asks_for():
    world = World("12", greedy=True)

    async def agent(http: Any, *sessions: Any) -> None:
        assert len(sessions) == 1
        await post(http, sessions[0], messages=[user("5")], temperature=0.7)

    world.run(agent, n=4)
    assert world.engines.requests[0].params.temperature == 0


def test_the_client_in_the_process():
    world = World("12", "34")

    async def agent(_: Any, session: Any) -> Any:
        messages: list[Any] = [user("5")]
        answer = await session.client.chat.completions.create(messages=messages, extra_body={"top_k": 0})
        messages += [answer.choices[0].message.model_dump(), user("6")]
        return await session.client.chat.completions.create(model="policy", messages=messages)

    answer, (session,) = world.run(agent)
    assert answer.choices[0].message.content == "34" and answer.choices[0].message.tool_calls is None
    assert session.rollout.text == "12;u:6;a:34"


def test_identity_ignores_what_libraries_change():
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    sent = {"role": "assistant", "content": "so ", "tool_calls": [call]}
    back = {"role": "assistant", "content": "so", "refusal": None, "tool_calls": [{**call, "id": "b"}]}
    assert identity(sent) == identity(back) != identity({**back, "content": "no"})
    assert identity(user("a ")) != identity(user("a"))
