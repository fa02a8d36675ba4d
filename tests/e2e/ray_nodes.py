"""A Ray cluster of two nodes on this machine, as a process: prints its address, and ends when its input is closed.

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
from pathlib import Path

ADDRESSES = ("127.0.0.2", "127.0.0.3")


@contextlib.contextmanager
def two_nodes(cpus: int = 2, gpus: tuple[int, int] = (0, 0)) -> Iterator[dict[str, str]]:
    """The environment of processes that use the cluster. `gpus`: of each node; Ray only counts them."""
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    root = str(Path(__file__).parents[2])
    env |= {"PYTHONPATH": root, "RAY_USAGE_STATS_ENABLED": "0"}
    env.pop("RAY_ADDRESS", None)
    command, pipe = [sys.executable, "-m", "tests.e2e.ray_nodes", json.dumps([cpus, gpus])], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env, cwd=root) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            address = next((line.split()[1] for line in process.stdout if line.startswith("address ")), "")
            assert address, "the cluster did not start"
            yield {**env, "RAY_ADDRESS": address}
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
        cluster.add_node(**other)
        print("address", cluster.address, flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
