"""Tools with parallel calls, on scripted engines."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np

from gcore.workflows import (
    ToolCall,
    parse_tool_calls,
    run_tools,
    tool_schema,
    use_tools,
)
from tests.unit.test_endpoint import World


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'.replace("'", '"')


def test_all_calls_of_a_response_are_parsed():
    text = "first " + call("add", a=1, b=2) + call("now") + "<tool_call>{'bad'}</tool_call>" + '<tool_call>{"x": 1}'
    add, now, bad, nameless = parse_tool_calls(text)
    assert (add, now) == (ToolCall("add", {"a": 1, "b": 2}), ToolCall("now"))
    assert "not JSON" in bad.error and "expected" in nameless.error
    assert parse_tool_calls("no calls") == []


def test_calls_run_at_once_and_results_keep_their_order():
    meeting = threading.Barrier(2, timeout=60)  # two sync calls meet only if they run at the same time
    waiting = asyncio.Event()

    def meet(n: int) -> int:
        meeting.wait()
        return n

    async def late() -> str:
        await asyncio.wait_for(waiting.wait(), 60)
        return "late"

    async def early() -> dict[str, int]:
        waiting.set()
        return {"x": 1}

    def broken() -> None:
        raise KeyError("oh")

    async def endless() -> None:
        await asyncio.Event().wait()

    tools = {"meet": meet, "late": late, "early": early, "broken": broken, "endless": endless}
    calls = [
        *(ToolCall("late"), ToolCall("meet", {"n": 1}), ToolCall("early"), ToolCall("meet", {"n": 2})),
        *(ToolCall("other"), ToolCall("broken"), ToolCall("meet", {"m": 1}), ToolCall("", error="no JSON")),
    ]
    late_, one, early_, two, *errors = asyncio.run(run_tools(calls, tools))
    assert (late_, one, early_, two) == ("late", "1", '{"x": 1}', "2")
    assert "no tool 'other'; expected one of broken" in errors[0] and "KeyError: 'oh'" in errors[1]
    assert "TypeError" in errors[2] and errors[3] == "error: no JSON"
    assert "within 0.05 s" in asyncio.run(run_tools([ToolCall("endless")], tools, timeout_s=0.05))[0]


def test_tools_that_hang_block_nothing_else():
    """Their threads are lost, but checkpoints and tokenizers of the controller use other ones."""
    released = threading.Event()
    tools = {"hang": released.wait, "name": lambda: "tool"}

    async def main() -> None:
        try:
            errors = await run_tools([ToolCall("hang")] * 40, tools, timeout_s=0.2)
            assert all("did not answer" in error for error in errors)
            assert await asyncio.wait_for(asyncio.to_thread(str, 1), 60) == "1"
            assert await run_tools([ToolCall("name")], tools) == ["tool"]
        finally:
            released.set()

    asyncio.run(main())


def test_schemas_come_from_signatures():
    def find(city: str, days: int = 3) -> str:
        """The weather
        of a city.

        Not this."""
        return city

    schema = tool_schema(find)["function"]
    assert (schema["name"], schema["description"]) == ("find", "The weather of a city.")
    assert schema["parameters"]["properties"] == {"city": {"type": "string"}, "days": {"type": "integer"}}
    assert schema["parameters"]["required"] == ["city"]


def world_of(*texts: str, length: int = 400) -> World:
    world = World(*texts)
    world.modality._max_tokens = length  # type: ignore[attr-defined]
    world.modality._params = world.modality._params.override({"max_tokens": length}, "")  # type: ignore[attr-defined]
    return world


def test_the_policy_calls_twice_in_a_turn_and_continues():
    async def add(a: int, b: int) -> str:
        return str(a + b)

    world = world_of(call("add", a=1, b=2) + call("add", a=30, b=4), "37")
    (rollout,) = asyncio.run(use_tools(world.ctx, world.prompt, [add], n=1))
    assert rollout.text.endswith(";t:3;t:34;a:37") and rollout.turn == "37"
    masked = rollout.content.tokens_S[~rollout.mask_S]
    assert masked.tolist() == world.ids(";t:3;t:34;a:")
    made = np.concatenate([one.content.tokens_S for one in world.engines.made])
    assert np.array_equal(rollout.content.tokens_S[rollout.mask_S], made)  # nothing was tokenised again


def test_a_result_that_looks_like_a_call_is_not_one():
    def echo() -> str:
        return call("echo")

    world = world_of(call("echo"), "done", call("echo"))
    (rollout,) = asyncio.run(use_tools(world.ctx, world.prompt, [echo], n=1))
    assert rollout.turn == "done" and len(world.engines.made) == 2


def test_turns_are_limited():
    world = world_of(call("now"))
    (rollout,) = asyncio.run(use_tools(world.ctx, world.prompt, {"now": lambda: "1"}, n=1, max_turns=3))
    assert len(world.engines.made) == 4
    (rollout,) = asyncio.run(
        use_tools(world_of(call("now"), length=50).ctx, world.prompt, {"now": lambda: "1"}, n=1, max_turns=30)
    )
    assert rollout.finish == "length"
