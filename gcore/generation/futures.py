"""From an engine's thread back to the event loops that asked. A loop that is closed by then asked in vain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from gcore.types import Completion, UserError


def post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


def finish(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def finish_all(answers: list[tuple[asyncio.Future[Completion], Completion]]) -> None:
    for future, answer in answers:
        finish(future, answer)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        said = f"the engine failed: {type(error).__name__}: {error}"
        future.set_exception(error if isinstance(error, UserError) else RuntimeError(said))
