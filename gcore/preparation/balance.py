"""Assigns samples to trainer ranks and micro-batches by their simulated workload. Pure functions.

    metas (gathered, sorted) ──split──> mini-batches ──┬──long samples──> groups of ranks: positions with context > 1
                                                       └──the rest──> ranks x positions (assignment.py) ──> rows

All ranks run equally many micro-batches. If weights are sharded, ranks meet in the collectives of every micro-batch, so
the micro-batches at one *position* of the ranks' lists should cost the same; otherwise ranks meet once per mini-batch.
`make_layout` gives the same layout on every controller that calls it on the same gathered metadata. Many ranks are laid
out in *parts* of at most PART ranks, to which samples are dealt by cost: several controllers can make parts of a layout
at the same time, and `join_parts` puts them together.

Siblings with media are neighbours where rows need no mask, because their media are encoded once per micro-batch. All
siblings are, where a rank computes a prompt once for neighbours (`shares`).

Invariants (tests/unit/test_balance.py): every sample is in exactly one row of one group of ranks; no row is wider than
its micro-batch; no micro-batch exceeds the token budget of its ranks; all ranks have the same number of micro-batches
and the same `context` at each position; the layout depends neither on the order of `metas` nor on the number of
controllers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gcore.cost.workload import MICRO_BATCH_TOKENS, CostModel, shared_prefixes
from gcore.preparation.assignment import (
    WIDTH_BLOCK,
    Bin,
    Grid,
    Items,
    Unpacked,
    by_bin,
    by_rank,
    candidates,
    even_positions,
    even_ranks,
    fill,
    greedy,
)
from gcore.preparation.refine import refine
from gcore.types import Key, MicroBatch, MiniBatch, ObjectiveName, SampleMeta, TrainBatch

UNIT = 1024  # integer costs per token
FAR_ABOVE = 1.2  # a sample is split over ranks if it costs more than this multiple of what others have. Chosen
MIN_PART = 1024  # tokens of a split sample per rank, unless it does not fit otherwise. Chosen
PART = 256  # ranks that are laid out together: the time of a layout grows with samples x ranks
CONTEXT_OVERHEAD = 0.1  # of the time, for each doubling of the ranks that share a sample: communication. Chosen


@dataclass(frozen=True, slots=True)
class LayoutRanks:
    """What a layout must know of the trainer. LayoutRanks(number=8, max_tokens=16384, sharded=True)"""

    number: int  # data-parallel ranks
    max_tokens: int  # per micro-batch and rank
    padded: bool = True  # micro-batches are computed as rows with a mask; False: sample by sample, without padding
    sharded: bool = False  # ranks meet in every micro-batch
    shares: bool = False  # neighbours share their prefixes
    max_context: int = 1  # ranks that may share a sample; a power of two that divides `number`
    part: bool = False  # of more ranks: positions of all parts must cost the same


Method = Callable[[Items], Grid]


def make_layout(
    metas: Sequence[SampleMeta],
    *,
    step: int,
    num_ranks: int,
    mini_batches: int,
    max_tokens: int,
    cost: CostModel,
    objective: ObjectiveName = "policy",
    together: bool = False,
    padded: bool = True,
    sharded: bool = False,
    shares: bool = False,
    max_context: int = 1,
    method: Method | None = None,
    parts: Sequence[int] | None = None,
) -> list[TrainBatch]:
    """One TrainBatch per data-parallel rank. `together`: siblings are neighbours in one row of one micro-batch, in the
    order of their numbers. `method`: instead of ours, without context parallelism (bench/layouts.py). `parts`: only the
    ranks of these parts, see `num_parts`; default: all."""
    shares = shares and max_context == 1
    ranks = LayoutRanks(num_ranks, max_tokens, padded, sharded, shares, max_context)
    count = 1 if method else num_parts(num_ranks, max_context)
    numbers = range(count) if parts is None else parts
    of_parts: list[list[list[MiniBatch]]] = [[[] for _ in range(num_ranks // count)] for _ in numbers]  # part, rank
    for mini in split(sorted(metas, key=lambda meta: meta.key), mini_batches):
        num_actions, num_samples = sum(m.actions for m in mini), len({m.trajectory_key for m in mini})
        most = min(max_tokens / 4, sum(m.length for m in mini) / num_ranks / 4)
        units = {unit[0].key: unit for unit in (by_prompt(mini) if together else neighbours(mini, most, ranks))}
        dealt = deal(units, count, cost, shares)
        for number, own in zip(numbers, of_parts, strict=True):
            laid_out = _lay_out(dealt[number], replace(ranks, number=len(own), part=count > 1), cost, method)
            for batches, micro_batches in zip(own, laid_out, strict=True):
                batches.append(MiniBatch(micro_batches, num_actions, num_samples))
    return join_parts([[TrainBatch(step, tuple(batches), objective) for batches in own] for own in of_parts])


def num_parts(num_ranks: int, max_context: int = 1) -> int:
    """Parts of equal size, each of at most PART ranks; 1 if there is no such division."""
    least = -(-num_ranks // PART)
    if max_context > 1:
        return 1
    return next((count for count in range(least, 4 * least) if num_ranks % count == 0), 1)


Units = Mapping[Key, Sequence[SampleMeta]]  # samples that stay together, by the first key


def deal(units: Units, count: int, cost: CostModel, shares: bool = False) -> list[Units]:
    """Parts with nearly the same costs and lengths: forth and back, the most expensive first."""
    if count == 1:
        return [units]
    costs = {key: cost.of_samples(unit, shares) for key, unit in units.items()}
    parts: list[dict[Key, Sequence[SampleMeta]]] = [{} for _ in range(count)]
    for i, key in enumerate(sorted(units, key=lambda key: (-costs[key], key))):
        turn, place = divmod(i, count)
        parts[count - 1 - place if turn % 2 else place][key] = units[key]
    return [*parts]


def join_parts(parts: Sequence[Sequence[TrainBatch]]) -> list[TrainBatch]:
    """The batches of all ranks. They run equally many micro-batches: those of some parts get empty ones."""
    if len(parts) < 2:
        return [batch for part in parts for batch in part]
    minis = range(len(parts[0][0].mini_batches))
    most = [max(len(part[0].mini_batches[i].micro_batches) for part in parts) for i in minis]

    def filled(mini: MiniBatch, number: int) -> MiniBatch:
        missing = (MicroBatch((), WIDTH_BLOCK),) * (number - len(mini.micro_batches))
        return replace(mini, micro_batches=mini.micro_batches + missing)

    return [
        replace(batch, mini_batches=tuple(map(filled, batch.mini_batches, most))) for part in parts for batch in part
    ]


def split(metas: Sequence[SampleMeta], num_parts: int) -> list[list[SampleMeta]]:
    """Split into parts of about the same number of prompts. Siblings stay in the same part."""
    groups = by_prompt(metas)
    num_parts = min(num_parts, len(groups))
    bounds = [len(groups) * i // num_parts for i in range(num_parts + 1)]
    return [[m for g in groups[a:b] for m in g] for a, b in itertools.pairwise(bounds)]


def by_prompt(metas: Sequence[SampleMeta]) -> list[list[SampleMeta]]:
    groups: dict[int, list[SampleMeta]] = {}
    for meta in metas:
        groups.setdefault(meta.prompt_id, []).append(meta)
    return list(groups.values())


def neighbours(metas: Sequence[SampleMeta], most: float, ranks: LayoutRanks) -> list[list[SampleMeta]]:
    """Siblings that share their prefix or their media stay together, up to `most` tokens. All others are alone."""
    units = list[list[SampleMeta]]()
    for meta in metas:
        last = units[-1] if units else []
        share = shared_prefixes([*last[-1:], meta]) if ranks.shares else meta.work.media and not ranks.padded
        same = bool(share and last and last[-1].prompt_id == meta.prompt_id)
        if same and _joined([*last, meta], ranks.shares).length <= most:
            last.append(meta)
        else:
            units.append([meta])
    return units


def _joined(unit: Sequence[SampleMeta], shares: bool) -> SampleMeta:
    """The samples of a unit as one item of the layout."""
    first, saved = unit[0], shared_prefixes(unit) if shares else []
    length = sum(meta.length for meta in unit) - sum(meta.work.prefix[0] for meta in saved)
    steps = sum(meta.steps for meta in unit)
    return first if len(unit) == 1 else replace(first, work=replace(first.work, length=length), steps=steps)


@dataclass(frozen=True, slots=True)
class Position:
    """Micro-batches that all ranks run at the same time. Their items are numbers of `metas`."""

    context: int
    metas: Sequence[SampleMeta]
    bins: Sequence[Bin]  # one per group of `context` ranks


def _lay_out(units: Units, ranks: LayoutRanks, cost: CostModel, method: Method | None) -> list[tuple[MicroBatch, ...]]:
    """The micro-batches of each rank, in one mini-batch. `units`: samples that stay together, by the first key."""
    costs = {key: max(1, round(UNIT * cost.of_samples(unit, ranks.shares))) for key, unit in units.items()}
    metas = sorted((_joined(unit, ranks.shares) for unit in units.values()), key=lambda m: (-costs[m.key], m.key))
    if method:
        positions = [Position(1, metas, bins) for bins in method(_items(metas, costs, ranks))]
    else:
        layouts = (_positions(metas, degrees, costs, ranks, cost) for degrees in _choices(metas, costs, ranks))
        positions = min(layouts, key=lambda layout: _time(layout, ranks, cost))
    return [
        tuple(_micro_batch(position, rank // position.context, units, ranks.shares) for position in positions)
        for rank in range(ranks.number)
    ]


def _micro_batch(position: Position, group: int, units: Mapping[Key, Sequence[SampleMeta]], shares: bool) -> MicroBatch:
    each = position.bins[group]
    rows = tuple(tuple(meta.key for i in row for meta in units[position.metas[i].key]) for row in each.rows)
    width = each.width if each.padded else -(-each.width // WIDTH_BLOCK) * WIDTH_BLOCK
    return MicroBatch(rows, width or WIDTH_BLOCK, position.context, shares)


def _items(metas: Sequence[SampleMeta], costs: Mapping[Key, int], ranks: LayoutRanks, context: int = 1) -> Items:
    """For groups of `context` ranks. Shared samples are in one row; each begins at a multiple of twice the group."""
    block = 2 * context if context > 1 else 1
    return Items(
        [-(-m.length // block) * block * m.work.passes for m in metas],
        [max(1, costs[m.key] // context) for m in metas],
        ranks.number // context,
        ranks.max_tokens * context,
        ranks.padded and context == 1,
        tuple(sorted(range(len(metas)), key=lambda i: metas[i].key)),
    )


def _time(positions: Sequence[Position], ranks: LayoutRanks, cost: CostModel) -> float:
    """Of the mini-batch, in integer costs."""

    def of_bin(each: Bin, position: Position) -> float:
        if not each.padded:
            return each.load
        steps = sum(position.metas[i].steps for row in each.rows for i in row)
        return UNIT * (len(each.rows) * cost.of_row(each.width) + cost.head * steps)

    grid = [
        [
            of_bin(position.bins[rank // position.context], position)
            * (1 + CONTEXT_OVERHEAD * (position.context.bit_length() - 1))
            for rank in range(ranks.number)
        ]
        for position in positions
    ]
    longest = sum(map(max, grid)) if ranks.sharded else max(map(sum, zip(*grid, strict=True)))
    return longest + len(grid) * UNIT * MICRO_BATCH_TOKENS


# ---- one rank per sample ------------------------------------------------------------------------------------------


def _on_one_rank(metas: Sequence[SampleMeta], costs: Mapping[Key, int], ranks: LayoutRanks, cost: CostModel) -> Grid:
    """The grid that takes the least time. Ties: the first."""
    items = _items(metas, costs, ranks)

    def time(grid: Grid) -> float:
        return _time([Position(1, metas, bins) for bins in grid], ranks, cost)

    if not ranks.sharded:
        return min([*candidates(items), by_rank(items, equal_shares(items))], key=time)
    grid = even_positions(items) if ranks.part else None  # another family of layouts has cheap and expensive positions
    if grid is None:
        grid = min([*candidates(items), by_rank(items, greedy(items))], key=time)
    return grid if ranks.padded else even_ranks(refine(items, grid))


def equal_shares(items: Items) -> list[list[int]]:
    """The items of each rank, such that ranks cost the same: one position without a token budget."""
    whole = replace(items, budget=sum(items.lengths), padded=False)
    grid = by_bin(whole, 1)
    assert grid is not None
    return [[i for row in each.rows for i in row] for each in refine(whole, grid)[0]]


# ---- several ranks per sample -------------------------------------------------------------------------------------


def _choices(metas: Sequence[SampleMeta], costs: Mapping[Key, int], ranks: LayoutRanks) -> list[dict[Key, int]]:
    """Degrees to choose from: split only what does not fit; also what costs more than a rank's share; also what costs
    more than a full micro-batch of average samples, since the other ranks of its position have no more than that."""
    share = sum(costs.values()) / ranks.number
    full = ranks.max_tokens * sum(costs.values()) / sum(m.length for m in metas)
    choices = list[dict[Key, int]]()
    for limit in (math.inf, FAR_ABOVE * share, FAR_ABOVE * min(share, full)):
        degrees = context_degrees(metas, costs, ranks, limit)
        if degrees not in choices:
            choices.append(degrees)
    return choices


def context_degrees(
    metas: Sequence[SampleMeta], costs: Mapping[Key, int], ranks: LayoutRanks, limit: float
) -> dict[Key, int]:
    """Number of ranks that compute a sample together: as few as possible, so that short samples have no communication.

    A sample is split if it does not fit the token budget of its ranks, or if it costs each of them more than `limit`
    and its parts do not become too short.
    """
    degrees = dict[Key, int]()
    for meta in metas:
        degree = 1
        while 2 * degree <= ranks.max_context and not ranks.number % (2 * degree):
            fits = meta.length <= degree * ranks.max_tokens
            short = meta.length < 2 * degree * MIN_PART
            if fits and (short or costs[meta.key] <= degree * limit):
                break
            degree *= 2
        degrees[meta.key] = degree
    return degrees


def _positions(
    metas: Sequence[SampleMeta],
    degrees: Mapping[Key, int],
    costs: Mapping[Key, int],
    ranks: LayoutRanks,
    cost: CostModel,
) -> list[Position]:
    """Positions with the highest degree first. Groups of ranks that would wait for a long sample get others too."""
    left, positions = list(metas), list[Position]()
    for context in sorted(set(degrees.values()) - {1}, reverse=True):
        chosen = [m for m in left if m.length >= WIDTH_BLOCK * context or degrees[m.key] == context]
        need = [i for i, meta in enumerate(chosen) if degrees[meta.key] == context]
        items = _items(chosen, costs, ranks, context)
        pool, taken = Unpacked(items), set[int]()
        while need:
            bins = fill(pool, items, 0, need[: items.ranks])
            taken |= {i for each in bins for row in each.rows for i in row}
            need = [i for i in need if i not in taken]
            positions.append(Position(context, chosen, bins))
        keys = {chosen[i].key for i in taken}
        left = [meta for meta in left if meta.key not in keys]
    if left:
        positions += [Position(1, left, bins) for bins in _on_one_rank(left, costs, ranks, cost)]
    return positions


# ---- what a layout is worth ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Idle:
    """Share of the ranks' time that they wait for each other. Idle(per_micro_batch=0.012, per_mini_batch=0.004)"""

    per_micro_batch: float  # if ranks meet in every micro-batch: sharded weights
    per_mini_batch: float  # if ranks meet once per mini-batch


def idle_share(batches: Sequence[TrainBatch], metas: Sequence[SampleMeta], cost: CostModel) -> Idle:
    """By the cost model. Padding is not counted: neither as work nor as waiting."""
    by_key = {meta.key: meta for meta in metas}
    busy = per_micro = per_mini = 0.0
    for minis in zip(*(batch.mini_batches for batch in batches), strict=True):
        loads = [[_load(micro, by_key, cost) for micro in mini.micro_batches] for mini in minis]
        busy += sum(map(sum, loads)) / len(loads)
        per_micro += sum(map(max, zip(*loads, strict=True)))
        per_mini += max(map(sum, loads))
    return Idle(1 - busy / per_micro, 1 - busy / per_mini) if busy else Idle(0.0, 0.0)


def _load(micro: MicroBatch, metas: Mapping[Key, SampleMeta], cost: CostModel) -> float:
    return sum(cost.of_samples([metas[key] for key in row], micro.shares) for row in micro.rows) / micro.context
