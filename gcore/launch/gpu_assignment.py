"""Assigns the GPUs of the nodes to the replicas of each role. Pure functions.

shared          engine, judge and trainer rank i share GPU i
disaggregated   policy │ judges │ scorers │ trainer │ critic: every replica has its own GPUs

GPUs are numbered node by node. A *bundle* is a set of GPUs of one node that Ray reserves. The GPUs of a tensor-parallel
replica are on one node, and so are those of a tensor-parallel group of trainer ranks; where the GPUs of a node are not
a multiple of its width, the rest is skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gcore.types import UserError

TRAINER, CRITIC = "trainer", "critic"
Bundles = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GpuAssignment:
    """GpuAssignment(bundles=(2, 1), nodes=(0, 1), replicas={"engine": ((0,),), "trainer": ((1,),)})"""

    bundles: tuple[int, ...] = ()  # number of GPUs of each bundle
    nodes: tuple[int, ...] = ()  # node of each bundle
    replicas: Mapping[str, tuple[Bundles, ...]] = field(default_factory=dict)  # kind -> bundles of each replica
    share: float = 1.0  # fraction of a GPU per replica, if kinds share GPUs

    def of(self, kind: str, rank: int) -> tuple[Bundles, float]:
        """The bundles of replica KIND-rank, and the number of GPUs that it reserves in the first one. A tensor-parallel
        replica on shared GPUs has several bundles of one GPU: Ray cannot reserve parts of several GPUs. Controllers,
        and all roles of a run on CPUs, have none."""
        if kind not in self.replicas:
            return (), 0.0
        bundles = self.replicas[kind][rank]
        return bundles, self.share * self.bundles[bundles[0]]

    def node_of(self, kind: str, rank: int) -> int:
        return self.nodes[self.replicas[kind][rank][0]]

    @property
    def engines_share_gpus(self) -> bool:
        """Engine i computes on the GPU of trainer rank i (modulo the ranks), and on no other one."""
        ranks = self.replicas.get(TRAINER, ())
        engines = self.replicas.get("engine", ())
        return bool(ranks) and all(bundles == ranks[i % len(ranks)] for i, bundles in enumerate(engines))


def shared_gpus(
    node_gpus: Sequence[int],
    counts: Mapping[str, int],
    widths: Mapping[str, int] | None = None,
    group: int = 1,
    blocks: Mapping[str, int] | None = None,
) -> GpuAssignment:
    """Replica i of every kind is on GPU i, modulo the GPUs that engines and trainer ranks need. Shares are small enough
    that Ray can schedule all replicas. `widths`: GPUs per replica of a kind, default 1. `group`: trainer ranks per
    tensor-parallel group. `blocks`: GPUs of the blocks that a kind's replicas fill (placement/grid.py)."""
    widths = widths or {}

    def places(kind: str, gpus: Sequence[int]) -> list[Bundles]:
        if kind == TRAINER:
            return [(gpu,) for members in within_nodes(gpus, group) for gpu in members]
        return within_nodes(gpus, widths.get(kind, 1), (blocks or {}).get(kind, 1))

    used = 0
    for kind, count in counts.items():
        needed = count if kind in ("engine", TRAINER) else 1
        used = max([used, *(max(gpus) + 1 for gpus in places(kind, node_gpus)[:needed])])
    pool, left = list[int](), used
    for gpus in node_gpus:
        pool.append(min(gpus, left))
        left -= pool[-1]
    replicas = {}
    for kind, count in counts.items():
        if not (taken := places(kind, pool)):
            continue  # no GPU at all
        replicas[kind] = tuple(taken[rank % len(taken)] for rank in range(count))
    load = Counter(bundles[0] for taken in replicas.values() for bundles in taken)
    nodes = tuple(node for node, gpus in enumerate(pool) for _ in range(gpus))
    return GpuAssignment((1,) * used, nodes, replicas, share=round(0.95 / max(load.values(), default=1), 4))


def within_nodes(node_gpus: Sequence[int], width: int, block: int = 1) -> list[Bundles]:
    """Sets of `width` GPUs, each on one node, and within a block of `block` GPUs of it.
    within_nodes([3, 2], 2) == [(0, 1), (3, 4)]"""
    sets, first = list[Bundles](), 0
    block = max(width, block)
    for gpus in node_gpus:
        for start in range(first, first + gpus - block + 1, block):
            sets += [tuple(range(at, at + width)) for at in range(start, start + block - width + 1, width)]
        first += gpus
    return sets


def separate_gpus(
    node_gpus: Sequence[int], counts: Mapping[str, int], widths: Mapping[str, int] | None = None, group: int = 1
) -> GpuAssignment:
    """One kind after the other. The widest replicas get their GPUs first, each on the first node with enough of them
    left. `widths`: GPUs per replica of a kind, default 1. `group`: trainer ranks per tensor-parallel group."""
    widths = widths or {}
    sizes: dict[tuple[str, int], int] = {}  # GPUs that must be on one node, by kind and first replica
    for kind, count in counts.items():
        step = group if kind == TRAINER else 1
        sizes |= {(kind, first): step * widths.get(kind, 1) for first in range(0, count, step)}
    needed = ", ".join(f"{kind} {count} x {widths.get(kind, 1)}" for kind, count in counts.items())
    keys = "(keys: placement.trainer.ranks, placement.policy.replicas, rewards.judges.N.replicas"
    keys += ", placement.critic.ranks)" if counts.get(CRITIC) else ")"
    if sum(sizes.values()) > sum(node_gpus):
        raise UserError(
            f"placement.mode=disaggregated gives every replica its own GPUs: {needed} = {sum(sizes.values())} GPUs, "
            f"got {sum(node_gpus)} {keys}"
        )
    free, node_of = list(node_gpus), dict[tuple[str, int], int]()
    for (kind, first), size in sorted(sizes.items(), key=lambda item: -item[1]):
        node = next((node for node, gpus in enumerate(free) if gpus >= size), None)
        if node is None:
            raise UserError(
                f"placement.mode=disaggregated: no node has {size} GPUs left for {kind}-{first}, and tensor-parallel "
                f"groups stay within a node; nodes with {', '.join(map(str, node_gpus))} GPUs, needed: {needed} {keys}"
            )
        free[node] -= size
        node_of[kind, first] = node
    bundles, nodes, replicas = list[int](), list[int](), dict[str, tuple[Bundles, ...]]()
    for kind, count in counts.items():
        step = group if kind == TRAINER else 1
        replicas[kind] = tuple((len(bundles) + rank,) for rank in range(count))
        bundles += [widths.get(kind, 1)] * count
        nodes += [node_of[kind, rank - rank % step] for rank in range(count)]
    return GpuAssignment(tuple(bundles), tuple(nodes), replicas)
