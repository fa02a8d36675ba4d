"""Decides which blocks change their owner. Pure: the simulator, emulated runs and GPU runs use the same functions.

    ClusterLoad (the current load of each role) + Split + RoleSpeeds ──decide──> moves, each with its reason

The rollout ends when enough groups are judged. The end is estimated from the roles' speeds (replica_speed.py): n
replicas that share their requests evenly take

    base * steps + per_sequence * tokens / n + prefill / n

where `steps` are the decoding steps of the longest request that must still end. Judges need generated responses: a
fraction s of the responses is generated at time t(s), and the other verdicts are made after that,

    end = max over s of   t(s) + (1 - s) * judging / judges

A move must bring the end nearer by more than it costs. Judges get no more blocks than they have work for *now*. The
more responses are still to come, the more work a block must have: a full batch takes hardly longer than a small one, so
blocks that judge too early waste time that generation needs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from gcore.cost.replica_speed import ReplicaSpeed
from gcore.placement.grid import POLICY, TRAINER, DeviceGrid, Move, Split, split_by

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
LEAST_RATE = 0.05  # lower bound of the acceptance rate when the missing groups are estimated
FULL = 0.95  # share of its best throughput at which a judge replica counts as full


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one role. Load(running=40, waiting=8, needed=30, age=120.0, lengths=(80, 200, 512), ...)"""

    running: int = 0  # requests at replicas
    waiting: int = 0  # requests that no replica has yet
    needed: float = 0.0  # estimate: requests that must end before the rollout can, including some not made yet
    age: float = 0.0  # tokens of the running requests so far, mean
    lengths: Sequence[float] = (256.0,)  # of requests that ended recently: sorted quantiles
    longest: Sequence[float] = ()  # the same of the longest sibling of each group; default: as `lengths`
    prompt: float = 0.0  # tokens to prefill per request, mean
    busy: float = 0.0  # share of its replicas' time with a request, since the last poll; in the simulator, before a
    # rollout: share of all slots' time in the last one

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def in_progress(self) -> int:
        return self.running + self.waiting

    def steps_to(self, share: float) -> float:
        """Decoding steps until this share of the groups in progress has ended."""
        if not self.in_progress:
            return share * self.mean
        longer = _longer_than(self.longest or self.lengths, self.age)
        if longer is None:  # older than any known length: assume a quarter of the longest one more
            return 0.25 * share * (self.longest or self.lengths)[-1]
        return longer[min(len(longer) - 1, int(share * len(longer)))] - self.age

    def tokens_in(self, steps: float) -> float:
        """Tokens that a request in progress makes in this number of steps, mean."""
        longer = _longer_than(self.lengths, self.age)
        if longer is None:
            return steps / 2
        end = self.age + steps
        num_unfinished = len(longer) - bisect_right(longer, end)
        return (sum(longer[: len(longer) - num_unfinished]) + num_unfinished * end) / len(longer) - self.age


def _longer_than(lengths: Sequence[float], age: float) -> Sequence[float] | None:
    return lengths[bisect_right(lengths, age) :] or None


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """The state on which a decision is made; the same on all controllers."""

    loads: Mapping[str, Load]
    work: Mapping[int, float] = field(default_factory=dict)  # block -> requests on it
    moving: frozenset[int] = frozenset()  # blocks that change their owner now: no role owns them
    since_move_s: float = math.inf
    elapsed_s: float = 0.0  # since the rollout began
    groups: float = 0.0  # before a rollout: groups that it must keep; 0: too little is known for a forecast
    rate: float = 1.0  # share of groups that are kept
    samples: int = 1  # before a rollout: responses per group
    calls: Sequence[Sequence[float]] = ()  # before a rollout: lengths of siblings that ended recently, by the longest
    trainer: TrainerLoad | None = None  # under asynchronous rollout


@dataclass(frozen=True, slots=True)
class TrainerLoad:
    """The trainer under asynchronous rollout, where it owns blocks beside the engines. Its `home`: the blocks that hold
    its state. It needs all of them for an update; between two updates they may be lent to engines.

    TrainerLoad(home=frozenset({6, 7}), updating=False, ready=False, missing=12.0, due=0, running=2048.0)
    """

    home: frozenset[int]
    updating: bool  # an update, or its weights are on the way to the engines
    ready: bool  # a batch is complete and waits for the trainer
    missing: float  # groups until the next batch is complete
    due: int  # groups in progress that the next batch waits for: later they are too old
    running: float  # most responses that may be in progress, at this limit of staleness
    waited_s: float = 0.0  # since the last update


