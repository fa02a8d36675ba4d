"""A Ray cluster of two nodes on this machine, as a process: prints its address, and ends when its input is closed. The
lines `remove` and `add` on its input kill the second node, and start one there.

The nodes have addresses of their own on loopback, so a process that looks for another one on 127.0.0.1 fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ADDRESSES = ("127.0.0.2", "127.0.0.3")


@dataclass(frozen=True)
class Nodes:
    env: dict[str, str]  # of processes that use the cluster
    process: subprocess.Popen[str]

    def change(self, command: Literal["remove", "add"]) -> None:
        """The second node dies, or is started again."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(command, file=self.process.stdin, flush=True)
        assert any(line == f"{command} done\n" for line in self.process.stdout)


@contextlib.contextmanager
def two_nodes(cpus: int = 2, gpus: tuple[int, int] = (0, 0)) -> Iterator[Nodes]:
    """`gpus`: of each node; Ray only counts them."""
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    root = str(Path(__file__).parents[2])
    env |= {"PYTHONPATH": root, "RAY_USAGE_STATS_ENABLED": "0"}
    env.pop("RAY_ADDRESS", None)
    command, pipe = [sys.executable, "-m", "tests.e2e.ray_nodes", json.dumps([cpus, gpus])], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env, cwd=root, bufsize=1) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            address = next((line.split()[1] for line in process.stdout if line.startswith("address ")), "")
            assert address, "the cluster did not start"
            yield Nodes({**env, "RAY_ADDRESS": address}, process)
        finally:
            process.stdin.close()
            process.wait(60)


def main() -> None:
    from ray.cluster_utils import Cluster

    cpus, gpus = json.loads(sys.argv[1])
    options = {"num_cpus": cpus, "object_store_memory": 100 << 20}
    head, other = ({**options, "node_ip_address": ip, "num_gpus": n} for ip, n in zip(ADDRESSES, gpus, strict=True))
    cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    try:
        node = cluster.add_node(**other)
        print("address", cluster.address, flush=True)
        for line in sys.stdin:
            if line == "remove\n":
                cluster.remove_node(node, allow_graceful=False)
            elif line == "add\n":
                node = cluster.add_node(**other)
            print(line.strip(), "done", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
