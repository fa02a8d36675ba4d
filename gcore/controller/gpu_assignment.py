"""Assigns GPUs to the replicas of each role. Pure functions.

shared          engine, judge and trainer rank i share GPU i
disaggregated   policy │ judges │ scorers │ trainer: every replica has its own GPUs

A *bundle* is a set of GPUs that Ray reserves; each replica runs in one bundle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gcore.types import UserError


@dataclass(frozen=True, slots=True)
class GpuAssignment:
    """GpuAssignment(bundles=(2, 1, 1), first={"engine": 0, "judge-critic": 1, "trainer": 2}): engine on two GPUs."""

    bundles: tuple[int, ...] = ()  # number of GPUs of each bundle
    first: Mapping[str, int] = field(default_factory=dict)  # kind -> bundle of its replica 0; empty: kinds share GPUs
    share: float = 1.0  # fraction of a GPU per replica, if kinds share GPUs

    def of(self, kind: str, rank: int) -> tuple[int, float]:
        """The bundle of replica KIND-rank, and the number of GPUs that it reserves there."""
        if not self.first:
            return rank % len(self.bundles), self.share
        bundle = self.first[kind] + rank
        return bundle, float(self.bundles[bundle])


def shared_gpus(gpus: int, counts: Mapping[str, int]) -> GpuAssignment:
    """Replica i of every kind is on GPU i modulo `gpus`. Shares are small enough that Ray can schedule all replicas."""
    kinds = sum(-(-count // gpus) for count in counts.values()) if gpus else 1
    return GpuAssignment((1,) * gpus, share=round(0.95 / kinds, 4))


def separate_gpus(gpus: int, counts: Mapping[str, int], widths: Mapping[str, int]) -> GpuAssignment:
    """One kind after the other. `widths`: GPUs per replica of a kind, default 1."""
    bundles, first = list[int](), dict[str, int]()
    for kind, count in counts.items():
        first[kind] = len(bundles)
        bundles += [widths.get(kind, 1)] * count
    if sum(bundles) > gpus:
        needed = ", ".join(f"{kind} {count} x {widths.get(kind, 1)}" for kind, count in counts.items())
        raise UserError(
            f"placement.mode=disaggregated gives every replica its own GPUs: {needed} = {sum(bundles)} GPUs, got "
            f"{gpus} (keys: placement.trainer.ranks, placement.policy.replicas, rewards.judges.N.replicas)"
        )
    return GpuAssignment(tuple(bundles), first)
