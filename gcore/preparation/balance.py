"""Assigns samples to trainer ranks, and packs them into rows and micro-batches, by their lengths. Pure functions.

    metas (gathered, sorted) ──split──> mini-batches ──assign (cost)──> ranks ──pack──> rows ──> micro-batches

Every controller calls `make_layout` on the same gathered metadata and gets the same layout without further messages.
Invariants (tests/unit/test_balance.py): every sample is in exactly one row of one rank; no row is wider than its
micro-batch; no micro-batch exceeds the token budget; all ranks have the same number of micro-batches (they meet in
collectives); the layout depends neither on the order of `metas` nor on the number of controllers.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from typing import Literal

from gcore.preparation.workload import CostModel
from gcore.types import MicroBatch, MiniBatch, SampleMeta, TrainBatch

WIDTH_BLOCK = 8


def make_layout(
    metas: Sequence[SampleMeta],
    *,
    step: int,
    num_ranks: int,
    mini_batches: int,
    max_tokens: int,
    cost: CostModel,
    objective: Literal["policy", "imitation"] = "policy",
) -> list[TrainBatch]:
    """One TrainBatch per rank."""
    parts = split(sorted(metas, key=lambda meta: meta.key), mini_batches)
    by_rank: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    for part in parts:
        num_actions, num_samples = sum(m.actions for m in part), len(part)
        micro = [pack(share, max_tokens) for share in assign(part, num_ranks, cost)]
        most = max(len(batches) for batches in micro)
        for rank, batches in enumerate(micro):
            padded = (*batches, *[MicroBatch((), WIDTH_BLOCK)] * (most - len(batches)))
            by_rank[rank].append(MiniBatch(padded, num_actions, num_samples))
    return [TrainBatch(step, tuple(batches), objective) for batches in by_rank]


def split(metas: Sequence[SampleMeta], num_parts: int) -> list[list[SampleMeta]]:
    """Split into parts of about the same number of prompts. Siblings stay in the same part."""
    prompts: dict[int, list[SampleMeta]] = {}
    for meta in metas:
        prompts.setdefault(meta.prompt_id, []).append(meta)
    groups = list(prompts.values())
    num_parts = min(num_parts, len(groups))
    bounds = [len(groups) * i // num_parts for i in range(num_parts + 1)]
    return [[m for g in groups[a:b] for m in g] for a, b in itertools.pairwise(bounds)]


def assign(metas: Sequence[SampleMeta], num_ranks: int, cost: CostModel) -> list[list[SampleMeta]]:
    """Each sample, most expensive first, goes to the rank with the lowest cost so far. The highest cost of a rank is at
    most 4/3 of the optimum."""
    shares: list[list[SampleMeta]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for meta in sorted(metas, key=lambda m: (-m.length, m.key)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(meta)
        heapq.heappush(loads, (load + cost.of(meta.length), rank))
    return shares


def pack(metas: Sequence[SampleMeta], max_tokens: int) -> list[MicroBatch]:
    """Pack samples into rows by best fit. The rows of a micro-batch are as wide as its longest sample.

    `metas` are sorted, longest first, so a micro-batch has samples of similar length and little padding.
    """
    batches: list[MicroBatch] = []
    rows: list[list[SampleMeta]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    width = 0

    def close() -> None:
        if rows:
            batches.append(MicroBatch(tuple(tuple(m.key for m in row) for row in rows), width))
            rows.clear()
            room.clear()

    for meta in metas:
        best = bisect.bisect_left(room, (meta.length, -1))
        if best < len(room):
            free, row = room.pop(best)
            rows[row].append(meta)
            bisect.insort(room, (free - meta.length, row))
            continue
        if rows and (len(rows) + 1) * width > max_tokens:
            close()
        if not rows:
            width = min(-(-meta.length // WIDTH_BLOCK) * WIDTH_BLOCK, max(max_tokens, meta.length))
        rows.append([meta])
        bisect.insort(room, (width - meta.length, len(rows) - 1))
    close()
    return batches


def imbalance(shares: Sequence[Sequence[SampleMeta]], cost: CostModel) -> float:
    """Highest cost of a rank / mean cost: 1.0 is perfect."""
    loads = [sum(cost.of(m.length) for m in share) for share in shares]
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0
