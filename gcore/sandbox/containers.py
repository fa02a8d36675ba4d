"""Sandboxes in containers, by the HTTP interface of Docker, which Podman has too.

    run ──exec──> the daemon ──> a process of the container        snapshot ──commit──> image ──create──> restore
    reach: a program inside passes connections on to a socket in a folder that the container shares with this process

Files are read and written by processes of the container, so a link that a program has made leads to nothing outside.
Containers of a process that has ended are removed by the next one on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import json
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote

import aiohttp

from gcore.config.sandbox import SandboxSettings
from gcore.sandbox.base import DISK, KILLED, MEMORY, OUTPUT, PROCESSES, START, TIME, WORK, Command, Result, SandboxError
from gcore.sandbox.transport import Connections, Kept, packed_folder

SOCKETS = ("/var/run/docker.sock", "/run/podman/podman.sock")
VERSION = "/v1.41"
LABEL = "gcore.sandbox"  # of containers: the process that made them
SHARED = "/run/gcore"  # the folder of the sockets of `reach`, inside
FILE_S, WATCH_S, POLL_S, OPEN_FILES = 60.0, 2.0, 0.1, 1024
# The first process: it reaps others, and outlives KILL. A shell that cannot fork exits: then it begins again.
WAIT = """trap '' INT; trap 'exec /bin/sh -c "$0" "$0"' EXIT; while :; do sleep 2147483647 & wait; done"""
KILL = "kill -9 -1"  # all but the first process, and this one
# the exit codes are those of errors, for OSError
READ = '[ -e "$0" ] || exit 2; [ -d "$0" ] && exit 21; [ -f "$0" ] || exit 22; [ -r "$0" ] || exit 13; exec cat "$0"'
WRITE = (
    'mkdir -p "$(dirname "$0")" || exit 20; [ -d "$0" ] && exit 21; [ ! -e "$0" ] || [ -f "$0" ] || exit 22; '
    'cat > "$0" || exit 5'
)
UNSTARTED = "unable to start container process"  # what runc says
COUNT_KILLED = "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null; true"
FORWARD = """
import socket, sys, threading
def pump(a, b):
    try:
        while data := a.recv(65536): b.sendall(data)
        b.shutdown(socket.SHUT_WR)
    except OSError: pass
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
while True:
    a, b = listener.accept()[0], socket.socket(socket.AF_UNIX)
    b.connect(sys.argv[2])
    for pair in ((a, b), (b, a)): threading.Thread(target=pump, args=pair, daemon=True).start()
"""


class DaemonError(RuntimeError):
    """An answer of the daemon that is no success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (status {status})")
        self.status = status


class ContainerSandboxes:
    """Implements Sandboxes. `args.socket`: of the daemon; `args.host_config`: more keys of Docker's HostConfig, such as
    {"Runtime": "runsc"}."""

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        known = [path for path in SOCKETS if os.path.exists(path)]
        self.daemon = Daemon(str(settings.args.get("socket", (known or SOCKETS)[0])))
        self._cleaned = False

    def problem(self) -> str | None:
        if self.settings.image is None:
            return "sandbox.image is not set; expected an image of the daemon, such as python:3.12-slim"
        try:
            self.daemon.ask_now(f"/images/{quote(self.settings.image, safe='')}/json")
        except DaemonError as error:
            if error.status == 404:
                return f"the daemon has no image {self.settings.image}; pull it first"
            return str(error)
        except OSError as error:
            return f"no daemon of Docker or Podman answers at {self.daemon.path}: {error.strerror or error}"
        return None

    async def start(self) -> Container:
        if not self._cleaned:
            self._cleaned = True
            await self._remove_stale()
        box = Container(self.settings, self.daemon)
        try:
            await box.begin(str(self.settings.image))
        except BaseException:
            await box.stop()
            raise
        return box

    async def _remove_stale(self) -> None:
        with contextlib.suppress(DaemonError):
            filters = quote(json.dumps({"label": [LABEL]}))
            for each in await self.daemon.ask("GET", f"/containers/json?all=1&filters={filters}"):
                host, _, pid = str(each["Labels"].get(LABEL, "")).rpartition(":")
                if host == platform.node() and not os.path.exists(f"/proc/{pid}"):
                    with contextlib.suppress(DaemonError):
                        await self.daemon.ask("DELETE", f"/containers/{each['Id']}?force=1&v=1")


