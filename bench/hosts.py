"""Several hosts on this machine, for a command that needs a cluster. Linux only, as root.

    python -m bench.hosts --hosts 2 -- gcore train recipes/quickstart.yaml run.dir=/mnt/shared/runs

starts two hosts with Ray (token authentication), runs the command on the first one with RAY_ADDRESS set, and removes
everything afterwards. A host is a set of namespaces. It has its own:

    network     eth0 with the address 10.77.0.N, on a switch that connects the hosts only; no way to the internet
    files       /tmp and /dev/shm are empty and private; SHARED is one folder for all; the rest is this machine's
    processes   it sees only its own; when its first process dies, all of them die
    name        hostN, which all hosts can resolve

The switch is a namespace too, so nothing changes on this machine: no interface, no route, no named namespace. All of it
ends with the process that made it, also if that one is killed: the first process of each host reads its input, which
closes then. What is not emulated: separate clocks, kernels, page caches, disks and CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
SHARED = Path("/mnt/shared")  # on the hosts
PORT = 6379
START_S = 300
# The first process of a host. $1: name, $2: folder to share, $3: where, $4: lines of /etc/hosts
FIRST_PROCESS = """
set -e
mount --make-rprivate /
if [ -n "$2" ]; then mount -t tmpfs none /mnt; mkdir -p "$3"; mount --bind "$2" "$3"; fi
mount -t tmpfs none /tmp
chmod 1777 /tmp
mount -t tmpfs none /dev/shm
hostname "$1"
printf '%s' "$4" > /tmp/.hosts
mount --bind /tmp/.hosts /etc/hosts
ip link set lo up
echo ready
cat > /dev/null || true
"""
SWITCH = "ip link add name switch type bridge && ip link set switch up && echo ready && cat > /dev/null"


def why_not() -> str:
    """Why hosts cannot be made here; empty: they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux only"
    test = "mount -t tmpfs none /mnt && ip link add name switch type bridge && ip link add a0 type veth peer name a1"
    command = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "bash", "-c", test]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"namespaces are not permitted here: {error}"
    return "" if done.returncode == 0 else f"namespaces are not permitted here: {done.stderr.strip()[:200]}"