@dataclass(frozen=True, slots=True)
class TrainerCosts:
    """Seconds of the trainer. TrainerCosts(work_s=480.0, fixed_s=0.4, least=2, move_s=3.1, offload_s=0.5)"""

    work_s: float  # of an update, on one block; n blocks take 1/n of it
    fixed_s: float  # of an update, on any number of blocks; with the weights to the engines
    least: int  # blocks that its state needs
    move_s: float  # the state on other blocks: re-shard it among peers, make new communicators
    offload_s: float  # on one block: its state to host memory, or back; n blocks take 1/n of it

    def update_s(self, blocks: int) -> float:
        return self.fixed_s + self.work_s / blocks


@dataclass(frozen=True, slots=True)
class RoleSpeeds:
    """Devices and their speeds. RoleSpeeds(grid=..., speeds={"policy": ReplicaSpeed(...), "judge": ...})"""

    grid: DeviceGrid
    speeds: Mapping[str, ReplicaSpeed]
    relative: Mapping[int, float] = field(default_factory=dict)  # speed of blocks that differ from the others
    trainer: TrainerCosts | None = None  # under asynchronous rollout, where blocks may belong to the trainer

    def power(self, blocks: Iterable[int]) -> float:
        """The speed of these blocks together, in usual blocks."""
        return sum(self.relative.get(block, 1.0) for block in blocks)

    def switch_s(self, move: Move, home: int = 1) -> float:
        """Seconds of a move: sleep, wake, and for the policy the weight update. For a block of the trainer, of whose
        blocks there are `home`: off-load or load its state."""
        wakes, sleeps, seconds = self.speeds.get(move.target), self.speeds.get(move.source), 0.0
        if self.trainer is not None and TRAINER in (move.source, move.target):
            seconds += self.trainer.offload_s / max(1, home)
        if sleeps is not None:
            seconds += sleeps.sleep_s
        if wakes is not None:
            seconds += wakes.wake_s + (wakes.weights_s if move.target == POLICY else 0.0)
        return seconds


def with_needed(
    loads: Mapping[str, Load], groups: float, generating: float, judging: float, per_group: Mapping[str, float]
) -> dict[str, Load]:
    """The loads with the requests that must end before the rollout can.

    `groups`: still to judge; `generating`, `judging`: of the groups in progress; `per_group`: requests of a group."""
    missing = max(0.0, groups - judging)  # still to generate
    complete = {}
    for role, load in loads.items():
        if role == POLICY:
            share, more = missing / max(1, generating), max(0.0, missing - generating)
        else:
            share, more = groups / max(1, judging), missing
        complete[role] = replace(load, needed=min(1.0, share) * load.in_progress + more * per_group[role])
    return complete


class Rule(Protocol):
    """A placement rule, in runs and in the simulator: MovingRule (below), DynamicRule (guard.py), and baselines.py. By
    default the split stays."""

    def begin(self, view: ClusterLoad, costs: RoleSpeeds, last: Split, took_s: float | None) -> Split:
        """The split of the next rollout. `last`: the one before. `took_s`: seconds of the last rollout, the same on all
        controllers; None: no rollout since the last call."""
        return last

    def __call__(self, split: Split, view: ClusterLoad, costs: RoleSpeeds) -> list[Move]:
        """The moves that begin now, at a poll during the rollout."""
        return []


