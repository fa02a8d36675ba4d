"""Tools of an MCP server, `mcp:COMMAND` (stdio) or `mcp:URL` (streamable HTTP), with the official SDK (package mcp).

    environment.args:   env, cwd        of the command; `python` at its beginning is the interpreter of the run
                        headers         of the URL
                        tools           names of those that the policy gets; default: all
                        per_episode     true: each episode starts its own server, which has GCORE_ROW (JSON) and
                                        GCORE_SEED in its environment; false: one per process of environments
                        game            file.py:NAME: a class of your own with rows, reset and step, as in own.py

A server has only tools: without `game`, a turn without calls ends the episode, and the rewards of the recipe score it.
Results that are errors are text for the policy. A server that dies is a failure, and the next episode starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gcore.environments.base import Call, Observation, Opening, Policy, Row, Trouble
from gcore.environments.own import OwnEpisode
from gcore.types import UserError
from gcore.user_files import load_function, one_line

REFUSALS = (-32602, -32601)  # invalid parameters, no such method: what the policy has asked for
ARGS = ("env", "cwd", "headers", "tools", "per_episode", "game")


def load(name: str, args: dict[str, Any]) -> McpEnvironment:
    import mcp  # noqa: F401  # a message with its name, if it is not installed

    if unknown := sorted(set(args) - set(ARGS)):
        raise UserError(f"environment.args: got {', '.join(unknown)}; expected some of {', '.join(ARGS)}")
    if not name.strip():
        raise UserError("environment.source=mcp:: expected mcp:COMMAND or mcp:URL")
    return McpEnvironment(name, args)


class McpEnvironment:
    runs = False

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        self.name, self.args = name, args
        self._shared: Server | None = None
        self._starting = asyncio.Lock()
        game = args.get("game")
        self._make: Callable[[], Any] = load_function(game, "environment.args.game") if game else NoGame

    def rows(self, split: str, size: int | None) -> Sequence[Row] | None:
        made = self._make()
        return list(made.rows(split, size)) if hasattr(made, "rows") else None

    def episode(self) -> McpEpisode:
        return McpEpisode(self, self._make)

    async def server(self, row: Row, seed: int) -> Server:
        if self.args.get("per_episode"):
            more = {"GCORE_ROW": json.dumps(dict(row), default=str), "GCORE_SEED": str(seed)}
            return await Server(self.name, self.args, more).start()
        async with self._starting:
            if self._shared is None or not self._shared.alive:
                self._shared = await Server(self.name, self.args).start()
            return self._shared


class NoGame:
    """Nothing but the tools of the server."""


class McpEpisode(OwnEpisode):
    def __init__(self, environment: McpEnvironment, make: Callable[[], Any]) -> None:
        super().__init__(make)
        self._environment = environment
        self._server: Server | None = None

    async def reset(self, row: Row, seed: int) -> Opening:
        said = (await super().reset(row, seed)).said
        self._server = await self._environment.server(row, seed)
        return Opening(said, self._server.schemas)

    async def step(self, text: str, calls: Sequence[Call]) -> Observation:
        return await super().step(text, calls)

    async def run(self, row: Row, seed: int, policy: Policy) -> Observation:
        raise NotImplementedError

    async def close(self) -> None:
        await super().close()
        if self._environment.args.get("per_episode") and self._server is not None:
            await self._server.stop()

    async def _result(self, call: Call) -> tuple[str, bool]:
        assert self._server is not None
        names = [schema["function"]["name"] for schema in self._server.schemas]
        if call.error:
            return f"error: {call.error}", False
        if call.name not in names:
            return f"error: no tool {call.name!r}; expected one of {', '.join(sorted(names))}", False
        return await self._server.call(call.name, dict(call.arguments))


class Server:
    """A connection. It is opened and closed by one task, as the SDK wants it."""

    def __init__(self, name: str, args: Mapping[str, Any], more: Mapping[str, str] | None = None) -> None:
        self._name, self._args, self._more = name, args, dict(more or {})
        self.schemas: list[dict[str, Any]] = []
        self._session: Any = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done() and not self._end.is_set()

    async def start(self) -> Server:
        self._task = asyncio.ensure_future(self._live())
        await asyncio.shield(self._opened)
        return self

    async def stop(self) -> None:
        self._end.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=5)

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """The text of the result, and whether it is no error. Raises Trouble if the server is gone."""
        from mcp.shared.exceptions import MCPError

        asked = asyncio.ensure_future(self._session.call_tool(name, arguments))
        assert self._task is not None
        try:
            await asyncio.wait([asked, self._task], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise Trouble("died", "the MCP server ended")
            result = asked.result()
        except MCPError as error:
            if getattr(error, "error", error).code in REFUSALS:
                return f"error: {error}", False
            self._end.set()  # the next episode makes another connection
            raise Trouble("died", f"the MCP server {self._name} is gone: {error}") from error
        finally:
            asked.cancel()
        return shown(result), not _field(result, "is_error", "isError")

    async def _live(self) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                streams = await stack.enter_async_context(self._transport())
                from mcp import ClientSession

                self._session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
                await self._session.initialize()
                tools = (await self._session.list_tools()).tools
                self.schemas = [schema(tool) for tool in tools if tool.name in self._args.get("tools", [tool.name])]
                self._opened.set_result(None)
                await self._end.wait()
        except BaseException as error:
            if self._opened.done():  # the connection broke, or its end was not clean
                return
            self._opened.set_exception(Trouble("not_started", f"the MCP server {self._name}: {_cause(error)}"))
            self._opened.exception()

    def _transport(self) -> Any:
        if self._name.startswith(("http://", "https://")):
            from mcp.client import streamable_http

            if headers := self._args.get("headers"):
                import httpx2

                client = httpx2.AsyncClient(headers=headers)
                return streamable_http.streamable_http_client(self._name, http_client=client)
            return streamable_http.streamable_http_client(self._name)
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.stdio import get_default_environment

        command, *rest = shlex.split(self._name)
        command = sys.executable if command in ("python", "python3") else command
        env = {**get_default_environment(), **self._args.get("env", {}), **self._more}
        return stdio_client(StdioServerParameters(command=command, args=rest, env=env, cwd=self._args.get("cwd")))


def schema(tool: Any) -> dict[str, Any]:
    """An MCP tool in OpenAI's form."""
    parameters = _field(tool, "input_schema", "inputSchema") or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def shown(result: Any) -> str:
    """The text of a result; of what is no text, its type."""
    return "\n".join(getattr(part, "text", None) or f"[{part.type}]" for part in result.content)


def _field(value: Any, *names: str) -> Any:
    """Versions 1 and 2 of the SDK name fields in two ways."""
    return next((getattr(value, name) for name in names if hasattr(value, name)), None)


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return one_line(error)
