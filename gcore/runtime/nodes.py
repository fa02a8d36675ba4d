"""Looks at the nodes of a Ray cluster: one small process on each node for some seconds. Nothing of a run is started.

node ids ──look_at_nodes──> Probe on every node ──> NodeFacts ──> launch/node_checks.py compares them

Without torch: versions are those of the installed packages.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import platform
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gcore import __version__
from gcore.config.engines import ENGINES
from gcore.runtime.protocol import NodeFacts
from gcore.runtime.ray_cluster import interface_of, node_address
from gcore.types import UserError

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "ray"),
    *(package for traits in ENGINES.values() for package in traits.packages),
)
ANSWER_S = 60.0  # for a node to start the process and to answer
CONNECT_S = 10.0
LINK_S = 120.0  # for a transfer from one node to the next
CLOCK_CALLS = 5
FOLDER_S = 5.0  # until a new file is visible on other nodes: shared storage may be slow
CHUNK = bytes(1 << 20)


def look_here(paths: Sequence[str] = ()) -> NodeFacts:
    """This machine, as seen by this process."""
    versions = {"python": platform.python_version(), "gcore": __version__}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    sizes = {path: _size(Path(path).expanduser()) for path in paths}
    return NodeFacts(
        "",
        socket.gethostname(),
        versions=versions,
        code=_digest_of_code(),
        gpus=ask_gpus("name,driver_version"),
        sizes=sizes,
    )


def _size(path: Path) -> int:
    if path.is_dir():
        return 0
    return path.stat().st_size if path.is_file() else -1


def _digest_of_code() -> str:
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def ask_gpus(fields: str) -> tuple[str, ...]:
    """What nvidia-smi says of each GPU of this machine. Empty: there is none, or no nvidia-smi. ask_gpus("name")"""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        if done.returncode == 0:
            return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
    return ()


class Probe:
    """Runs as a Ray actor on a node."""

    def look(self, paths: Sequence[str]) -> NodeFacts:
        address = node_address()
        return replace(look_here(paths), address=address, interface=interface_of(address) or "")

    def clock(self) -> float:
        return time.time()

    def check_folder(self, folder: str, name: str, content: str) -> str:
        """Why the driver's file `name` is not here, or this node cannot write; empty: it is the same folder."""
        file, deadline = Path(folder) / name, time.monotonic() + FOLDER_S
        while not file.is_file() and time.monotonic() < deadline:
            time.sleep(0.2)
        try:
            if file.read_text() != content:
                return "it is another folder there"
            Path(folder, f"{name}-{secrets.token_hex(4)}").write_text(content)
        except FileNotFoundError:
            return "it does not contain the files of the driver there" if Path(folder).is_dir() else "it does not exist"
        except OSError as error:
            return f"it cannot be used there: {error.strerror or error}"
        return ""

    def listen(self) -> int:
        """The port of a socket that accepts one connection, at the node's address only."""
        self._server = socket.create_server((node_address(), 0))
        self._server.settimeout(CONNECT_S)
        return int(self._server.getsockname()[1])

    def receive(self, word: str) -> bool:
        """Read the connection to its end. True: it began with `word`."""
        try:
            connection, _ = self._server.accept()
        except OSError:
            return False
        finally:
            self._server.close()
        with connection, connection.makefile("rb") as stream:
            connection.settimeout(LINK_S)
            known = stream.read(len(word)) == word.encode()
            while known and stream.read(len(CHUNK)):
                pass
            connection.sendall(b"x")
            return known

    def send(self, address: str, port: int, word: str, megabytes: int) -> tuple[str, float]:
        """Why it failed, or empty; and MB/s."""
        try:
            with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
                connection.settimeout(LINK_S)
                connection.sendall(word.encode())
                started = time.monotonic()
                for _ in range(megabytes):
                    connection.sendall(CHUNK)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)
                return "", megabytes / max(time.monotonic() - started, 1e-9)
        except OSError as error:
            return f"{error.strerror or error}, port {port}", 0.0


