"""Your own environment: a Python class, made once per episode, or an object in the style of Gymnasium.

    class Game:
        tools = [...]                             optional: functions or names of methods that the policy can call
        def __init__(self, **args): ...           environment.args
        def rows(self, split): ...                optional: the dataset, rows with `prompt`; without it, rows are seeds,
                                                  if `reset` says something for a seed
        def reset(self, row, seed): ...           optional; None: the row's prompt. Otherwise text or messages
        def step(self, action): ...               the text of a turn -> (said, reward, done), with metrics as a fourth
                                                  value; Gymnasium's five values; or an Observation
        def close(self): ...                      optional

All methods may be sync or async, and take only those of their arguments that they name. A turn that calls tools is
answered with their results, and `step` is not called; a turn without calls goes to `step`. Without `step`, it ends the
episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from gcore.environments.base import BadAnswer, Call, Observation, Opening, Policy, Row, Said
from gcore.types import UserError

ROWS = 200  # of an environment without a dataset, if data.train.size does not say it
EVAL_SEED = 10**6  # the first seed of held-out rows
EXPECTED = "expected (said, reward, done), (observation, reward, terminated, truncated, info) or an Observation"


class OwnEnvironment:
    runs = False

    def __init__(self, make: Callable[[], Any], first: Any) -> None:
        """`first`: an object that was made already, to find out whether it can be."""
        self._make, self._first = make, first
        if not hasattr(self._first, "step") and not getattr(self._first, "tools", None):
            raise UserError(
                f"environment.source: {type(self._first).__name__} has neither `step` nor `tools`; expected an "
                "environment (docs/environments.md)"
            )

    def rows(self, split: str, size: int | None) -> Sequence[Row] | None:
        made = self._take()
        if not hasattr(made, "rows"):
            return seeds(made, split, size)
        rows = list(made.rows(**_named(made.rows, split=split, size=size)))
        return rows if size is None else rows[:size]

    def episode(self) -> OwnEpisode:
        return OwnEpisode(self._take)

    def _take(self) -> Any:
        made, self._first = self._first, None
        return made if made is not None else self._make()


def seeds(made: Any, split: str, size: int | None) -> Sequence[Row] | None:
    """Rows of an environment without a dataset: the prompt of a row is what `reset` says for its seed. None: it has no
    `reset` that takes a seed, or says nothing."""
    reset = getattr(made, "reset", None)
    if reset is None or inspect.iscoroutinefunction(reset) or "seed" not in _named(reset, seed=0):
        return None
    first, rows = EVAL_SEED if split == "eval" else 0, list[Row]()
    for seed in range(first, first + (size or ROWS)):
        said = opening(reset(**_named(reset, row={}, seed=seed)))
        if said is None:
            return None
        rows.append({"prompt": said, "seed": seed})
    return rows


def opening(said: Any) -> Said:
    """What `reset` returned: in Gymnasium's style with a dict of information."""
    if isinstance(said, tuple) and len(said) == 2 and isinstance(said[1], Mapping):
        said = said[0]
    return as_said(said)


class OwnEpisode:
    """`make`: called in the thread of the episode, as all sync methods are: some libraries need one thread."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._game: Any = None
        self._tools: dict[str, Callable[..., Any]] = {}
        self._thread = ThreadPoolExecutor(1, "episode")

    async def reset(self, row: Row, seed: int) -> Opening:
        self._game = await self._call(self._make)
        if hasattr(self._game, "action_space") and hasattr(self._game.action_space, "seed"):
            self._game.action_space.seed(seed)
        tools = [tool if callable(tool) else getattr(self._game, tool) for tool in getattr(self._game, "tools", ())]
        self._tools = {tool.__name__: tool for tool in tools}
        said = None
        if hasattr(self._game, "reset"):
            said = opening(await self._call(self._game.reset, row=row, seed=seed))
        return Opening(said, schemas(self._tools))

    async def step(self, text: str, calls: Sequence[Call]) -> Observation:
        if calls:
            results = await asyncio.gather(*(self._result(call) for call in calls))
            failed = sum(not fine for _, fine in results)
            messages = [{"role": "tool", "content": result} for result, _ in results]
            return Observation(messages, done=bool(getattr(self._game, "done", False)), tool_errors=failed)
        if not hasattr(self._game, "step"):
            return Observation(done=True)
        return observation(await self._call(self._game.step, text))

    async def run(self, row: Row, seed: int, policy: Policy) -> Observation:
        raise NotImplementedError

    async def close(self) -> None:
        try:
            if hasattr(self._game, "close"):
                await self._call(self._game.close)
        finally:
            self._thread.shutdown(wait=False)

    async def _result(self, call: Call) -> tuple[str, bool]:
        """The text of a result, and whether the call was one. What a tool raises is for the policy to read."""
        if call.error:
            return f"error: {call.error}", False
        if call.name not in self._tools:
            return f"error: no tool {call.name!r}; expected one of {', '.join(sorted(self._tools))}", False
        function = self._tools[call.name]
        try:
            inspect.signature(function).bind(**call.arguments)
            result = await self._in_thread(function, **call.arguments)
        except Exception as error:
            return f"error: {type(error).__name__}: {error}", False
        return result if isinstance(result, str) else json.dumps(result, default=str), True

    async def _call(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        return await self._in_thread(function, *given, **_named(function, **named))

    async def _in_thread(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """A cancelled call waits for the end of a sync function: only the end of its process ends a thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*given, **named)
        loop = asyncio.get_running_loop()
        running = asyncio.ensure_future(loop.run_in_executor(self._thread, partial(function, *given, **named)))
        cancelled = False
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        made = running.result()
        return await made if inspect.isawaitable(made) else made


def _named(function: Callable[..., Any], **given: Any) -> dict[str, Any]:
    """Those of the arguments that the function names; all if it has **kwargs, or if it cannot be asked."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return given
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given
    return {p.name: given[p.name] for p in parameters if p.name in given}


def observation(answer: Any) -> Observation:
    """What `step` returned. Raises BadAnswer."""
    match answer:
        case Observation():
            made = answer
        case (said, reward, bool(terminated), bool(truncated), dict() as info):
            made = Observation(as_said(said), reward, terminated or truncated, numbers_of(info))
        case (said, reward, done):
            made = Observation(as_said(said), reward, bool(done))
        case (said, reward, done, dict() as metrics):
            made = Observation(as_said(said), reward, bool(done), numbers_of(metrics))
        case _:
            raise BadAnswer(f"step returned {short(answer)}; {EXPECTED}")
    reward = made.reward
    if reward is not None and not (isinstance(reward, numbers.Real) and math.isfinite(reward)):
        raise BadAnswer(f"step returned the reward {short(reward)}; expected a finite number")
    return Observation(
        made.said, None if reward is None else float(reward), made.done, dict(made.metrics), made.tool_errors
    )


def as_said(value: Any) -> Said:
    match value:
        case None | str():
            return value
        case dict() if "role" in value:
            return [value]
        case list() if all(isinstance(item, Mapping) and "role" in item for item in value):
            return [dict(item) for item in value]
        case _ if hasattr(value, "ndim") or isinstance(value, list | tuple | dict | bytes):
            raise BadAnswer(f"it said {short(value)}; expected text or messages with a role")
    return str(value)


def numbers_of(info: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in info.items() if isinstance(value, numbers.Real)}


def schemas(tools: Mapping[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    if not tools:
        return []
    from gcore.workflows.tools import tool_schema

    return [tool_schema(function, name) for name, function in tools.items()]


def short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else text[:117] + "..."