@dataclass(frozen=True, slots=True)
class MovingRule(Rule):
    """Moves blocks one by one to the role that brings the end nearest, while it pays."""

    margin: float = 0.01  # share of the remaining time that moves must win beyond their cost
    min_gain_s: float = 0.2  # seconds that they must win at least: the time between two polls
    max_share: float = 0.25  # share of a role's blocks that one decision may take; more only if they are empty
    patience: float = 4.0  # at the start, judges' blocks wait for work at most this many times the seconds of a move
    fill: tuple[float, float] = (0.6, 0.95)  # min and max share of its best throughput that a block needs work for
    passes: float = 1.0  # judges wait for fuller batches if generation lasts longer than this many judging passes

    def __call__(self, split: Split, view: ClusterLoad, costs: RoleSpeeds) -> list[Move]:
        blocks = _Blocks(split, view, costs, self.max_share)
        estimate = EndEstimate(view, costs)
        now = end = estimate.end_s(blocks.power)
        moves = self._for_starved_roles(view, blocks)
        if moves:
            end = estimate.end_s(blocks.power)
        while (best := self._best_pair(estimate, blocks, end)) is not None:
            end, source, target = best
            moves.append(blocks.take(source, target))
        if not moves:
            return []
        cost = sum(costs.switch_s(move) for move in moves) / costs.grid.num_blocks
        from_policy = [move for move in moves if move.source == POLICY]
        if from_policy and not blocks.counts[POLICY] and view.rate < 1:  # if a group is dropped, another is generated
            cost += costs.switch_s(from_policy[0]) + costs.switch_s(Move(0, from_policy[0].target, POLICY))
        min_gain = max(self.min_gain_s, self.margin * now)
        if now < math.inf and now - end <= cost + min_gain:  # does not pay even if the blocks are empty
            return []
        cost += _prefill_again_s(moves, view, costs, blocks.counts)
        if now < math.inf and now - end <= cost + min_gain:
            return []
        gain = f"{now - end:.1f} s sooner, for {cost:.1f} s" if now < math.inf else "it had none"
        return [Move(m.block, m.source, m.target, f"{m.target} needs it: {gain}") for m in moves]

    def _for_starved_roles(self, view: ClusterLoad, blocks: _Blocks) -> list[Move]:
        """One block for each role that has requests but no block: without it the rollout cannot end. It comes from a
        role that needs no block any more, else from the role with the most."""
        moves, counts = list[Move](), blocks.counts
        starved = [r for r, load in view.loads.items() if load.in_progress and load.needed and not counts[r]]
        for target in starved:
            sources = [r for r in counts if blocks.budget[r] and (counts[r] > 1 or view.loads[r].needed <= 0)]
            if sources:
                source = max(sources, key=lambda r: (view.loads[r].needed <= 0, counts[r]))
                moves.append(blocks.take(source, target))
        return moves

    def begin(
        self, view: ClusterLoad, costs: RoleSpeeds, last: Split | None = None, took_s: float | None = None
    ) -> Split:
        """The split at the start of a rollout. All engines wake then anyway, so it costs nothing.

        It lies between one block per judge and the best split for the expected work. Judges have no work at first. The
        cheaper a later move is compared with that idle time, the fewer blocks judges get at the start.
        """
        grid = costs.grid
        judges = [role for role in grid.roles if role != POLICY]
        counts = {POLICY: grid.num_blocks - len(judges)} | dict.fromkeys(judges, 1)
        if grid.num_blocks <= len(judges):
            return Split((POLICY,) * grid.num_blocks)
        replicas = costs.power(range(grid.num_blocks)) * grid.per_block(POLICY)
        wait_s = generated_s(view.loads[POLICY], costs.speeds[POLICY], replicas, 0.1)
        back_s = max((costs.switch_s(Move(0, POLICY, judge)) for judge in judges), default=0.0)
        estimate = EndEstimate(view, costs)

        def power(counts: Mapping[str, int]) -> Mapping[str, float]:
            owners = arranged(split_by(grid, counts), view, costs) if costs.relative else None
            return counts if owners is None else {role: costs.power(owners.blocks(role)) for role in grid.roles}

        end, path = estimate.end_s(power(counts)), [counts]  # from few blocks for judges to the best split
        while judges and counts[POLICY] > 1:
            trials = [counts | {POLICY: counts[POLICY] - 1, judge: counts[judge] + 1} for judge in judges]
            ends = [estimate.end_s(power(trial)) for trial in trials]
            if min(ends) >= end:
                break
            end = min(ends)
            counts = trials[ends.index(end)]
            path.append(counts)
        part = min(1.0, self.patience * back_s / wait_s) if wait_s > 0 else 1.0
        return arranged(split_by(grid, path[int(part * (len(path) - 1))]), view, costs)

    def _best_pair(self, estimate: EndEstimate, blocks: _Blocks, end: float) -> tuple[float, str, str] | None:
        """The move of one block that brings the end nearest: end, source, target. None: no move does."""
        best: tuple[float, str, str] | None = None
        for target in blocks.counts:
            if not self._can_use_another_block(target, estimate, blocks):
                continue
            for source in blocks.counts:
                if source == target or not blocks.budget[source]:
                    continue
                trial = estimate.end_s(blocks.power_after(source, target))
                if trial < (end if best is None else best[0]):
                    best = trial, source, target
        return best

    def _can_use_another_block(self, role: str, estimate: EndEstimate, owned: _Blocks) -> bool:
        """Whether there is enough work for one more block now."""
        load, counts = estimate.view.loads[role], owned.counts
        if not counts[role]:
            return load.in_progress > 0
        grid, per_block = estimate.costs.grid, estimate.per_block[role]
        if role == POLICY:  # running requests stay on their replicas
            requests, blocks = load.waiting + max(0.0, load.needed - load.in_progress), 1
        else:
            requests, blocks = load.in_progress, counts[role] + 1
        if requests < blocks * per_block:  # less than one request per replica
            return False
        fill = self._required_fill(role, estimate, owned.power)
        need = useful_concurrency(load, estimate.costs.speeds[role], fill)
        fair = load.needed / (grid.num_blocks * per_block)  # requests per replica if this role had all blocks
        return requests >= blocks * (max(1.0, min(need, fair / 2)) * per_block)

    def _required_fill(self, role: str, estimate: EndEstimate, power: Mapping[str, float]) -> float:
        """Share of its best throughput that a block needs work for. Judges wait for fuller batches while one pass is
        short compared with the rest of generation."""
        least, most = self.fill
        if role == POLICY:
            return least
        to_come_s = estimate.generated_s(power)
        pass_s = estimate.costs.speeds[role].base_s * estimate.view.loads[role].mean
        return min(most, max(least, 1 - self.passes * pass_s / to_come_s)) if to_come_s > 0 else least