@dataclass
class Host:
    name: str
    address: str
    process: subprocess.Popen[str]
    pid: int  # of its first process, as this machine counts
    env: dict[str, str]

    def popen(self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen:
        """Start a command on the host, in the folder `cwd` of the host; default: the repository."""
        folder = options.pop("cwd", ROOT)
        enter = ["nsenter", "-t", str(self.pid), "--mount", "--uts", "--net", "--pid"]
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder)]
        return subprocess.Popen([*enter, *there, *command], env={**self.env, **(env or {})}, **options)

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, timeout: float = 600, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host until it ends. Its output is in the result."""
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with self.popen(command, env, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def write(self, path: str, text: str) -> None:
        """A file that only this host has, if it is in /tmp."""
        folder = str(Path(path).parent)
        with self.popen(
            ["sh", "-c", 'mkdir -p "$1"; cat > "$2"', "sh", folder, path], stdin=subprocess.PIPE
        ) as process:
            process.communicate(text.encode())
        assert process.returncode == 0, path


@dataclass
class Hosts:
    """Make them with `make_hosts`. `shared`: the folder of this machine that the hosts see as SHARED."""

    switch: subprocess.Popen[str]
    shared: Path
    all: list[Host] = field(default_factory=list)

    def __getitem__(self, index: int) -> Host:
        return self.all[index]

    def start_ray(self, cpus: int = 2, object_store_mb: int = 200, only: Sequence[int] | None = None) -> None:
        """Start Ray, the head on the first host. `only`: the numbers of the hosts where Ray starts."""
        wanted = range(len(self.all)) if only is None else only
        options = [f"--num-cpus={cpus}", f"--object-store-memory={object_store_mb << 20}", "--num-gpus=0"]
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", *options]
        started = []
        for index in wanted:
            host = self.all[index]
            head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
            role = head if index == 0 else [f"--address={self.all[0].address}:{PORT}"]
            command = [*start, *role, f"--node-ip-address={host.address}"]
            process = host.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            started.append((host, process))
            if index == 0:
                self._wait(*started.pop())
        for host, process in started:
            self._wait(host, process)

    @staticmethod
    def _wait(host: Host, process: subprocess.Popen) -> None:
        """The daemons keep the output open: do not wait for its end."""
        try:
            code = process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RuntimeError(f"{host.name}: Ray did not start within {START_S} s") from None
        if code:
            raise RuntimeError(f"{host.name}: Ray did not start: {process.stdout.read() if process.stdout else ''}")

    def kill(self, index: int, silent: bool = False) -> None:
        """All processes of a host die at once. `silent`: as if it lost its power; the others get no sign of it."""
        host = self.all[index]
        if silent:
            self._on_switch("ip", "link", "set", f"port{index}", "down")
        psutil.Process(host.pid).kill()
        host.process.wait(30)

    def _on_switch(self, *command: str) -> None:
        subprocess.run(["nsenter", "-t", str(self.switch.pid), "--net", *command], check=True)

    def _add(self, index: int, names: str, env: Mapping[str, str]) -> None:
        name, address = f"host{index + 1}", f"10.77.0.{index + 1}"
        spaces = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        first = ["bash", "-c", FIRST_PROCESS, "first", name, str(self.shared), str(SHARED), names]
        process = _start(["unshare", *spaces, *first])
        (child,) = psutil.Process(process.pid).children()
        host = Host(name, address, process, child.pid, dict(env))
        self.all.append(host)
        port = f"port{index}"
        self._on_switch(
            "ip", "link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", str(child.pid)
        )
        self._on_switch("ip", "link", "set", port, "master", "switch", "up")
        for words in (["address", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            subprocess.run(["nsenter", "-t", str(child.pid), "--net", "ip", *words], check=True)

    def close(self) -> None:
        for process in (*(host.process for host in self.all), self.switch):
            assert process.stdin is not None
            process.stdin.close()
        for host in self.all:  # its first process ends, and then all others of the host die
            try:
                host.process.wait(10)
            except subprocess.TimeoutExpired:
                host.process.kill()  # --kill-child: its first process dies too
                host.process.wait(10)
        self.switch.wait(30)


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        process.kill()
        raise RuntimeError(f"{shlex.join(command[:8])} ...: it ended with {process.wait()} instead of `ready`")
    return process


@contextlib.contextmanager
def make_hosts(count: int, shared: Path | None = None, env: Sequence[Mapping[str, str]] = ()) -> Iterator[Hosts]:
    """`shared`: default: a new folder, which is removed. `env`: variables of single hosts, in their order. Ray is not
    started; all commands get its address and token."""
    token = secrets.token_hex(32)
    common = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    common |= {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    common |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": f"10.77.0.1:{PORT}"}
    names = "127.0.0.1 localhost\n" + "".join(f"10.77.0.{i + 1} host{i + 1}\n" for i in range(count))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if shared is None else shared
        hosts = Hosts(_start(["unshare", "--net", "bash", "-c", SWITCH]), folder)
        stack.callback(hosts.close)
        for i in range(count):
            hosts._add(i, names, {**common, **(env[i] if i < len(env) else {})})
        yield hosts


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run a command on the first of several hosts, with Ray on all of them."
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=2, help="that Ray counts on each host; default %(default)s")
    parser.add_argument("--object-store-mb", type=int, default=200, help="on each host; default %(default)s")
    parser.add_argument("--shared", type=Path, help=f"folder that the hosts see as {SHARED}; default: a temporary one")
    parser.add_argument("--no-ray", action="store_true", help="do not start Ray")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    if reason := why_not():
        print(f"bench.hosts: {reason}", file=sys.stderr)
        return 2
    with make_hosts(args.hosts, args.shared) as hosts:
        if not args.no_ray:
            hosts.start_ray(args.cpus, args.object_store_mb)
        with hosts[0].popen(args.command) as process:
            return process.wait()


if __name__ == "__main__":
    sys.exit(main())
