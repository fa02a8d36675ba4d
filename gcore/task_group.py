"""asyncio.TaskGroup with one error: callers handle RoleDied, UserError, ..., not groups of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Ends when the body and all tasks have ended. If one of them fails, the others are cancelled, and its error is
    raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except* Exception as errors:
        raise errors.exceptions[0] from None