class _Blocks:
    """The blocks of each role while a decision is made: how many it has, how fast they are together (`power`, in usual
    blocks), and which it may give, in order.

    Blocks with the least work go first. If blocks differ in speed, the speed comes before the work: the role that needs
    fast blocks gives the slowest first, the others give it the fastest.
    """

    def __init__(self, split: Split, view: ClusterLoad, costs: RoleSpeeds, max_share: float) -> None:
        self.counts = {role: split.owners.count(role) for role in costs.grid.roles}
        self.budget: dict[str, int] = {}
        self._relative, self._spare = costs.relative, dict[str, list[int]]()
        first = needs_fast_blocks(view, costs)[0] if costs.relative else ""
        for role in self.counts:
            free = [block for block in split.blocks(role) if block not in view.moving]
            empty = sum(block in view.work and not view.work[block] for block in free)
            self.budget[role] = min(len(free), max(1, int(len(free) * max_share), empty))
            sign = 1 if role == first else -1
            free.sort(key=lambda b: (sign * self._relative.get(b, 1.0), view.work.get(b, 0.0)), reverse=True)
            self._spare[role] = free
        self.power: Mapping[str, float] = {role: costs.power(split.blocks(role)) for role in self.counts}

    def power_after(self, source: str, target: str) -> Mapping[str, float]:
        """After another block goes from one role to another."""
        moved = self._relative.get(self._spare[source][-1], 1.0)
        rest = self.power[source] - moved if self.counts[source] > 1 else 0.0
        return {**self.power, source: rest, target: self.power[target] + moved}

    def take(self, source: str, target: str) -> Move:
        self.power = self.power_after(source, target)
        self.counts[source] -= 1
        self.counts[target] += 1
        self.budget[source] -= 1
        return Move(self._spare[source].pop(), source, target)


def needs_fast_blocks(view: ClusterLoad, costs: RoleSpeeds) -> list[str]:
    """The roles by the time of their longest request, which cannot be shared by several replicas: the longest first."""

    def longest_s(role: str) -> float:
        load = view.loads[role]
        return costs.speeds[role].base_s * (load.longest or load.lengths)[-1]

    return sorted(costs.grid.roles, key=longest_s, reverse=True)


def arranged(split: Split, view: ClusterLoad, costs: RoleSpeeds) -> Split:
    """The same number of blocks per role; the fastest blocks go to the role that needs them most."""
    if not costs.relative:
        return split
    blocks = sorted(range(len(split.owners)), key=lambda block: -costs.relative.get(block, 1.0))
    owners = [role for role in needs_fast_blocks(view, costs) for _ in split.blocks(role)]
    return Split(tuple(owner for _, owner in sorted(zip(blocks, owners, strict=True))))


def _prefill_again_s(moves: Sequence[Move], view: ClusterLoad, costs: RoleSpeeds, counts: Mapping[str, int]) -> float:
    """Requests on the moved blocks continue on other replicas, which must prefill them again."""
    total = 0.0
    for move in moves:
        load, speed = view.loads[move.source], costs.speeds[move.source]
        replicas = max(1, counts[move.source] * costs.grid.per_block(move.source))
        total += view.work.get(move.block, 0.0) * (load.prompt + load.age) * speed.prefill_s_per_token / replicas
    return total


def useful_concurrency(load: Load, speed: ReplicaSpeed, fill: float) -> float:
    """Requests at which a replica reaches `fill` of its best throughput. One is enough if prefill is most of the
    work."""
    mean = load.mean
    each = speed.per_sequence_s * mean + speed.prefill_s_per_token * load.prompt  # added by one request
    need = fill / (1 - fill) * speed.base_s * mean / each if each else speed.max_concurrent
    return min(max(1.0, need), speed.max_concurrent)


