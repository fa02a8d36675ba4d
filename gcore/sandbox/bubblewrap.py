"""Sandboxes of bubblewrap: processes of this machine in namespaces of their own.

    run, read, write ──message and ends of pipes──> process 1 of the sandbox (inside.py) ──> commands and helpers
    reach ──> a listening socket of the sandbox, accepted here <──> that one address

Programs see the system's folders (/usr, ...) and `read_only`, and write only to a file system in memory. Files are read
and written by processes inside, so a link that a program has made leads to nothing outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import mmap
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from gcore.config.sandbox import SandboxSettings
from gcore.processes import kill_group
from gcore.sandbox.base import DISK, KILLED, MEMORY, OUTPUT, PROCESSES, START, TIME, WORK, Command, Result, SandboxError
from gcore.sandbox.inside import MESSAGE_BYTES
from gcore.sandbox.isolation import boot, namespaces, packed, readable, system_calls
from gcore.sandbox.memory import memory_of, new_group, num_killed, remove_group
from gcore.sandbox.transport import Connections, Kept, packed_folder

START_S, KILL_S, WATCH_S, FILE_S = 30.0, 5.0, 0.2, 60.0
OPEN_FILES = 1024
TOO_LARGE = (-signal.SIGXFSZ, 128 + signal.SIGXFSZ)  # exit codes of a program, or its shell: a file above `disk_mb`
SHARED_MEMORY_MB = 64  # of /dev/shm
USERS = itertools.count(int.from_bytes(os.urandom(2), "big"))
SYSTEM = ("/bin", "/sbin", "/etc/alternatives", "/etc/ssl/certs", "/etc/ca-certificates")
SETTINGS = tuple(f"/proc/{name}" for name in ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi"))  # of the machine
OWN = ("/sandbox", "/tmp", "/dev", "/proc")
ETC = {
    "passwd": "root:x:0:0::/sandbox:/bin/sh\nuser:x:{uid}:{uid}::/sandbox:/bin/sh\n",
    "group": "root:x:0:\nuser:x:{uid}:\n",
    "hosts": "127.0.0.1 localhost\n",
}
Buffer = bytes | mmap.mmap
# bubblewrap ends with the thread that started it, so that thread lasts as long as the process
_starter = ThreadPoolExecutor(2, "sandboxes")
_cpus = threading.Lock(), itertools.count()


class BubblewrapSandboxes:
    """Implements Sandboxes."""

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings

    def problem(self) -> str | None:
        if shutil.which("bwrap") is None:
            return "bwrap is not installed (apt install bubblewrap)"
        for path in self.settings.read_only:
            if not Path(path).is_absolute() or any(Path(own) in (Path(path), *Path(path).parents) for own in OWN):
                return f"read_only has {path}; expected absolute paths outside of {', '.join(OWN)}"
        try:
            process = _spawn(self.settings)
        except SandboxError as error:
            return str(error)
        process.end()
        return None

    async def start(self) -> Bubblewrap:
        box = Bubblewrap(self.settings)
        await box.begin()
        return box


class Bubblewrap:
    """Implements Sandbox."""

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self._process: _Process | None = None
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._snapshots = contextlib.ExitStack()
        self._turn = asyncio.Lock()

    @property
    def alive(self) -> bool:
        return self._process is not None

    async def begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._process = await loop.run_in_executor(_starter, _spawn, self.settings)
        self._process.control.setblocking(False)
        loop.add_reader(self._process.control, self._receive)

    async def run(
        self,
        command: Command,
        *,
        seconds: float | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> Result:
        limits = self.settings.limits
        message = {
            "do": "run",
            "command": ["/bin/sh", "-c", command] if isinstance(command, str) else list(command),
            "env": {**environment(), **(env or {})},
        }
        async with self._turn:
            return await self._call(message, stdin, seconds or limits.seconds, limits.output_kb << 10)

    async def read(self, path: str, most: int = 16 << 20) -> bytes:
        result = await self._call({"do": "read", "path": path}, b"", FILE_S, 2 * most)
        if result.code == 0 and (result.cut or len(result.output) > most):
            raise OSError(errno.EFBIG, f"the file has more than {most} bytes", path)
        self._check(result, path)
        return result.output

    async def write(self, path: str, data: bytes) -> None:
        self._check(await self._call({"do": "write", "path": path}, data, FILE_S, 1 << 10), path)

    async def snapshot(self) -> str:
        folder = self._snapshots.enter_context(tempfile.TemporaryDirectory(prefix="gcore-snapshot-"))
        path = f"{folder}/files.tar"
        async with self._turn:
            most = (self.settings.limits.disk_mb << 21) + (1 << 20)  # with what an archive adds
            with open(path, "wb") as file:
                result = await self._call({"do": "pack"}, b"", FILE_S, most, file)
        if result.code != 0:
            raise SandboxError(result.cause or DISK, "the files could not be copied")
        return path

    async def restore(self, snapshot: str) -> None:
        async with self._turn:
            reached = list(self._servers)
            await self._kill_all()
            await self._end()
            await self.begin()
            with open(snapshot, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                await self._unpack(data)
            for host, port in reached:
                await self.reach(host, port)

    async def put(self, folder: str) -> None:
        await self._unpack(await asyncio.to_thread(packed_folder, folder))

    async def _unpack(self, data: Buffer) -> None:
        result = await self._call({"do": "unpack"}, data, FILE_S, 1 << 10)
        if result.code != 0:
            raise SandboxError(result.cause or DISK, "the files could not be copied into it")

    async def reach(self, host: str, port: int) -> tuple[str, int]:
        if (host, port) not in self._servers:
            reply, fds = await self._ask({"do": "listen", "port": port})
            if not fds:
                raise SandboxError(START, f"port {port} inside: {os.strerror(reply['code'])}")
            inside = socket.socket(fileno=fds[0])
            self._servers[host, port] = await asyncio.start_server(Connections(host, port), sock=inside)
        return "127.0.0.1", port

    async def stop(self) -> None:
        await self._kill_all()  # the kernel reports the end of process 1 before that of the others
        await self._end()
        self._snapshots.close()

    async def _end(self) -> None:
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        if (process := self._process) is not None:
            self._lost()
            await asyncio.get_running_loop().run_in_executor(_starter, process.end)

    # --- messages

    async def _ask(self, message: Mapping[str, Any], fds: tuple[int, ...] = ()) -> tuple[dict[str, Any], list[int]]:
        """The reply to one message, with the file descriptors that came with it."""
        if self._process is None:
            raise SandboxError(KILLED, "it has ended")
        number = next(self._numbers)
        data = json.dumps({**message, "number": number}).encode()
        if len(data) > MESSAGE_BYTES:
            raise ValueError(
                f"command and environment have {len(data)} bytes; expected at most {MESSAGE_BYTES} (pass more as stdin)"
            )
        future = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            while True:
                try:
                    socket.send_fds(self._process.control, [data], fds)
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.005)
            return await future
        except (BrokenPipeError, ConnectionResetError):
            raise SandboxError(KILLED, "it has ended") from None
        finally:
            self._replies.pop(number, None)

    def _receive(self) -> None:
        assert self._process
        try:
            data, fds, _, _ = socket.recv_fds(self._process.control, MESSAGE_BYTES, 1)
            message = json.loads(data) if data else None
        except BlockingIOError:
            return
        except (OSError, ValueError):
            message, fds = None, []
        if message is None:
            process = self._process
            self._lost()
            _starter.submit(process.end)
            return
        future = self._replies.get(message.get("number"))
        if future is not None and not future.done():
            future.set_result((message, fds))
        else:
            for fd in fds:
                os.close(fd)

    def _lost(self) -> None:
        """Its process 1 has ended, or is about to."""
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self._process.control)
            self._process = None
        for future in self._replies.values():
            if not future.done():
                future.set_exception(SandboxError(KILLED, "it has ended"))
                future.exception()  # the caller may have given up

    # --- commands and helpers

    async def _call(
        self, message: Mapping[str, Any], stdin: Buffer, seconds: float, keep: int, file: BinaryIO | None = None
    ) -> Result:
        process = self._process
        if process is None:
            raise SandboxError(KILLED, "it has ended")
        killed_before = process.num_killed()
        causes = asyncio.Queue[str]()
        ends, (ours_in, ours_out) = _pipes()
        kept = Kept(keep)
        output = _Output(ours_out, kept, lambda: causes.put_nowait(OUTPUT), file)
        ask = asyncio.ensure_future(self._ask(message, ends))
        ask.add_done_callback(_heard)
        stopped, tasks = asyncio.ensure_future(causes.get()), [asyncio.ensure_future(_feed(ours_in, stdin))]
        if process.group is None:
            tasks.append(asyncio.ensure_future(self._watch(process, causes)))
        cause, reply = "", dict[str, Any]()
        try:
            await asyncio.sleep(0)  # the message is sent
            for end in ends:
                os.close(end)
            done, _ = await asyncio.wait([ask, stopped], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if ask not in done:
                cause = stopped.result() if stopped in done else TIME
                await self._kill_all(ask)
            reply, _ = await ask
        except SandboxError as error:
            cause = cause or (MEMORY if process.num_killed() > killed_before else error.cause)
        except BaseException:
            if not ask.done():
                await asyncio.shield(self._kill_all(ask))
            raise
        finally:
            for task in (ask, stopped, *tasks):
                task.cancel()
            output.close()
        code = reply.get("code")
        if reply.get("failed"):
            code, cause = None, PROCESSES
        elif not cause and code != 0 and process.num_killed() > killed_before:
            cause = MEMORY
        elif not cause and (code in TOO_LARGE or (code != 0 and reply.get("full"))):
            cause = DISK
        if cause in (MEMORY, PROCESSES) and message["do"] == "run":  # what it has left would hold them
            await self._kill_all()
        return Result(None if cause in (TIME, OUTPUT, KILLED) else code, kept.bytes(), cause, kept.cut)

    async def _kill_all(self, *ended: asyncio.Future[Any]) -> None:
        """Ends all processes of the sandbox; itself, if this does not help. `ended`: replies that then come."""
        with contextlib.suppress(SandboxError):
            kill = asyncio.ensure_future(self._ask({"do": "kill"}))
            kill.add_done_callback(_heard)
            _, waiting = await asyncio.wait([*ended, kill], timeout=KILL_S)
            if waiting:
                kill.cancel()
                await self._end()

    async def _watch(self, process: _Process, causes: asyncio.Queue[str]) -> None:
        """Without a cgroup."""
        most = self.settings.limits.memory_mb << 20
        while memory_of(process.popen.pid, most) <= most:
            await asyncio.sleep(WATCH_S)
        causes.put_nowait(MEMORY)

    def _check(self, result: Result, path: str) -> None:
        if result.cause == KILLED:
            raise SandboxError(KILLED, f"{path} was not read or written")
        if result.code is None or result.code < 0:
            cause = result.cause or "it was stopped"
            raise OSError(errno.EAGAIN, f"the sandbox has reached a limit ({cause})", path)
        if result.code:
            raise OSError(result.code, os.strerror(result.code), path)


def _heard(task: asyncio.Future[Any]) -> None:
    """Its exception is no surprise."""
    if not task.cancelled():
        task.exception()


def environment() -> dict[str, str]:
    path = f"{Path(os.path.realpath(sys.base_prefix), 'bin')}:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "HOME": WORK, "USER": "user", "LANG": "C.UTF-8", "TERM": "dumb"}


# --- the process of a sandbox


class _Process:
    def __init__(self, popen: subprocess.Popen[bytes], control: socket.socket, group: Path | None) -> None:
        self.popen, self.control, self.group = popen, control, group
        self.first: int | None = None  # process 1: it lost the signal that the end of bubblewrap sends

    def num_killed(self) -> int:
        return num_killed(self.group) if self.group is not None else 0

    def end(self) -> None:
        kill_group(self.popen)
        self.popen.wait()
        if self.first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.first, signal.SIGKILL)
            os.close(self.first)
        self.control.settimeout(KILL_S)
        with contextlib.suppress(OSError):
            while self.control.recv(1 << 12):  # its end: process 1 has ended, and all others with it
                pass
        self.control.close()
        if self.group is not None:
            remove_group(self.group)


def _spawn(settings: SandboxSettings) -> _Process:
    """Starts one, and waits until its process 1 answers. SandboxError if it does not."""
    limits = settings.limits
    # If we are root, each gets another unprivileged user: the limit on processes is per user.
    uid = 20_000 + next(USERS) % 40_000 if os.geteuid() == 0 else 0
    group = new_group(limits.memory_mb + limits.disk_mb << 20)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_BYTES)
    task = {
        "uid": uid,
        "work": WORK,
        "control": theirs.fileno(),
        "disk": limits.disk_mb << 20,
        "processes": limits.processes + 2,
        "open_files": OPEN_FILES,
        "memory": limits.memory_mb << 20 if group is None else 0,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(theirs)

        def file(data: bytes) -> int:
            made = stack.enter_context(tempfile.TemporaryFile())
            made.write(data)
            made.seek(0)
            return made.fileno()

        blob = file(packed(("gcore.sandbox.inside",), "gcore.sandbox.inside", task))
        fds = [blob, theirs.fileno()]
        command = [shutil.which("bwrap") or "bwrap", *namespaces("CAP_CHOWN"), "--as-pid-1"]
        command += readable([*SYSTEM, *settings.read_only])
        for etc, text in ETC.items():
            fds.append(file(text.format(uid=uid or os.getuid()).encode()))
            command += ["--perms", "0644", "--file", str(fds[-1]), f"/etc/{etc}"]
        command += ["--proc", "/proc", "--dev", "/dev"]
        for place in SETTINGS:
            command += ["--ro-bind-try", place, place]
        command += ["--size", str(SHARED_MEMORY_MB << 20), "--perms", "1777", "--tmpfs", "/dev/shm"]
        command += ["--size", str(limits.disk_mb << 20), "--perms", "0755", "--tmpfs", WORK]
        command += ["--perms", "1777", "--dir", f"{WORK}/.tmp", "--symlink", f"{WORK}/.tmp", "/tmp"]
        command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]
        if filtered := system_calls("sched_setaffinity"):
            fds.append(file(filtered))
            command += ["--seccomp", str(fds[-1])]
        command += ["--", *boot(blob)]
        if group is not None:  # a shell moves itself into the group before anything of the sandbox runs
            command = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        with _on_cpus(limits.cpus):
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=fds,
                cwd="/",
                env={"PATH": "/usr/bin:/bin"},
                start_new_session=True,
            )
    process = _Process(popen, ours, group)
    ours.settimeout(START_S)
    assert popen.stderr
    with popen.stderr:
        with contextlib.suppress(OSError):
            process.first = _first_process(ours)
            return process
        process.end()
        said = popen.stderr.read().decode(errors="replace").strip()
    raise SandboxError(START, said or f"it did not answer within {START_S:g} s")


def _first_process(control: socket.socket) -> int:
    """A pidfd of the process that sends the first message."""
    space, size = socket.CMSG_SPACE(12), struct.calcsize("3i")
    control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    _, parts, _, _ = control.recvmsg(1 << 12, space)
    control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    for _, kind, data in parts:
        if kind == socket.SCM_CREDENTIALS and (pid := struct.unpack("3i", data[:size])[0]):
            return os.pidfd_open(pid)
    raise OSError("it has ended")


@contextlib.contextmanager
def _on_cpus(num: int) -> Iterator[None]:
    """Processes that this thread starts run on so many CPUs, others for each sandbox."""
    allowed = os.sched_getaffinity(0)
    lock, numbers = _cpus
    with lock:
        mine = sorted(allowed)
        first = next(numbers) * num
    os.sched_setaffinity(0, {mine[(first + i) % len(mine)] for i in range(min(num, len(mine)))})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


# --- pipes and connections


def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """stdin and stdout of a command: its ends, ours."""
    (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
    os.set_blocking(ours_in, False)
    os.set_blocking(ours_out, False)
    return (theirs_in, theirs_out), (ours_in, ours_out)


class _Output:
    """Reads all output of a command."""

    def __init__(self, fd: int, kept: Kept, flooded: Callable[[], None], file: BinaryIO | None = None) -> None:
        """`file` gets all of it."""
        self._fd, self._kept, self._flooded, self._file = fd, kept, flooded, file
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._more)

    def _more(self) -> bool:
        """False: nothing is there now."""
        try:
            chunk = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            self._loop.remove_reader(self._fd)
            return False
        if self._file is None:
            self._kept.add(chunk)
        else:
            self._file.write(chunk)
        if self._kept.flooded or (self._file is not None and self._file.tell() > self._kept.most):
            self._loop.remove_reader(self._fd)
            self._flooded()
        return True

    def close(self) -> None:
        """After the command: what it has written is in the pipe; processes that it left may hold the other end."""
        for _ in range(16):
            if not self._more():
                break
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


async def _feed(fd: int, data: Buffer) -> None:
    """Writes to stdin, then closes it."""
    ready, loop, done = asyncio.Event(), asyncio.get_running_loop(), 0
    try:
        while done < len(data):
            try:
                done += os.write(fd, data[done : done + (1 << 16)])
            except BlockingIOError:
                ready.clear()
                loop.add_writer(fd, ready.set)
                await ready.wait()
    except BrokenPipeError:
        pass
    finally:
        loop.remove_writer(fd)
        os.close(fd)