def look_at_nodes(
    nodes: Mapping[str, str], paths: Sequence[str] = (), folder: Path | None = None, megabytes: int = 0
) -> list[NodeFacts]:
    """The facts of each node, in the order of `nodes`: id of the node -> address. `paths`: their sizes. `folder`: is it
    the same on all nodes and here? `megabytes`: to send from each node to the next one; 0: only connect. This process
    has joined the cluster."""
    import ray
    from ray import exceptions
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def clock(probe: Any) -> float:
        return float(ray.get(probe.clock.remote(), timeout=ANSWER_S))

    probes: dict[str, Any] = {}
    for node in nodes:
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "max_concurrency": 4, "max_restarts": 0, "scheduling_strategy": place}
        probes[node] = ray.remote(Probe).options(**options).remote()
    try:
        asked = {node: probe.look.remote(paths) for node, probe in probes.items()}
        facts = {node: _facts(ref, nodes[node]) for node, ref in asked.items()}
        alive = {node: probes[node] for node, seen in facts.items() if not seen.failure}
        for node, probe in alive.items():
            offset, error = measure_clock(partial(clock, probe))
            facts[node] = replace(facts[node], clock_s=offset, clock_error_s=error)
        if folder is not None:
            for node, reason in _check_folder(alive, folder).items():
                facts[node] = replace(facts[node], folder=reason)
        for node, (reason, speed) in _check_links(alive, nodes, megabytes).items():
            facts[node] = replace(facts[node], link=reason, link_mb_s=speed)
        return list(facts.values())
    except exceptions.RayError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"the nodes of the Ray cluster changed while they were checked; try again ({reason})"
        ) from error
    finally:
        for probe in probes.values():
            ray.kill(probe)


def _facts(ref: Any, address: str) -> NodeFacts:
    import ray
    from ray import exceptions

    try:
        facts: NodeFacts = ray.get(ref, timeout=ANSWER_S)
        return facts
    except exceptions.GetTimeoutError:
        return NodeFacts(address, failure=f"no process of G-Core started there within {ANSWER_S:.0f} s")
    except exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if "Error: " in line]
        return NodeFacts(address, failure=(lines or [" ".join(str(error).split())])[-1][:300])


def measure_clock(clock: Callable[[], float]) -> tuple[float, float]:
    """How far `clock` is ahead of ours, and the largest possible error: half of the shortest round trip."""
    best = (0.0, float("inf"))
    for _ in range(CLOCK_CALLS):
        before = time.time()
        theirs = clock()
        after = time.time()
        if (error := (after - before) / 2) < best[1]:
            best = theirs - (before + after) / 2, error
    return best


def _check_folder(probes: Mapping[str, Any], folder: Path) -> dict[str, str]:
    import ray

    name, content = f".gcore-{secrets.token_hex(8)}", secrets.token_hex(16)
    file = folder.absolute() / name
    file.write_text(content)
    try:
        asked = {node: probe.check_folder.remote(str(file.parent), name, content) for node, probe in probes.items()}
        return {node: ray.get(ref, timeout=ANSWER_S) for node, ref in asked.items()}
    finally:
        for made in file.parent.glob(f"{name}*"):
            made.unlink(missing_ok=True)


def _check_links(probes: Mapping[str, Any], nodes: Mapping[str, str], megabytes: int) -> dict[str, tuple[str, float]]:
    """From each node to the next one, in a circle; one after the other, so that transfers do not share a link."""
    import ray

    if len(probes) < 2:
        return {}
    order, links = list(probes), {}
    for node, following in zip(order, [*order[1:], order[0]], strict=True):
        word = secrets.token_hex(16)
        port = ray.get(probes[following].listen.remote(), timeout=ANSWER_S)
        receiving = probes[following].receive.remote(word)
        sending = probes[node].send.remote(nodes[following], port, word, megabytes)
        links[node] = ray.get(sending, timeout=ANSWER_S + LINK_S)
        ray.wait([receiving], timeout=CONNECT_S)
    return links