def request_limit(load: Load, speed: ReplicaSpeed) -> int:
    """The most requests sent to one judge replica: enough for nearly its best throughput. The others stay in the queue,
    for the next free replica or a block that joins later: a sent request stays where it is."""
    return math.ceil(useful_concurrency(load, speed, FULL))


def generated_s(load: Load, speed: ReplicaSpeed, replicas: float, share: float = 1.0) -> float:
    """Seconds until this share of the needed responses is generated."""
    return _generation_s(_work_to(load, share), speed, replicas)


def _work_to(load: Load, share: float) -> tuple[float, float, float] | None:
    """Decoding steps, tokens and prompt tokens until this share is generated, on any number of replicas. None: no
    response is missing."""
    needed = share * load.needed
    if needed <= 0:
        return None
    in_progress = load.in_progress
    part = min(1.0, needed / in_progress) if in_progress else 0.0
    steps = load.steps_to(part) if load.running else 0.0
    tokens = load.running * load.tokens_in(steps)
    if load.waiting:
        at_start = replace(load, age=0.0)  # waiting requests have no tokens yet
        steps_from_start = at_start.steps_to(part)
        steps = max(steps, steps_from_start)
        tokens += load.waiting * at_start.tokens_in(steps_from_start)
    more = max(0.0, needed - in_progress)  # not drawn yet: they begin when others end
    if more:
        mean = load.mean
        steps += mean
        tokens += more * mean
    return steps, tokens, (load.waiting + more) * load.prompt


def _generation_s(work: tuple[float, float, float] | None, speed: ReplicaSpeed, replicas: float) -> float:
    if work is None:
        return 0.0
    if not replicas:
        return math.inf
    steps, tokens, prompts = work
    steps = max(steps, tokens / (replicas * speed.max_concurrent))
    return speed.base_s * steps + (speed.per_sequence_s * tokens + prompts * speed.prefill_s_per_token) / replicas


def judged_s(load: Load, speed: ReplicaSpeed) -> float:
    """Seconds of one full replica for all needed verdicts."""
    tokens = load.needed * load.mean
    full = min(speed.max_concurrent, max(1.0, load.needed))
    return tokens * (speed.base_s / full + speed.per_sequence_s) + load.needed * load.prompt * speed.prefill_s_per_token


class EndEstimate:
    """Estimates the end of the rollout for one view. Values that do not depend on the split are computed once, since
    many splits are compared."""

    def __init__(self, view: ClusterLoad, costs: RoleSpeeds) -> None:
        self.view, self.costs = view, costs
        grid = costs.grid
        self.per_block = {role: grid.per_block(role) for role in grid.roles}
        policy = view.loads[POLICY]
        self._generation = [_work_to(policy, share) for share in FRACTIONS]
        # judges with work: role, replicas per block, seconds of one replica for all verdicts, verdicts on responses
        # that are not generated yet, seconds of the last verdict
        self._judges: list[tuple[str, int, float, float, float]] = []
        for role in grid.roles:
            load, speed = view.loads[role], costs.speeds[role]
            if role == POLICY or load.needed <= 0:
                continue
            missing = max(0.0, load.needed - load.in_progress)  # not generated yet
            alone = speed.base_s * load.mean + speed.prefill_s_per_token * load.prompt
            self._judges.append((role, self.per_block[role], judged_s(load, speed), missing, alone))

    def generated_s(self, power: Mapping[str, float]) -> float:
        """Seconds until all needed responses are generated."""
        return _generation_s(self._generation[-1], self.costs.speeds[POLICY], power[POLICY] * self.per_block[POLICY])

    def end_s(self, power: Mapping[str, float]) -> float:
        """Seconds to the end of the rollout, with these blocks per role (a slow block counts less than one)."""
        speed, replicas = self.costs.speeds[POLICY], power[POLICY] * self.per_block[POLICY]
        times = [_generation_s(work, speed, replicas) for work in self._generation]
        end = times[-1]
        for role, per_block, judged, missing, alone in self._judges:
            judges = power[role] * per_block
            if not judges:
                return math.inf
            work = judged / judges
            future = work * missing / self.view.loads[role].needed  # for responses that are not generated yet
            last = max([t + (1 - share) * future for t, share in zip(times, FRACTIONS, strict=True)]) + alone
            end = max(end, work, last if future else alone)
        return end
