"""Which GPUs a role's replicas sit on. Pure.

shared          engine, judge and trainer rank i share GPU i
disaggregated   policy │ judges │ scorers │ trainer: every replica has GPUs of its own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gcore.types import UserError


@dataclass(frozen=True, slots=True)
class GpuAssignment:
    """GpuAssignment(bundles=(2, 1, 1), first={"engine": 0, "judge-critic": 1, "trainer": 2}): engine on two GPUs."""

    bundles: tuple[int, ...] = ()  # GPUs of each bundle; a replica sits in one
    first: Mapping[str, int] = field(default_factory=dict)  # kind -> bundle of its replica 0; empty: all share
    share: float = 1.0  # of a GPU, where they share

    def of(self, kind: str, rank: int) -> tuple[int, float]:
        """The bundle of KIND-rank, and how many GPUs of it are its own."""
        if not self.first:
            return rank % len(self.bundles), self.share
        bundle = self.first[kind] + rank
        return bundle, float(self.bundles[bundle])


def together(gpus: int, counts: Mapping[str, int]) -> GpuAssignment:
    """Replica i of every kind on GPU i, modulo their number; the scheduler must find room for all."""
    kinds = sum(-(-count // gpus) for count in counts.values()) if gpus else 1
    return GpuAssignment((1,) * gpus, share=round(0.95 / kinds, 4))


def apart(gpus: int, counts: Mapping[str, int], widths: Mapping[str, int]) -> GpuAssignment:
    """One kind after the other; `widths` are the GPUs of a replica, 1 where nothing is said."""
    bundles, first = list[int](), dict[str, int]()
    for kind, count in counts.items():
        first[kind] = len(bundles)
        bundles += [widths.get(kind, 1)] * count
    if sum(bundles) > gpus:
        asked = ", ".join(f"{kind} {count} x {widths.get(kind, 1)}" for kind, count in counts.items())
        raise UserError(
            f"placement.mode=disaggregated gives every replica GPUs of its own: {asked} = {sum(bundles)} GPUs, got "
            f"{gpus} (keys: placement.trainer.ranks, placement.policy.replicas, rewards.judges.N.replicas)"
        )
    return GpuAssignment(tuple(bundles), first)
