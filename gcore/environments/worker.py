"""The main program of a process of environments, which its parent (hosts.py) can kill.

    setup: source, args ──load──> Environment        requests: (CALL, number, episode, method, arguments)

Methods of environments may be async, which run on the event loop of the main thread, or sync, which run in a thread of
their episode. The calls of one episode run one after the other.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from gcore.environments.adapters import load
from gcore.environments.base import Environment, Episode, Trouble
from gcore.observe.logs import NOT_USERS
from gcore.processes import BAD, READY, AsyncCalls, Connection
from gcore.types import UserError

TOO_LONG = "context_length_exceeded"
CANCELLED = "cancelled"  # kind of a reply: the caller has stopped waiting


def main() -> None:
    connection = Connection(int(sys.argv[1]), _failure)
    source, args = connection.begin()
    calls = AsyncCalls(connection)
    connection.deliver_to(calls.deliver)
    try:
        environment = load(source, args)
    except BaseException as error:
        connection.reply(0, BAD, str(error) if isinstance(error, UserError) else _failure(error)[1])
        return
    connection.reply(0, READY, None)
    calls.serve(_Episodes(environment).answer)


class _Episodes:
    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.open: dict[int, tuple[Episode, asyncio.Lock]] = {}

    async def answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """`number`: of the episode; 0: a question to the environment itself."""
        if not number:
            if method == "runs":
                return self.environment.runs
            rows = await asyncio.to_thread(self.environment.rows, *arguments)
            return await rows if inspect.isawaitable(rows) else rows
        if method == "close" and number not in self.open:
            return None
        if number not in self.open:
            self.open[number] = self.environment.episode(), asyncio.Lock()
        episode, lock = self.open[number]
        async with lock:  # a call that was cancelled may still be at work
            if method == "close":
                del self.open[number]
            return await getattr(episode, method)(*arguments)


def _failure(error: BaseException) -> tuple[str, Any, str]:
    """The error as text: its class may not exist in the parent."""
    if isinstance(error, asyncio.CancelledError):
        return CANCELLED, "", ""
    trace = "".join(traceback.format_exception(error))[-4000:]
    if isinstance(error, Trouble):
        return BAD, f"{error.cause}: {error}", trace
    text = " ".join(str(error).split())[:300]
    if getattr(error, "code", None) == TOO_LONG:  # of a client of the policy's endpoint
        return BAD, f"context_exceeded: {text}", trace
    return BAD, f"raised: raised {type(error).__name__}{': ' if text else ''}{text}{_line(trace)}", trace


def _line(trace: str) -> str:
    """Where the user's code raised, as ` at game.py:12 in step`."""
    for file, line, name in reversed(re.findall(r'File "([^"<]+)", line (\d+), in (\S+)', trace)):
        if "site-packages" not in file and not any(Path(file).is_relative_to(folder) for folder in NOT_USERS):
            return f" at {Path(file).name}:{line} in {name}"
    return ""


if __name__ == "__main__":
    main()
