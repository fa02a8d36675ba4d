"""The dialects of the endpoint: the real clients of OpenAI and Anthropic, if they are installed, and plain bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gcore.workflows.dialects import anthropic as anthropic_dialect
from gcore.workflows.dialects import chat, responses
from gcore.workflows.dialects.form import Turn, calls_of, identity, merged
from gcore.workflows.tool_formats import HERMES, AssistantTurn, ToolCall
from tests.unit.test_endpoint import World, post, streamed, trained, user

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SAID = f"<think>1 < 2 so</think>so {CALL}{CALL}"
LONG_WORDS = "abc 123 def 456 ghi 789 jkl 0"


def world() -> World:
    """Two calls, an answer, a streamed answer after a thought, and a streamed call."""
    made = World(SAID, "3", f"<think>well</think>{LONG_WORDS}", SAID)
    made.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] }}{% for c in m['tool_calls'] or [] %}"
        "{{ '<' + c['function']['name'] + '>' }}{% endfor %};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    made.long(600)
    return made


def checked(made: World, session: Any, added: list[str]) -> None:
    """One conversation: what the policy sampled, with the agent's messages between."""
    rollout = session.rollout
    assert rollout.segments == () and len(made.engines.requests) >= 4
    trained(made, rollout)
    between = [made.ids(text) for text in added]
    ids, masked = rollout.content.tokens_S.tolist(), []
    for i, action in enumerate(rollout.mask_S):
        if action:
            masked.append([])  # ends a stretch
        else:
            masked[-1].append(ids[i])
    assert [stretch for stretch in masked if stretch] == between


ADDED = [";t:1;t:2;a:", ";u:7;a:", ";u:8;a:"]


def test_chat_completions_by_the_library_of_openai():
    openai = pytest.importorskip("openai")
    made = world()
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]

    async def agent(_: Any, session: Any) -> None:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            asked: dict[str, Any] = {"model": "policy", "tools": tools}
            messages: list[Any] = [{"role": "developer", "content": "be brief"}, user("5")]
            said = (await client.chat.completions.create(messages=messages, **asked)).choices[0].message
            assert (said.content, said.reasoning_content) == ("so", "1 < 2 so")
            assert [json.loads(call.function.arguments) for call in said.tool_calls] == [{"a": 1}] * 2
            results = [
                {"role": "tool", "tool_call_id": c.id, "content": str(i + 1)} for i, c in enumerate(said.tool_calls)
            ]
            messages += [said, *results]
            said = (await client.chat.completions.create(messages=messages, **asked)).choices[0].message
            messages += [said, user("7")]
            parts: dict[str, str] = {"content": "", "reasoning_content": ""}
            async for chunk in await client.chat.completions.create(messages=messages, stream=True, **asked):
                for part in parts:
                    parts[part] += getattr(chunk.choices[0].delta, part, None) or ""
            assert parts == {"content": LONG_WORDS, "reasoning_content": "well"}
            messages += [{"role": "assistant", "content": parts["content"]}, user("8")]
            async with client.chat.completions.stream(messages=messages, **asked) as stream:
                final = (await stream.get_final_completion()).choices[0]
            assert final.finish_reason == "tool_calls" and final.message.content == "so"
            assert [call.function.name for call in final.message.tool_calls] == ["add"] * 2

    _, (session,) = made.run(agent)
    checked(made, session, ADDED)


@pytest.mark.parametrize("by_id", [False, True])
def test_responses_by_the_library_of_openai(by_id: bool):
    """Histories as items, or by the id of the response before."""
    openai = pytest.importorskip("openai")
    made = world()
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]

    async def agent(_: Any, session: Any) -> None:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            history: list[Any] = []

            async def ask(items: list[Any], previous: Any = None) -> Any:
                history.extend(items)
                given = {"input": items, "previous_response_id": previous} if by_id else {"input": history}
                created = await client.responses.create(model="policy", instructions="be brief", tools=tools, **given)
                history.extend(created.output)
                return created

            first = await ask([user("5")])
            kinds = [item.type for item in first.output]
            assert kinds == ["reasoning", "message", "function_call", "function_call"]
            assert first.output[0].content[0].text == "1 < 2 so" and first.output_text == "so"
            calls = first.output[2:]
            assert [json.loads(call.arguments) for call in calls] == [{"a": 1}] * 2
            results = zip(calls, "12", strict=True)
            outputs = [{"type": "function_call_output", "call_id": c.call_id, "output": text} for c, text in results]
            second = await ask(outputs, first.id)
            assert (second.output_text, second.status, second.usage.output_tokens) == ("3", "completed", 2)
            asked: Any = {"model": "policy", "instructions": "be brief", "tools": tools}

            def then(question: str, previous: Any) -> Any:
                items = [user(question)]
                return {"input": items, "previous_response_id": previous} if by_id else {"input": [*history, *items]}

            parts = {"response.output_text.delta": "", "response.reasoning_text.delta": ""}
            async with client.responses.stream(**asked, **then("7", second.id)) as stream:
                async for event in stream:
                    if event.type in parts:
                        parts[event.type] += event.delta
                third = await stream.get_final_response()
            assert parts == {"response.output_text.delta": LONG_WORDS, "response.reasoning_text.delta": "well"}
            assert third.output_text == LONG_WORDS and [item.type for item in third.output] == ["reasoning", "message"]
            history += [user("7"), *third.output]
            async with client.responses.stream(**asked, **then("8", third.id)) as stream:
                fourth = await stream.get_final_response()
            assert [item.type for item in fourth.output] == kinds

    _, (session,) = made.run(agent)
    checked(made, session, ADDED)


