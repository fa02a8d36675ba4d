"""Bytes between a sandbox and this process: output that is bounded, folders, connections to one address."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import tarfile

FLOOD = 1024  # times the output that is kept: a command that writes more is stopped
CONNECTIONS = 64  # at the same time, to one address


class Kept:
    """The beginning and the end of an output."""

    def __init__(self, most: int) -> None:
        self.most, self.total, self._half = most, 0, most // 2
        self._head, self._tail = bytearray(), bytearray()

    def add(self, chunk: bytes) -> None:
        self.total += len(chunk)
        space = self._half - len(self._head)
        self._head += chunk[:space]
        self._tail += chunk[space:]
        if len(self._tail) > 2 * self._half + (1 << 16):
            del self._tail[: -self._half]

    @property
    def flooded(self) -> bool:
        return self.total > FLOOD * self.most

    @property
    def cut(self) -> int:
        return max(0, self.total - 2 * self._half)

    def bytes(self) -> bytes:
        return bytes(self._head + self._tail[-self._half :])


class Connections:
    """Passes connections of programs on to the address that their sandbox may reach."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port, self._places = host, port, asyncio.Semaphore(CONNECTIONS)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._places:
            with contextlib.suppress(OSError), contextlib.closing(writer):
                to_reader, to_writer = await asyncio.open_connection(self._host, self._port)
                with contextlib.closing(to_writer):
                    await asyncio.gather(_pump(reader, to_writer), _pump(to_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()


@functools.lru_cache(maxsize=8)
def packed_folder(folder: str) -> bytes:
    """The files of a folder of this machine, read once."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.add(folder, ".")
    return data.getvalue()