class Container:
    """Implements Sandbox."""

    def __init__(self, settings: SandboxSettings, daemon: Daemon) -> None:
        self.settings, self._daemon = settings, daemon
        self._id = ""
        self._shared = tempfile.mkdtemp(prefix="gcore-")
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._snapshots: list[str] = []
        self._killed = 0  # processes, by the kernel, for their memory
        self._turn = asyncio.Lock()

    @property
    def alive(self) -> bool:
        return bool(self._id)

    async def begin(self, image: str) -> None:
        limits = self.settings.limits
        os.chmod(self._shared, 0o755)
        body = {
            "Image": image,
            "Entrypoint": ["/bin/sh", "-c", WAIT, WAIT],
            "Cmd": [],
            "WorkingDir": WORK,
            "Env": ["HOME=" + WORK],
            "Labels": {LABEL: f"{platform.node()}:{os.getpid()}"},
            "HostConfig": {
                "NetworkMode": "none",
                "Memory": limits.memory_mb << 20,
                "MemorySwap": limits.memory_mb << 20,
                "NanoCpus": limits.cpus * 10**9,
                "PidsLimit": limits.processes + 2,  # the first one, and what it waits for
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "ShmSize": 64 << 20,
                "Binds": [f"{self._shared}:{SHARED}:ro", *(f"{path}:{path}:ro" for path in self.settings.read_only)],
                "Ulimits": [
                    {"Name": "nofile", "Soft": OPEN_FILES, "Hard": OPEN_FILES},
                    {"Name": "fsize", "Soft": limits.disk_mb << 20, "Hard": limits.disk_mb << 20},
                    {"Name": "core", "Soft": 0, "Hard": 0},
                ],
                **self.settings.args.get("host_config", {}),
            },
        }
        try:
            self._id = (await self._daemon.ask("POST", "/containers/create", body))["Id"]
            await self._daemon.ask("POST", f"/containers/{self._id}/start")
        except DaemonError as error:
            await self._remove()
            raise SandboxError(START, str(error)) from None
        self._killed = 0

    async def run(
        self,
        command: Command,
        *,
        seconds: float | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> Result:
        limits = self.settings.limits
        async with self._turn:
            words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
            variables = [f"{name}={value}" for name, value in (env or {}).items()]
            kept = Kept(limits.output_kb << 10)
            try:
                code, cause = await self._exec(words, kept, stdin, variables, seconds or limits.seconds, watch=True)
            except BaseException:
                await asyncio.shield(self._kill_all())
                raise
            if not cause and code:
                cause = await self._cause(code)
            if cause in (TIME, OUTPUT, MEMORY, PROCESSES, DISK):
                await self._kill_all()
            return Result(None if cause in (TIME, OUTPUT, KILLED, PROCESSES) else code, kept.bytes(), cause, kept.cut)

    async def read(self, path: str, most: int = 16 << 20) -> bytes:
        kept = Kept(2 * most)
        await self._file(READ, path, kept)
        if len(kept.bytes()) > most or kept.cut:
            raise OSError(errno.EFBIG, f"the file has more than {most} bytes", path)
        return kept.bytes()

    async def write(self, path: str, data: bytes) -> None:
        await self._file(WRITE, path, Kept(1 << 10), data)

    async def put(self, folder: str) -> None:
        data = await asyncio.to_thread(packed_folder, folder)
        code, cause = await self._exec(["tar", "-x", "-C", WORK, "--no-same-owner"], Kept(1 << 10), data, [], FILE_S)
        if code:
            raise SandboxError(cause or DISK, "the files could not be copied into it (tar of the image failed)")

    async def snapshot(self) -> str:
        async with self._turn:
            made = await self._call("POST", f"/commit?container={self._id}&pause=1", {})
        self._snapshots.append(made["Id"])
        return str(made["Id"])

    async def restore(self, snapshot: str) -> None:
        async with self._turn:
            await self._remove()
            await self.begin(snapshot)
            await self._listen()

    async def reach(self, host: str, port: int) -> tuple[str, int]:
        if (host, port) not in self._servers:
            path = f"{self._shared}/{port}"
            self._servers[host, port] = await asyncio.start_unix_server(Connections(host, port), path)
            os.chmod(path, 0o777)
            await self._listen()
        return "127.0.0.1", port

    async def stop(self) -> None:
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        await self._remove()
        for image in self._snapshots:
            with contextlib.suppress(DaemonError):
                await self._daemon.ask("DELETE", f"/images/{image}?force=1")
        self._snapshots.clear()
        shutil.rmtree(self._shared, ignore_errors=True)

    # --- the daemon

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        if not self._id:
            raise SandboxError(KILLED, "it has ended")
        try:
            return await self._daemon.ask(method, path, body)
        except DaemonError as error:
            if error.status == 404 or not await self._runs():
                raise SandboxError(KILLED, str(error)) from None
            raise

    async def _runs(self) -> bool:
        with contextlib.suppress(DaemonError):
            return bool((await self._daemon.ask("GET", f"/containers/{self._id}/json"))["State"]["Running"])
        return False

    async def _remove(self) -> None:
        name, self._id = self._id, ""
        if name:
            with contextlib.suppress(DaemonError):
                await self._daemon.ask("DELETE", f"/containers/{name}?force=1&v=1")

    async def _exec(
        self, command: list[str], kept: Kept, stdin: bytes, env: list[str], seconds: float, watch: bool = False
    ) -> tuple[int | None, str]:
        """Its exit code, and why it was stopped."""
        body = {"AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "Cmd": command, "Env": env}
        name = (await self._call("POST", f"/containers/{self._id}/exec", {**body, "WorkingDir": WORK}))["Id"]
        deadline, check_at = time.monotonic() + seconds, time.monotonic() + WATCH_S
        try:
            async with self._daemon.stream(f"/exec/{name}/start", {"Detach": False, "Tty": False}) as (reader, writer):
                feeding = asyncio.ensure_future(_feed(writer, stdin))
                reading = asyncio.ensure_future(_read(reader, kept))
                try:
                    while True:
                        await asyncio.wait([reading], timeout=min(POLL_S, max(0.0, deadline - time.monotonic())))
                        # a process that was left behind may hold the output: the end of the command counts
                        state = await self._call("GET", f"/exec/{name}/json")
                        if not state["Running"] and state["ExitCode"] is not None:
                            await asyncio.wait([reading], timeout=POLL_S)
                            break
                        if kept.flooded:
                            return None, OUTPUT
                        if time.monotonic() >= deadline:
                            return None, TIME
                        if watch and time.monotonic() >= check_at:
                            check_at = time.monotonic() + WATCH_S
                            if await self._disk() > self.settings.limits.disk_mb << 20:
                                return None, DISK
                        if reading.done():
                            await asyncio.sleep(0.01)
                finally:
                    feeding.cancel()
                    reading.cancel()
        except DaemonError as error:
            if UNSTARTED in str(error):
                return None, PROCESSES
            raise
        except SandboxError:
            return None, KILLED
        code = int(state["ExitCode"])
        said = kept.bytes().decode(errors="replace") if code in (125, 126) else ""
        if UNSTARTED in said and "permission denied" not in said:  # no more processes are allowed
            return None, PROCESSES
        return code, ""

    async def _disk(self) -> int:
        return int((await self._call("GET", f"/containers/{self._id}/json?size=1")).get("SizeRw") or 0)

    async def _cause(self, code: int) -> str:
        """Of an exit code that is none of the program's."""
        counts = Kept(1 << 12)
        with contextlib.suppress(DaemonError):
            await self._exec(["/bin/sh", "-c", COUNT_KILLED], counts, b"", [], FILE_S)
            lines = (line.split() for line in counts.bytes().decode(errors="replace").splitlines())
            before, self._killed = self._killed, sum(int(line[1]) for line in lines if line[:1] == ["oom_kill"])
            if self._killed > before:
                return MEMORY
        if code == 128 + 25 or await self._disk() > self.settings.limits.disk_mb << 20:
            return DISK
        return "" if await self._runs() else KILLED

    async def _kill_all(self) -> None:
        """All processes; if none can be started for it, by a restart. The files stay."""
        with contextlib.suppress(DaemonError, SandboxError):
            code, _ = await self._exec(["/bin/sh", "-c", KILL], Kept(1 << 10), b"", [], 5.0)
            if code is None or not await self._runs():
                await self._call("POST", f"/containers/{self._id}/restart?t=0")
                self._killed = 0
            await self._listen()

    async def _listen(self) -> None:
        """Starts what listens inside, for each address that it may reach."""
        for _, port in self._servers:
            words = ["python3", "-c", FORWARD, str(port), f"{SHARED}/{port}"]
            body = {"AttachStdout": True, "AttachStderr": True, "Cmd": words}
            name = (await self._call("POST", f"/containers/{self._id}/exec", body))["Id"]
            kept = Kept(1 << 10)
            async with self._daemon.stream(f"/exec/{name}/start", {"Detach": False, "Tty": False}) as (reader, _):
                reading = asyncio.ensure_future(_read(reader, kept))
                deadline = time.monotonic() + 10
                while not kept.bytes().startswith(b"ready") and time.monotonic() < deadline and not reading.done():
                    await asyncio.sleep(0.01)
                reading.cancel()
            if not kept.bytes().startswith(b"ready"):
                said = kept.bytes().decode(errors="replace").strip()[-200:]
                raise SandboxError(START, f"nothing listens inside: the image needs python3 ({said})")

    async def _file(self, script: str, path: str, kept: Kept, data: bytes = b"") -> None:
        code, cause = await self._exec(["/bin/sh", "-c", script, path], kept, data, [], FILE_S)
        if cause == KILLED:
            raise SandboxError(KILLED, f"{path} was not read or written")
        if code is None or code > 128:
            raise OSError(errno.EAGAIN, f"the sandbox has reached a limit ({cause or 'it was stopped'})", path)
        if code:
            raise OSError(code, os.strerror(code), path)


class Daemon:
    """Docker's HTTP interface at a socket of this machine."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        try:
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(self.path)) as session,
                session.request(method, f"http://daemon{VERSION}{path}", json=body) as answer,
            ):
                return _value(answer.status, await answer.read())
        except aiohttp.ClientError as error:
            raise DaemonError(0, f"{self.path}: {error}") from None

    def ask_now(self, path: str) -> Any:
        connection = http.client.HTTPConnection("daemon", timeout=10)
        connection.sock = socket.socket(socket.AF_UNIX)
        with contextlib.closing(connection):
            connection.sock.settimeout(10)
            connection.sock.connect(self.path)
            connection.request("GET", VERSION + path)
            answer = connection.getresponse()
            return _value(answer.status, answer.read())

    @contextlib.asynccontextmanager
    async def stream(self, path: str, body: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A request whose connection becomes that of the command: its input, and frames of its output."""
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_unix_connection(self.path)
        try:
            head = f"POST {VERSION}{path} HTTP/1.1\r\nHost: daemon\r\nContent-Type: application/json\r\n"
            head += f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            answer = (await reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
            status = int(answer.split()[1])
            if status not in (101, 200):
                raise DaemonError(status, (await reader.read(1 << 12)).decode(errors="replace").strip())
            yield reader, writer
        finally:
            writer.close()


def _value(status: int, data: bytes) -> Any:
    if status >= 400:
        with contextlib.suppress(ValueError):
            raise DaemonError(status, json.loads(data)["message"])
        raise DaemonError(status, data.decode(errors="replace"))
    return json.loads(data) if data else None


async def _feed(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(OSError):
        for begin in range(0, len(data), 1 << 16):
            writer.write(data[begin : begin + (1 << 16)])
            await writer.drain()
        writer.write_eof()


async def _read(reader: asyncio.StreamReader, kept: Kept) -> None:
    """Frames: the stream, three zeros, the length, the bytes."""
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            head = await reader.readexactly(8)
            left = int.from_bytes(head[4:], "big")
            while left:
                chunk = await reader.read(min(left, 1 << 16))
                if not chunk:
                    return
                kept.add(chunk)
                left -= len(chunk)
            if kept.flooded:
                return