def test_messages_by_the_library_of_anthropic():
    anthropic = pytest.importorskip("anthropic")
    made = world()
    tools = [{"name": "add", "input_schema": SCHEMA}]

    async def agent(_: Any, session: Any) -> None:
        async with anthropic.AsyncAnthropic(base_url=session.base_url, api_key=session.api_key) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            asked: dict[str, Any] = {"model": "policy", "max_tokens": 200, "tools": tools, "system": "be brief"}
            messages: list[Any] = [user("5")]
            first = await client.messages.create(messages=messages, **asked)
            assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert first.stop_reason == "tool_use" and first.content[0].thinking == "1 < 2 so"
            calls = first.content[2:]
            assert [call.input for call in calls] == [{"a": 1}] * 2
            results = [{"type": "tool_result", "tool_use_id": c.id, "content": str(i + 1)} for i, c in enumerate(calls)]
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
            del asked["max_tokens"]
            count = await client.messages.count_tokens(messages=messages, **asked)
            asked["max_tokens"] = 200
            second = await client.messages.create(messages=messages, **asked)
            assert count.input_tokens == second.usage.input_tokens and second.usage.output_tokens == 2
            assert (second.content[0].text, second.stop_reason) == ("3", "end_turn")
            messages += [{"role": "assistant", "content": second.content}, user("7")]
            texts = []
            async with client.messages.stream(messages=messages, **asked) as stream:
                async for text in stream.text_stream:
                    texts.append(text)
                third = await stream.get_final_message()
            assert "".join(texts) == LONG_WORDS and len(texts) > 1 and third.content[0].thinking == "well"
            messages += [{"role": "assistant", "content": LONG_WORDS}, user("8")]
            async with client.messages.stream(messages=messages, **asked) as stream:
                fourth = await stream.get_final_message()
            assert [block.type for block in fourth.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert fourth.content[3].input == {"a": 1} and fourth.usage.output_tokens == len(SAID) + 1
            with pytest.raises(anthropic.BadRequestError, match="only auto and none are supported"):
                await client.messages.create(messages=[user("5")], tool_choice={"type": "any"}, **asked)
            with pytest.raises(anthropic.NotFoundError, match="POST messages/batches is not supported; expected"):
                await client.messages.batches.create(requests=[])

    _, (session,) = made.run(agent)
    checked(made, session, ADDED)


def test_a_session_speaks_all_dialects():
    """The same conversation, each turn by another API: it goes on from the recorded tokens."""
    made = World("1", "2", "3")

    async def agent(http: Any, session: Any) -> None:
        asked = [user("5")]
        for path, key in (("chat/completions", "messages"), ("responses", "input"), ("messages", "messages")):
            given = {"max_tokens": 20} if path == "messages" else {}
            status, answer = await post(http, session, path, **{key: asked}, **given)
            assert status == 200, answer
            texts = {"chat/completions": lambda a: a["choices"][0]["message"]["content"],
                     "responses": lambda a: a["output"][0]["content"][0]["text"],
                     "messages": lambda a: a["content"][0]["text"]}  # fmt: skip
            asked += [{"role": "assistant", "content": texts[path](answer)}, user("6")]

    _, (session,) = made.run(agent)
    assert session.rollout.text == "1;u:6;a:2;u:6;a:3" and session.rollout.segments == ()


PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
REFUSED = {
    "responses": [
        ({"input": []}, "input: expected a text, or a list of items"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "only message, function_call,"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "neither input_text nor input_image"),
        ({"input": "5", "tools": [{"type": "web_search"}]}, "only tools of type function"),
        ({"input": "5", "text": {"format": {"type": "json_object"}}}, "text.format: got"),
        ({"input": "5", "previous_response_id": "r7"}, "'r7' is not a stored response of this session"),
        ({"input": "5", "tool_choice": "required"}, "tool_choice: got"),
        ({"input": "5", "conversation": "c"}, "conversation: this field is not supported"),
        ({"input": [{"role": "user", "content": 5}, {"role": 7}]}, "only message, function_call"),
    ],
    "messages": [
        ({"messages": []}, "messages: expected a list"),
        ({"messages": [user("5"), {"role": "assistant", "content": "x"}]}, "the last one is the assistant's"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 'a content block of type "document"'),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": PNG}]}]}, "that are no image"),
        ({"messages": [user("5")], "tools": [{"type": "web_search_20250305"}]}, "only tools with a name"),
        ({"messages": [user("5")], "system": 5, "tools": 7}, "the body is not valid: TypeError"),
        ({"messages": [user("5" * 50)]}, "expected at most data.max_prompt_length=40"),
    ],
}  # fmt: skip


def test_refusals_of_each_dialect_are_in_its_form():
    made = World("1")

    async def agent(http: Any, session: Any) -> None:
        for path, cases in REFUSED.items():
            for body, expected in cases:
                status, answer = await post(http, session, path, **body)
                assert status == 400 and expected in answer["error"]["message"], (body, answer)
                assert (answer.get("type") == "error") == (path == "messages")
        status, answer = await post(http, session, "messages", token="other", messages=[user("5")])
        assert (status, answer["error"]["type"]) == (401, "authentication_error")

    made.run(agent)
    assert not made.engines.made


def test_the_events_of_each_dialect_are_in_order():
    """Items and blocks are numbered, opened and closed; a turn that ends without text has an empty one."""
    made = World("<think>a</think>" + LONG_WORDS + CALL, "")
    made.long(200)
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}]

    async def agent(http: Any, session: Any) -> Any:
        found = [(await streamed(http, session, "responses", input="5", tools=tools))[1]]
        found.append((await streamed(http, session, "messages", messages=[user("6")], max_tokens=16))[1])
        return found

    (events, message_events), _ = made.run(agent)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    added = [data["item"]["type"] for name, data in events if name == "response.output_item.added"]
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert added == [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert events[-1][0] == "response.completed" and events[-1][1]["response"]["output"] == done
    assert [name for name, _ in message_events] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_ids_of_calls():
    """Those that the policy wrote, if they differ; else nine letters and digits."""
    calls = [ToolCall("a", id="x"), ToolCall("", error="no"), ToolCall("b", id="x"), ToolCall("c")]
    found = calls_of(AssistantTurn("", "", tuple(calls)), 12)
    assert [(call.id, call.name) for call in found] == [("x", "a"), ("c00120001", "b"), ("c00120002", "c")]


def test_neighbouring_items_of_the_assistant_are_one_turn():
    items = [
        {"role": "user", "content": "5"},
        {"role": "assistant", "reasoning_content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "tool_calls": [1]},
        {"role": "assistant", "tool_calls": [2]},
    ]
    assert merged(items) == [
        {"role": "user", "content": "5"},
        {"role": "assistant", "content": "b", "reasoning_content": "a", "tool_calls": [1, 2]},
    ]


def test_every_dialect_gives_back_what_it_read():
    """The identity of a turn is the same after the agent sent it back, in each dialect."""
    said = HERMES.read(SAID)
    turn = Turn("r1", "policy", said.content, said.reasoning, calls_of(said, 3))
    back = [
        chat.read_chat({"messages": [user("5"), chat.answer_chat(turn, {})["choices"][0]["message"], user("6")]}),
        responses.read({"input": [user("5"), *responses.answer(turn, {})["output"], user("6")]}),
        anthropic_dialect.read(
            {
                "messages": [
                    user("5"),
                    {"role": "assistant", "content": anthropic_dialect.answer(turn, {})["content"]},
                    user("6"),
                ]
            }
        ),
    ]
    for found in back:
        assert [identity(m) for m in found.messages] == [identity(m) for m in (user("5"), turn.message, user("6"))]
        assert found.messages[1].get("reasoning_content") == "1 < 2 so"
        (first, _) = found.messages[1]["tool_calls"]
        assert first["function"]["arguments"] == {"a": 1}
