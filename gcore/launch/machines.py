"""The machines of a run: their cores, GPUs and memory. Pure, except the functions that look at this machine.

ray.nodes() ──cluster_of──┐
this machine ─────────────┴──> Cluster ──make_plan──> Plan (launch/plan.py)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gcore.config.tree import Config
from gcore.types import UserError

ACCELERATOR = "accelerator_type:"  # Ray's resource that names the GPUs of a node, accelerator_type:H100


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine(cores=2, gpus=0, memory_mb=24105, free_mb=20311); 0 MB: unknown. A node of a Ray cluster has an id."""

    cores: int
    gpus: int
    memory_mb: int = 0
    free_mb: int = 0
    address: str = ""  # of a node of a cluster
    node_id: str = ""  # Ray's; empty: the driver's machine, without a cluster
    gpu_name: str = ""  # H100; empty: unknown


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes that run roles, the driver's first if it is among them. Cluster((Machine(8, 0), Machine(8, 0)))"""

    nodes: tuple[Machine, ...]

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @property
    def cores(self) -> int:
        return sum(node.cores for node in self.nodes)

    @property
    def is_joined(self) -> bool:
        """The nodes are those of a Ray cluster that exists before the run."""
        return any(node.node_id for node in self.nodes)


def as_cluster(machines: Cluster | Machine) -> Cluster:
    return machines if isinstance(machines, Cluster) else Cluster((machines,))


def cluster_of(nodes: Sequence[Mapping[str, Any]], driver: str) -> Cluster:
    """From `ray.nodes()`. `driver`: id of the node where the driver runs. Nodes without CPUs run no roles: a head node
    started with `--num-cpus=0`."""
    machines = []
    for node in nodes:
        resources = node["Resources"] if node["Alive"] else {}
        if int(resources.get("CPU", 0)) < 1:
            continue
        names = (name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR))
        memory = resources.get("memory", 0) + resources.get("object_store_memory", 0)
        machines.append(
            Machine(
                cores=int(resources["CPU"]),
                gpus=int(resources.get("GPU", 0)),
                memory_mb=int(memory) // 2**20,
                address=node["NodeManagerAddress"],
                node_id=node["NodeID"],
                gpu_name=next(names, ""),
            )
        )
    if not machines:
        raise UserError(f"the Ray cluster has {len(nodes)} node(s), and none of them is alive and has a CPU")
    return Cluster(tuple(sorted(machines, key=lambda node: (node.node_id != driver, node.address, node.node_id))))


def see_cluster(config: Config) -> Cluster:
    """The machines of the run: the nodes of the Ray cluster at RAY_ADDRESS, which is joined, or this machine."""
    from gcore.runtime.ray_cluster import is_joined, list_nodes

    is_alone = config.runtime == "local" or not is_joined()
    return Cluster((detect_machine(),)) if is_alone else cluster_of(*list_nodes())


def detect_machine() -> Machine:
    """The cores that this process may use, the GPUs and the memory. Does not import torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = len([v for v in visible.split(",") if v.strip() and v.strip() != "-1"])
    else:
        try:
            gpus = sum(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev"))
        except OSError:
            gpus = 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(cores, gpus, *_see_memory())


def _see_memory() -> tuple[int, int]:
    """Total and free MB of this machine, or of the container of this process."""
    memory = psutil.virtual_memory()
    total, free = memory.total // 2**20, memory.available // 2**20
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(file).read_text()) // 2**20
        except (OSError, ValueError):  # the file does not exist, or contains "max"
            continue
        total, free = min(total, limit), min(free, limit)
    return total, free
