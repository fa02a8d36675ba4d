"""Environments of OpenEnv behind a URL, `openenv:URL`, with the package's own client (package openenv).

    environment.args:   action    the field of an action that takes the text of a turn; default: the turn is the JSON of
                                  an action, and a turn that is no JSON of an object gets a text that says so
                        say       the field of an observation that the policy reads; default: all of it, as JSON
                        tools     true: the tools of the environment become those of the policy (its MCP tools)

Each episode is a session of its own, on the server that the URL names. Rows are seeds, as in gym.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gcore.environments.base import BadAnswer, Call, Observation, Opening, Policy, Row
from gcore.environments.mcp import schema
from gcore.environments.own import EVAL_SEED, ROWS, observation
from gcore.types import UserError

ARGS = ("action", "say", "tools")


def load(name: str, args: dict[str, Any]) -> OpenEnvironment:
    import openenv  # noqa: F401  # a message with its name, if it is not installed

    if unknown := sorted(set(args) - set(ARGS)):
        raise UserError(f"environment.args: got {', '.join(unknown)}; expected some of {', '.join(ARGS)}")
    if not name.startswith(("http://", "https://", "ws://", "wss://")):
        raise UserError(f"environment.source=openenv:{name}: expected openenv:URL of a server")
    return OpenEnvironment(name, args)


class OpenEnvironment:
    runs = False

    def __init__(self, url: str, args: Mapping[str, Any]) -> None:
        self.url, self.args = url, args

    async def rows(self, split: str, size: int | None) -> Sequence[Row] | None:
        first, episode = EVAL_SEED if split == "eval" else 0, self.episode()
        rows = []
        for seed in range(first, first + (size or ROWS)):
            opening = await episode.reset({}, seed)
            rows.append({"prompt": opening.said, "seed": seed})
        await episode.close()
        return None if rows[0]["prompt"] is None else rows

    def episode(self) -> OpenEnvEpisode:
        return OpenEnvEpisode(self.url, self.args)


class OpenEnvEpisode:
    def __init__(self, url: str, args: Mapping[str, Any]) -> None:
        from openenv.core.generic_client import GenericEnvClient
        from openenv.core.mcp_client import MCPToolClient

        self._args = args
        self._client: Any = (MCPToolClient if args.get("tools") else GenericEnvClient)(base_url=url)

    async def reset(self, row: Row, seed: int) -> Opening:
        made = await self._client.reset(seed=seed)
        tools = await self._client.list_tools() if self._args.get("tools") else []
        return Opening(self._shown(made.observation), [schema(tool) for tool in tools])

    async def step(self, text: str, calls: Sequence[Call]) -> Observation:
        if calls:
            return await self._calls(calls)
        if self._args.get("tools"):
            return Observation(done=True)
        field = self._args.get("action")
        action = {field: text} if field else _object(text)
        if action is None:
            return Observation(f"{text.strip()[-40:]!r} is no action; expected a JSON object", 0.0)
        made = await self._client.step(action)
        if not isinstance(made.done, bool):
            raise BadAnswer(f"the server answered done={made.done!r}; expected true or false")
        return observation((self._shown(made.observation), made.reward, made.done))

    async def run(self, row: Row, seed: int, policy: Policy) -> Observation:
        raise NotImplementedError

    async def close(self) -> None:
        await self._client.close()

    async def _calls(self, calls: Sequence[Call]) -> Observation:
        results, failed = [], 0
        for call in calls:
            try:
                if call.error:
                    raise RuntimeError(call.error)
                result = await self._client.call_tool(call.name, **call.arguments)
            except RuntimeError as error:  # what the tool says about its arguments is for the policy to read
                result, failed = f"error: {error}", failed + 1
            results.append(result if isinstance(result, str) else json.dumps(result, default=str))
        return Observation([{"role": "tool", "content": result} for result in results], tool_errors=failed)

    def _shown(self, seen: Any) -> str | None:
        fields = dict(seen) if isinstance(seen, Mapping) else seen.model_dump() if hasattr(seen, "model_dump") else seen
        if not isinstance(fields, dict):
            return str(fields)
        if (field := self._args.get("say")) is not None:
            if field not in fields:
                raise BadAnswer(f"an observation has {', '.join(fields)}; expected {field} (environment.args.say)")
            return str(fields[field])
        fields = {name: value for name, value in fields.items() if name not in ("done", "reward", "metadata")}
        return json.dumps(fields, default=str) if fields else None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
