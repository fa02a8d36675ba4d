"""Calls a user's reward function and reads its answer. The main program of a worker, which its parent can kill.

    socket ──reader thread──> sync functions:  a queue ──> main thread, one call at a time (signal.alarm works there)
                              async functions: the event loop of the main thread, many calls at once
    end of the socket: the parent is gone. The reader kills this process and all processes that it started.

The parent sends one setup frame, then calls; replies contain the calls' numbers (gcore/processes.py).
This module imports neither torch nor ray; users' functions may.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import queue
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore.content.media import ArrayRef
from gcore.processes import ANSWER, BAD, READY, REFUSED, AsyncCalls, Connection
from gcore.rewarding.signatures import Instance, LoadedReward, load_reward
from gcore.rewarding.source import Answer, BadAnswer, is_finite, number, scalar, short
from gcore.types import RewardError, UserError

NO_ERRORS = (
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
)  # `except Exception` does not see them


# ---- a call, and what it returned -----------------------------------------------------------------------------------


def call_all(loaded: LoadedReward, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What the function returns in each call, which may be awaitable. sys.exit() in it is a failed call: it must not
    end the process, as it would silently; nor must others of NO_ERRORS hang the run."""
    try:
        return [
            loaded.function(**{name: _as_argument(loaded, name, value) for name, value in call.items()})
            for call in calls
        ]
    except (*NO_ERRORS, StopIteration) as error:  # which no future takes
        raise BadAnswer(f"raised {short(error)}").with_traceback(error.__traceback__) from error


def _as_argument(loaded: LoadedReward, name: str, value: Any) -> Any:
    """Token ids become lists only here: arrays are faster to send to another process. Pictures are read here."""
    if loaded.style == "trl" and name == "completion_ids":
        return [ids.tolist() for ids in value]
    if isinstance(value, list) and any(isinstance(item, ArrayRef) for item in value):
        return [np.array(item.read()) if isinstance(item, ArrayRef) else item for item in value]
    return value


async def await_all(answers: Sequence[Any]) -> list[Any]:
    """All awaitable answers at once."""

    async def awaited(answer: Any) -> Any:
        try:
            return await answer if inspect.isawaitable(answer) else answer
        except NO_ERRORS as error:  # asyncio would end the event loop with it, or wait for ever
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the call was cancelled
            raise BadAnswer(f"raised {short(error)}").with_traceback(error.__traceback__) from error

    return list(await asyncio.gather(*map(awaited, answers)))


def read_answers(loaded: LoadedReward, answers: Sequence[Any], siblings: int) -> Answer:
    """The results of the calls as rewards. Raises BadAnswer."""
    return _read_verl(answers) if loaded.style == "verl" else read_batch(answers[0], siblings)


def _read_verl(answers: Sequence[Any]) -> Answer:
    values, extras = [], []
    for answer in answers:
        score, others = answer, {}
        if isinstance(answer, Mapping):
            if "score" not in answer:
                raise BadAnswer(f"returned {short(answer)}; expected a number or a dict with 'score'")
            score, others = answer["score"], {name: scalar(v) for name, v in answer.items() if name != "score"}
        extras.append({name: float(value) for name, value in others.items() if is_finite(value)})
        values.append(number(score, answer))
    return Answer(values, extras)


def read_batch(answer: Any, num: int) -> Answer:
    """A list of rewards, or OpenRLHF's dict: `rewards`, and other lists of numbers next to it or in `extra_logs`."""
    extras: list[dict[str, float]] = [{} for _ in range(num)]
    rewards = answer
    if isinstance(answer, Mapping):
        if "rewards" not in answer:
            raise BadAnswer(f"returned {short(answer)}; expected a list, or a dict with 'rewards'")
        rewards = answer["rewards"]
        logs = answer.get("extra_logs")
        others = {k: v for k, v in answer.items() if k not in ("rewards", "extra_logs")}
        for name, column in {**others, **(logs if isinstance(logs, Mapping) else {})}.items():
            values = _as_list(column)
            if values is not None and len(values) == num:
                for extra, value in zip(extras, map(scalar, values), strict=True):
                    if is_finite(value):
                        extra[name] = float(value)
    listed = _as_list(rewards)
    if listed is None:
        raise BadAnswer(f"returned {short(answer)}; expected a list of {num} numbers")
    if len(listed) != num:
        raise BadAnswer(f"returned {len(listed)} rewards for {num} completions: {short(answer)}")
    return Answer([number(value, answer) for value in listed], extras)


def _as_list(value: Any) -> list[Any] | None:
    """Lists, tuples, arrays and tensors as a list; None for anything else (a string, a number, a generator)."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


# ---- the main program of a worker -----------------------------------------------------------------------------------


def main() -> None:
    connection = Connection(int(sys.argv[1]), _failure)
    origins, is_async = connection.begin()
    calls = AsyncCalls(connection) if is_async else _SyncCalls(connection)
    connection.deliver_to(calls.deliver)
    try:
        functions = {key: load_reward(*origin) for key, origin in origins.items()}
        for loaded in functions.values():
            if isinstance(loaded.function, Instance):
                loaded.function.make()  # counts in the start timeout, not in the first call's timeout
    except BaseException as error:
        connection.reply(0, BAD, str(error) if isinstance(error, UserError) else _failure(error)[1])
        return

    async def answer(function: str, siblings: int, arguments: bytes) -> Answer:
        loaded = functions[function]
        return read_answers(loaded, await await_all(call_all(loaded, pickle.loads(arguments))), siblings)

    connection.reply(0, READY, None)
    if isinstance(calls, AsyncCalls):
        calls.serve(answer)
    else:
        calls.serve(functions)


class _SyncCalls:
    def __init__(self, connection: Connection):
        self.connection = connection
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.deliver = self.requests.put

    def serve(self, functions: Mapping[str, LoadedReward]) -> None:
        while True:
            _, number, function, siblings, arguments = self.requests.get()
            try:
                answers = call_all(functions[function], pickle.loads(arguments))
                if any(map(inspect.isawaitable, answers)):
                    answers = asyncio.run(await_all(answers))
                reply = ANSWER, read_answers(functions[function], answers, siblings), ""
            except BaseException as error:  # includes SystemExit: sys.exit() in a function is a failed call
                reply = _failure(error)
            self.connection.reply(number, *reply)
            signal.alarm(0)  # an alarm left by a function would fire in the next call


def _failure(error: BaseException) -> tuple[str, Any, str]:
    """The error as text: an exception may not pickle, and its class may not exist in the parent."""
    if isinstance(error, RewardError):
        return REFUSED, str(error), ""
    try:
        text = str(error) if isinstance(error, BadAnswer) else f"raised {short(error)}"
    except BaseException:  # a user's __repr__ may raise
        text = f"raised {type(error).__name__}"
    try:
        trace = "".join(traceback.format_exception(error))[-4000:]
    except BaseException:
        trace = ""
    return BAD, text, trace


if __name__ == "__main__":
    main()
