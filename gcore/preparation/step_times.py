"""Compares the layout of an update with the measured seconds of the ranks: idle shares, a fit of the cost model, and
the share of the GPUs' rate.

    TrainBatches, metas ──> predicted idle share, FLOPs ──┐
    UpdateStats of the ranks ──> measured one, MFU ───────┼──> one row of metrics per step
    the last steps ──workload.fit──> seconds ─────────────┘

Nothing here changes a layout: see workload.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from gcore.cost.workload import UPDATE, CostModel, Observation, fit, shared_prefixes
from gcore.preparation.balance import idle_share
from gcore.protocols import TrainerInfo, UpdateStats
from gcore.types import Key, MicroBatch, SampleMeta, TrainBatch

REMEMBERED = 256  # observations; one per step, or one per rank and step where ranks know how long they computed


class StepTimes:
    """StepTimes(CostModel(768.0), info).row(batches, metas, stats) -> {"perf/idle_predicted": 0.012, ...}

    `peak`: FLOP/s of the GPUs of all ranks, as published; None: unknown."""

    def __init__(self, cost: CostModel, info: TrainerInfo, peak: float | None = None) -> None:
        self._cost, self._info, self._peak = cost, info, peak
        self._seen: deque[Observation] = deque(maxlen=REMEMBERED)
        self._warm = False  # the first update also compiles and allocates

    def row(
        self, batches: Sequence[TrainBatch], metas: Sequence[SampleMeta], ranks: Sequence[UpdateStats]
    ) -> dict[str, float]:
        """`ranks`: of each data-parallel rank, as `batches`."""
        row = {"perf/micro_batches": float(sum(len(mini.micro_batches) for mini in batches[0].mini_batches))}
        if self._info.shares:
            row["perf/tokens_shared"] = shared_tokens(batches, metas)
            row["perf/tokens_trained"] = float(sum(meta.length for meta in metas))
        if len(batches) > 1:
            idle = idle_share(batches, metas, self._cost)
            row["perf/idle_predicted"] = idle.per_micro_batch if self._info.sharded else idle.per_mini_batch
        wall_s = max(rank.wall_s for rank in ranks)
        if not wall_s:
            return row
        if len(ranks) > 1 and all(rank.busy_s for rank in ranks):
            row["perf/idle_measured"] = 1 - sum(rank.busy_s for rank in ranks) / (len(ranks) * wall_s)
        if self._warm:
            self._seen.extend(observe(batches, metas, ranks, self._cost))
            if self._peak and self._cost.knows_flops:
                row["perf/mfu"] = training_flops(batches, metas, ranks, self._cost) / wall_s / self._peak
        self._warm = True
        if fitted := fit(self._seen, self._cost):
            row |= {
                "perf/fit_us_per_token": 1e6 * fitted.token_s,
                "perf/fit_ms_per_micro_batch": 1e3 * fitted.micro_batch_s,
                "perf/fit_crossover": fitted.crossover,
                "perf/fit_error": fitted.error,
            }
        return row


def shared_tokens(batches: Sequence[TrainBatch], metas: Sequence[SampleMeta]) -> float:
    """The tokens of neighbours that are not computed again, as a share of all tokens."""
    by_key = {meta.key: meta for meta in metas}
    micros = [micro for batch in batches for mini in batch.mini_batches for micro in mini.micro_batches]
    rows = [[by_key[key] for key in row] for micro in micros if micro.shares for row in micro.rows]
    saved = sum(prefix.tokens for row in rows for prefix in shared_prefixes(row))
    return saved / sum(meta.length for meta in metas)


def observe(
    batches: Sequence[TrainBatch], metas: Sequence[SampleMeta], ranks: Sequence[UpdateStats], cost: CostModel
) -> list[Observation]:
    """One observation per rank if ranks know how long they computed. Otherwise one of the whole update: it took as long
    as the most expensive micro-batch of each position."""
    by_key = {meta.key: meta for meta in metas}
    work = [
        [[_work(micro, by_key, cost) for micro in mini.micro_batches] for mini in batch.mini_batches]
        for batch in batches
    ]
    if all(rank.busy_s for rank in ranks):
        shares = [[micro for mini in rank for micro in mini] for rank in work]
        seconds = [rank.busy_s for rank in ranks]
    else:
        positions = [column for minis in zip(*work, strict=True) for column in zip(*minis, strict=True)]
        shares = [[max(column, key=lambda work: work[0] + work[1] / cost.crossover) for column in positions]]
        seconds = [max(rank.wall_s for rank in ranks)]
    return [
        Observation(sum(t for t, _ in share), sum(p for _, p in share), len(share), s)
        for share, s in zip(shares, seconds, strict=True)
    ]


def training_flops(
    batches: Sequence[TrainBatch], metas: Sequence[SampleMeta], ranks: Sequence[UpdateStats], cost: CostModel
) -> float:
    """Of the updates: forward and backward passes without recomputation and without the towers of media."""
    by_key = {meta.key: meta for meta in metas}
    minis = [mini for batch in batches for mini in batch.mini_batches]
    works = [_work(micro, by_key, cost) for mini in minis for micro in mini.micro_batches]
    times = max(rank.mini_batches for rank in ranks) / len(batches[0].mini_batches)  # epochs, and the critic's
    return UPDATE * times * cost.flops * sum(tokens + pairs / cost.crossover for tokens, pairs in works)


def _work(micro: MicroBatch, metas: Mapping[Key, SampleMeta], cost: CostModel) -> tuple[float, float]:
    """Tokens (with the head, in tokens) and pairs of one rank in a micro-batch."""
    rows = [[metas[key] for key in row] for row in micro.rows]
    samples = [meta for row in rows for meta in row]
    saved = [prefix.tokens for row in rows for prefix in (shared_prefixes(row) if micro.shares else ())]
    tokens = sum(m.work.passes * m.length + cost.head * m.steps for m in samples)
    tokens -= (1 - cost.stateful) * sum(saved)
    pairs = sum(m.work.passes * m.length**2 * (1 if cost.causal else 2) for m in samples) - sum(n * n for n in saved)
    return tokens / micro.context, pairs / micro.context
