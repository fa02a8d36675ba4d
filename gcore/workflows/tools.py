"""Tool use: the policy calls tools in its response, all calls of a turn run at once, and it continues with the results.

    use_tools: generate ──> parse ──> calls ──run_tools (at once)──> results in the order of the calls ──> proceed ...
                              └─ no call: the sample is finished

The results are masked from the loss. A call that cannot be parsed, an unknown tool or a tool that raises gives the
policy a text that says so; the sample continues.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from gcore.protocols import Context
from gcore.types import Message, Prompt, Rollout
from gcore.workflows.tool_formats import HERMES, ToolCall

THREADS = ThreadPoolExecutor(256, "tool")  # a tool that hangs keeps its thread: not asyncio's own ones
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


Parser = Callable[[str], Sequence[ToolCall]]
Tools = Mapping[str, Callable[..., Any]]
Feedback = Callable[[Sequence[str]], str | Sequence[Message]]


def parse_tool_calls(text: str) -> list[ToolCall]:
    """All calls `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` of a response, as Hermes and Qwen write."""
    return HERMES.find_calls(text)[0]


async def run_tools(calls: Sequence[ToolCall], tools: Tools, timeout_s: float = 30.0) -> list[str]:
    """The results in the order of the calls, which run at the same time: sync functions in threads."""
    return list(await asyncio.gather(*(_run(call, tools, timeout_s) for call in calls)))


async def _run(call: ToolCall, tools: Tools, timeout_s: float) -> str:
    if call.error:
        return f"error: {call.error}"
    if call.name not in tools:
        return f"error: no tool {call.name!r}; expected one of {', '.join(sorted(tools))}"
    try:
        async with asyncio.timeout(timeout_s):
            function = tools[call.name]
            inspect.signature(function).bind(**call.arguments)
            is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
            made = function(**call.arguments) if is_async else await _in_thread(partial(function, **call.arguments))
            result = await made if inspect.isawaitable(made) else made
    except TimeoutError:
        return f"error: {call.name} did not answer within {timeout_s:g} s"
    except Exception as error:  # what a tool says about its arguments is for the policy to read
        return f"error: {type(error).__name__}: {error}"
    return result if isinstance(result, str) else json.dumps(result, default=str)


async def _in_thread(function: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(THREADS, contextvars.copy_context().run, function)


def as_messages(results: Sequence[str]) -> list[Message]:
    """One message of the role `tool` per result, for the chat template."""
    return [{"role": "tool", "content": result} for result in results]


async def use_tools(
    ctx: Context,
    prompt: Prompt,
    tools: Tools | Sequence[Callable[..., Any]],
    *,
    n: int | None = None,
    max_turns: int = 8,
    parse: Parser | None = None,
    feedback: Feedback = as_messages,
    describe: bool = True,
    timeout_s: float = 30.0,
    **params: Any,
) -> list[Rollout]:
    """`n` samples that may call tools for up to `max_turns` turns; then they are rewarded with `ctx.reward`.

    `tools`: functions by name, or a list of them. `describe`: pass their schemas to the chat template.
    `parse`: text of a turn -> calls; without it, by the format of the policy's chat template (tool_formats.py).
    `feedback`: results -> messages, or text for a model without a chat template.
    """
    named = tools if isinstance(tools, Mapping) else {function.__name__: function for function in tools}
    described = [tool_schema(function, name) for name, function in named.items()] if describe else []
    group = await ctx.generate(prompt, n, **({"tools": described} if describe else {}), **params)

    async def converse(rollout: Rollout) -> Rollout:
        for _ in range(max_turns):
            if rollout.finish != "stop":
                break
            calls = ctx.read(rollout, described).calls if parse is None else parse(rollout.turn)
            if not calls:
                break
            results = await run_tools(calls, named, timeout_s)
            rollout = await ctx.proceed(rollout, feedback(results), **params)
        return rollout

    return list(await asyncio.gather(*map(converse, group)))


def tool_schema(function: Callable[..., Any], name: str | None = None) -> dict[str, Any]:
    """The function in OpenAI's form, from its signature, type hints and the first paragraph of its docstring."""
    properties, required = {}, []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        properties[parameter.name] = {"type": JSON_TYPES.get(parameter.annotation, "string")}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    text = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    return {
        "type": "function",
        "function": {
            "name": name or function.__name__,
            "description": text,
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }
