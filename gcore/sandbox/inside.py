"""The first code that runs inside a sandbox: it sets the limits. In a sandbox that lasts it then is process 1, which
starts what the other side asks for.

    bubblewrap.py ──message, ends of pipes──> serve ──fork──> a command, or a helper that reads or writes one file
                  <──message: exit code──────┘

Helpers are ordinary processes of the sandbox: the files that they open are those that its programs can open.
It imports only the standard library, and is sent as code, because a sandbox has no files of G-Core.
"""

from __future__ import annotations

import os
import resource
import sys

TYPE_CHECKING = False  # modules that only annotations use: a sandbox starts in half the time without them
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from typing import Any

STARTED = b"started\n"  # the first output: the sandbox works, and what follows is the program's
FILE_BYTES, PROCESSES, OPEN_FILES = 16 << 20, 16, 64
MESSAGE_BYTES = 1 << 17  # of a message to `serve`: the longest command with its environment
FIRST_FREE = 3  # file descriptors after stdin, stdout, stderr


def limit(uid: int, dies_with_parent: bool, cpu_s: int, memory: int) -> None:
    """Of a program that runs once."""
    become(uid)
    if dies_with_parent:
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)
    set_limits(
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
    )


def become(uid: int) -> None:
    if uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


def set_limits(*limits: tuple[int, int]) -> None:
    for what, most in (*limits, (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, most))


# --- process 1 of a sandbox that lasts


def main(task: Mapping[str, Any]) -> None:
    """Of a sandbox that lasts."""
    import socket

    if task["uid"]:
        os.chown(task["work"], task["uid"], task["uid"])
    become(task["uid"])
    set_limits(
        (resource.RLIMIT_FSIZE, task["disk"]),
        (resource.RLIMIT_NPROC, task["processes"]),
        (resource.RLIMIT_NOFILE, task["open_files"]),
        *([(resource.RLIMIT_DATA, task["memory"])] if task["memory"] else []),
    )
    if not task["uid"]:  # a change of the user does it, too: programs cannot read or change this process
        import ctypes

        ctypes.CDLL(None).prctl(4, 0)
    os.umask(0o022)
    os.chdir(task["work"])
    serve(socket.socket(fileno=task["control"]), task["work"])


def serve(control: socket.socket, work: str) -> None:
    import contextlib
    import json
    import select
    import signal
    import socket

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a process 1 gets only the signals of its own sandbox that it handles
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wake, wake_end = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_end, False)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    running = dict[int, int]()  # processes: the numbers of their requests

    def reply(**message: Any) -> None:
        socket.send_fds(control, [json.dumps(message).encode()], [])

    def reap(how: int) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, how)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (number := running.pop(pid, None)) is not None:
                reply(number=number, code=os.waitstatus_to_exitcode(status), full=os.statvfs(work).f_bavail == 0)

    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake, select.POLLIN)
    reply(started=True)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(FIRST_FREE):  # those of who started it
        os.dup2(null, fd)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 1 << 12)
            reap(os.WNOHANG)
        if control.fileno() not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
        if not data:
            os._exit(0)  # nobody is left: all processes of the sandbox end with this one
        message = json.loads(data)
        number = message["number"]
        try:
            if message["do"] == "kill":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)  # all but this one
                reap(0)  # until none is left
                reply(number=number, code=0)
            elif message["do"] == "listen":
                with socket.create_server(("127.0.0.1", message["port"])) as listener:
                    socket.send_fds(control, [json.dumps({"number": number, "code": 0}).encode()], [listener.fileno()])
            else:
                running[_forked(message, fds)] = number
        except OSError as error:
            reply(number=number, code=error.errno, failed=True)
        for fd in fds:
            os.close(fd)


def _forked(message: Mapping[str, Any], fds: list[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    import signal

    code = 127
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.dup2(fds[0], 0)
        os.dup2(fds[1], 1)
        os.dup2(fds[1], 2)
        os.closerange(FIRST_FREE, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        code = HELPERS[message["do"]](message)
    except OSError as error:
        code = error.errno or 1
        if message["do"] == "run":
            os.write(2, f"{error.strerror}: {message['command'][0]}\n".encode(errors="replace"))
            code = 127
    finally:
        os._exit(code)


def _run(message: Mapping[str, Any]) -> int:
    import contextlib

    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory ends, before process 1
    os.execvpe(message["command"][0], message["command"], message["env"])


def _opened(path: str, flags: int, mode: int = 0) -> int:
    """A regular file, and nothing whose opening or reading could block."""
    import errno
    import stat

    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    kind = os.fstat(fd).st_mode
    if not stat.S_ISREG(kind):
        raise OSError(errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL, "no regular file")
    return fd


def _read(message: Mapping[str, Any]) -> int:
    fd = _opened(message["path"], os.O_RDONLY)
    while chunk := os.read(fd, 1 << 16):
        _write_all(1, chunk)
    return 0


def _write(message: Mapping[str, Any]) -> int:
    if parent := os.path.dirname(message["path"]):
        os.makedirs(parent, exist_ok=True)
    fd = _opened(message["path"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    while chunk := os.read(0, 1 << 16):
        _write_all(fd, chunk)
    return 0


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _pack(message: Mapping[str, Any]) -> int:
    import tarfile

    with tarfile.open(fileobj=os.fdopen(1, "wb"), mode="w|") as archive:
        archive.add(".")
    return 0


def _unpack(message: Mapping[str, Any]) -> int:
    import tarfile

    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        archive.extraction_filter = lambda member, path: member  # they are of a sandbox, and stay in one
        archive.extractall(".", (member for member in archive if member.name != "."))
    return 0


HELPERS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "run": _run,
    "read": _read,
    "write": _write,
    "pack": _pack,
    "unpack": _unpack,
}
