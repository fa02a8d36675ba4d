"""What a server sends, read up to a limit: all that the package reads by HTTP is read here. Total times are set too.

A server that is broken, or not ours, may send without end, or a byte now and then.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import ClientResponse

JSON_BYTES = 8 << 20  # longest answer of a reward server or a judge


async def read_body(response: ClientResponse, most: int) -> bytes | None:
    """The body; None if it has more than `most` bytes. The caller's timeout is the total time."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > most:
            response.close()  # else the rest would be read, to use the connection again
            return None
    return bytes(body)


def download(url: str, most: int, total_s: float) -> bytes | None:
    """The body of a GET, from any thread; None if it has more than `most` bytes. Raises OSError or ValueError."""
    with ThreadPoolExecutor(1) as thread:  # the caller's may run an event loop
        return thread.submit(lambda: asyncio.run(_get(url, most, total_s))).result()


async def _get(url: str, most: int, total_s: float) -> bytes | None:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=total_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
            session.get(url, raise_for_status=True) as response,
        ):
            return await read_body(response, most)
    except TimeoutError:
        raise OSError(f"it took more than {total_s:g} s") from None
    except aiohttp.ClientResponseError as error:
        raise OSError(f"HTTP status {error.status} {error.message}") from None
    except aiohttp.ClientError as error:
        raise OSError(f"{type(error).__name__}: {error}") from None
