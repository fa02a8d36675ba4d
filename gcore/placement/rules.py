"""When blocks change hands. Pure: the same functions decide in the simulator, in the emulation and on GPUs.

    View (what is known of each role now) + Split + Costs ──decide──> moves, each with its reason

The rollout ends when enough groups are judged. When that is follows from the roles' speeds (see speed.py): n replicas
that share their requests evenly take

    base * steps + per_sequence * tokens / n + prefill / n

where `steps` are those of the longest request that must still end. Judges work on what has been generated: the last of
a fraction s of the responses comes at some time t(s), and the rest of the judging lies behind it,

    end = max over s of   t(s) + (1 - s) * judging / judges

A move must bring the end nearer by more than it costs. Judges get no more blocks than they have work for *now*, and the
more is still to come, the more work a block must have: a pass over a full batch hardly takes longer than over a small
one, so blocks that judge too early waste what generation needs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gcore.placement.grid import POLICY, DeviceGrid, Move, Split, split_by
from gcore.placement.replica_speed import ReplicaSpeed

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
FULL = 0.95  # of its best throughput: enough for a replica of a judge


@dataclass(frozen=True, slots=True)
class Load:
    """What one role has before it. Load(running=40, waiting=8, needed=30, age=120.0, lengths=(80, 200, 512), ...)"""

    running: int = 0  # requests at replicas
    waiting: int = 0  # requests at no replica yet
    needed: float = 0.0  # requests that must still end before the rollout can, as far as can be told; some not made yet
    age: float = 0.0  # tokens that the running ones have made, on average
    lengths: Sequence[float] = (256.0,)  # of requests that ended lately: quantiles, in order
    longest: Sequence[float] = ()  # the same of the longest of each group of siblings; default: as `lengths`
    prompt: float = 0.0  # tokens to prefill of a request, on average
    busy: float = 0.0  # share of its replicas' time with something to do, since the last look

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def at_hand(self) -> int:
        return self.running + self.waiting

    def steps_to(self, share: float) -> float:
        """Decoding steps until so much of what is under way has ended, siblings together."""
        if not self.at_hand:
            return share * self.mean
        rest = _above(self.longest or self.lengths, self.age)
        if rest is None:  # older than anything seen: about as much again as the tail was long
            return 0.25 * share * (self.longest or self.lengths)[-1]
        return rest[min(len(rest) - 1, int(share * len(rest)))] - self.age

    def tokens_in(self, steps: float) -> float:
        """Tokens that a request under way makes in so many steps, on average."""
        rest = _above(self.lengths, self.age)
        if rest is None:
            return steps / 2
        end = self.age + steps
        longer = len(rest) - bisect_right(rest, end)  # those run on; the others end by then
        return (sum(rest[: len(rest) - longer]) + longer * end) / len(rest) - self.age


def _above(lengths: Sequence[float], age: float) -> Sequence[float] | None:
    return lengths[bisect_right(lengths, age) :] or None


@dataclass(frozen=True, slots=True)
class View:
    """What the controllers know in common when they decide."""

    loads: Mapping[str, Load]
    work: Mapping[int, float] = field(default_factory=dict)  # block -> requests of its owner that are there
    moving: frozenset[int] = frozenset()  # blocks between two roles: they are nobody's
    since_move_s: float = math.inf
    stopping: bool = False  # the target is met: nothing more is worth a move
    elapsed_s: float = 0.0  # since the rollout began
    groups: float = 0.0  # before a rollout: groups that it must keep; 0: too little is known for a forecast
    rate: float = 1.0  # share of groups that are kept
    samples: int = 1  # before a rollout: siblings of a group


@dataclass(frozen=True, slots=True)
class Costs:
    """What is known of devices. Costs(grid=..., speeds={"policy": ReplicaSpeed(...), "judge": ReplicaSpeed(...)})"""

    grid: DeviceGrid
    speeds: Mapping[str, ReplicaSpeed]

    def switch_s(self, move: Move) -> float:
        """Sleep, wake, and for the policy the weights."""
        speed = self.speeds[move.target]
        return self.speeds[move.source].sleep_s + speed.wake_s + (speed.weights_s if move.target == POLICY else 0.0)


Decide = Callable[[Split, View, Costs], list[Move]]


@dataclass(frozen=True, slots=True)
class Dynamic:
    """G-Core's policy: block by block to where the end comes nearest, while it pays."""

    margin: float = 0.01  # of the time still to go, that moves must win beyond what they cost
    least_s: float = 0.2  # and seconds: less than that lies between two looks
    cool_down_s: float = 0.0  # least time between two decisions that move something
    at_once: float = 0.25  # most of a role's blocks that one decision takes away; more only if they are empty
    patience: float = 4.0  # judges' blocks wait for work at the start rather than move, up to so many times that move
    fill: tuple[float, float] = (0.6, 0.95)  # least and most of its best throughput that a block must have work for
    passes: float = 1.0  # of judging that the rest of generation must outlast, for judges to wait for fuller batches

    def __call__(self, split: Split, view: View, costs: Costs) -> list[Move]:
        if view.stopping or view.since_move_s < self.cool_down_s:
            return []
        counts = {role: split.owners.count(role) for role in costs.grid.roles}
        free = dict(counts)
        for block in view.moving:
            free[split[block]] -= 1
        empty = Counter(split[block] for block, work in view.work.items() if not work and block not in view.moving)
        budget = {role: min(count, max(1, int(count * self.at_once), empty[role])) for role, count in free.items()}
        outlook = Outlook(view, costs)
        now = end = outlook.end_s(counts)
        wanted = self._for_the_stranded(view, counts, budget)
        if wanted:
            end = outlook.end_s(counts)
        while (found := self._best(outlook, counts, budget, end)) is not None:
            end, donor, taker = found
            counts[donor] -= 1
            counts[taker] += 1
            budget[donor] -= 1
            wanted.append((donor, taker))
        if not wanted:
            return []
        switch_s = {pair: costs.switch_s(Move(0, *pair)) for pair in set(wanted)}  # the same for every block
        cost = sum(switch_s[pair] for pair in wanted) / costs.grid.num_blocks
        given = [pair for pair in wanted if pair[0] == POLICY]
        if given and not counts[POLICY] and view.rate < 1:  # if a group is dropped, another must be generated
            cost += switch_s[given[0]] + costs.switch_s(Move(0, given[0][1], POLICY))
        least = max(self.least_s, self.margin * now)
        if now < math.inf and now - end <= cost + least:  # whichever blocks go
            return []
        moves = _emptiest(split, view, wanted)
        cost += _moved_s(moves, view, costs, counts)
        if now < math.inf and now - end <= cost + least:
            return []
        won = f"{now - end:.1f} s sooner, for {cost:.1f} s" if now < math.inf else "it had none"
        return [Move(m.block, m.source, m.target, f"{m.target} needs it: {won}") for m in moves]

    def _for_the_stranded(self, view: View, counts: dict[str, int], budget: dict[str, int]) -> list[tuple[str, str]]:
        """A block for each role that has requests and none: without it there is no end. From who needs none, or has
        most. Counts and budget change accordingly."""
        wanted = []
        for taker in [role for role, load in view.loads.items() if load.at_hand and load.needed and not counts[role]]:
            donors = [r for r in counts if budget[r] and (counts[r] > 1 or view.loads[r].needed <= 0)]
            if donors:
                donor = max(donors, key=lambda r: (view.loads[r].needed <= 0, counts[r]))
                counts[donor] -= 1
                counts[taker] += 1
                budget[donor] -= 1
                wanted.append((donor, taker))
        return wanted

    def begin(self, view: View, costs: Costs) -> Split:
        """At the start all engines wake anyway, so the first division is free.

        On the way from one block for each judge to the division that is best for what is expected: judges have nothing
        to do at first, so the less a later move costs against that wait, the fewer they get for now.
        """
        grid = costs.grid
        judges = [role for role in grid.roles if role != POLICY]
        counts = {POLICY: grid.num_blocks - len(judges)} | dict.fromkeys(judges, 1)
        if grid.num_blocks <= len(judges):
            return Split((POLICY,) * grid.num_blocks)
        replicas = grid.num_blocks * grid.per_block(POLICY)
        wait_s = generated_s(view.loads[POLICY], costs.speeds[POLICY], replicas, 0.1)
        back_s = max((costs.switch_s(Move(0, POLICY, judge)) for judge in judges), default=0.0)
        outlook = Outlook(view, costs)
        end, way = outlook.end_s(counts), [counts]
        while judges and counts[POLICY] > 1:
            trials = [counts | {POLICY: counts[POLICY] - 1, judge: counts[judge] + 1} for judge in judges]
            ends = [outlook.end_s(trial) for trial in trials]
            if min(ends) >= end:
                break
            end = min(ends)
            counts = trials[ends.index(end)]
            way.append(counts)
        part = min(1.0, self.patience * back_s / wait_s) if wait_s > 0 else 1.0
        return split_by(grid, way[int(part * (len(way) - 1))])

    def _best(
        self,
        outlook: Outlook,
        counts: Mapping[str, int],
        budget: Mapping[str, int],
        end: float,
    ) -> tuple[float, str, str] | None:
        """The one move that brings the end nearest."""
        best: tuple[float, str, str] | None = None
        for taker in counts:
            if not self._useful(taker, outlook, counts):
                continue
            for donor in counts:
                if donor == taker or not budget[donor]:
                    continue
                trial = outlook.end_s({**counts, donor: counts[donor] - 1, taker: counts[taker] + 1})
                if trial < (end if best is None else best[0]):
                    best = trial, donor, taker
        return best

    def _useful(self, role: str, outlook: Outlook, counts: Mapping[str, int]) -> bool:
        """Another block would have something to do at once."""
        load = outlook.view.loads[role]
        if not counts[role]:
            return load.at_hand > 0
        grid, per_block = outlook.costs.grid, outlook.per_block[role]
        if role == POLICY:  # what runs elsewhere stays there
            there, blocks = load.waiting + max(0.0, load.needed - load.at_hand), 1
        else:
            there, blocks = load.at_hand, counts[role] + 1
        if there < blocks * per_block:  # not one request for each replica
            return False
        need = useful_concurrency(load, outlook.costs.speeds[role], self._fill(role, outlook, counts))
        fair = load.needed / (grid.num_blocks * per_block)  # what each would have if all had this role
        return there >= blocks * (max(1.0, min(need, fair / 2)) * per_block)

    def _fill(self, role: str, outlook: Outlook, counts: Mapping[str, int]) -> float:
        """Who waits for more is judged in a fuller batch. So wait, while a pass is short against what still comes."""
        least, most = self.fill
        if role == POLICY:
            return least
        to_come_s = outlook.generated_s(counts)
        pass_s = outlook.costs.speeds[role].base_s * outlook.view.loads[role].mean
        return min(most, max(least, 1 - self.passes * pass_s / to_come_s)) if to_come_s > 0 else least


def _emptiest(split: Split, view: View, wanted: Sequence[tuple[str, str]]) -> list[Move]:
    """A block for each, that is not between two roles: those with the least work go first."""
    free = {role: [b for b in split.blocks(role) if b not in view.moving] for role, _ in wanted}
    for blocks in free.values():
        blocks.sort(key=lambda b: view.work.get(b, 0.0), reverse=True)
    return [Move(free[source].pop(), source, target) for source, target in wanted]


def _moved_s(moves: Sequence[Move], view: View, costs: Costs, counts: Mapping[str, int]) -> float:
    """What runs on the blocks goes on elsewhere: there it is read once more."""
    total = 0.0
    for move in moves:
        load, speed = view.loads[move.source], costs.speeds[move.source]
        replicas = max(1, counts[move.source] * costs.grid.per_block(move.source))
        total += view.work.get(move.block, 0.0) * (load.prompt + load.age) * speed.prefill_s_per_token / replicas
    return total


def useful_concurrency(load: Load, speed: ReplicaSpeed, fill: float) -> float:
    """Requests at which a replica reaches `fill` of its best throughput. One is enough where prefill is the work."""
    mean = load.mean
    each = speed.per_sequence_s * mean + speed.prefill_s_per_token * load.prompt  # what only this request costs
    need = fill / (1 - fill) * speed.base_s * mean / each if each else speed.max_concurrent
    return min(max(1.0, need), speed.max_concurrent)


def room(load: Load, speed: ReplicaSpeed) -> int:
    """Requests of a judge that a replica is sent at most: what it needs to work at its best, or nearly. The rest waits
    for whoever is free first, and for blocks that are yet to come: what was sent stays where it is."""
    return math.ceil(useful_concurrency(load, speed, FULL))


def generated_s(load: Load, speed: ReplicaSpeed, replicas: int, share: float = 1.0) -> float:
    """When this share of the responses that are needed has been generated."""
    return _takes_s(_to_make(load, _fresh(load), share), speed, replicas)


def _fresh(load: Load) -> Load:
    """As those see it that wait: they have all their tokens before them."""
    return replace(load, age=0.0) if load.waiting else load


def _to_make(load: Load, fresh: Load, share: float) -> tuple[float, float, float] | None:
    """Decoding steps, tokens and prompt tokens up to there, whoever makes them; None: nothing is missing."""
    needed = share * load.needed
    if needed <= 0:
        return None
    at_hand = load.at_hand
    part = min(1.0, needed / at_hand) if at_hand else 0.0
    steps = load.steps_to(part) if load.running else 0.0
    tokens = load.running * load.tokens_in(steps)
    if load.waiting:
        fresh_steps = fresh.steps_to(part)
        steps = max(steps, fresh_steps)
        tokens += load.waiting * fresh.tokens_in(fresh_steps)
    more = max(0.0, needed - at_hand)  # not drawn yet: they begin when others end
    if more:
        mean = load.mean
        steps += mean
        tokens += more * mean
    return steps, tokens, (load.waiting + more) * load.prompt


def _takes_s(to_make: tuple[float, float, float] | None, speed: ReplicaSpeed, replicas: int) -> float:
    if to_make is None:
        return 0.0
    if not replicas:
        return math.inf
    steps, tokens, prompts = to_make
    steps = max(steps, tokens / (replicas * speed.max_concurrent))
    return speed.base_s * steps + (speed.per_sequence_s * tokens + prompts * speed.prefill_s_per_token) / replicas


def judged_s(load: Load, speed: ReplicaSpeed) -> float:
    """Seconds of one replica, full, for all the verdicts that are needed."""
    tokens = load.needed * load.mean
    full = min(speed.max_concurrent, max(1.0, load.needed))
    return tokens * (speed.base_s / full + speed.per_sequence_s) + load.needed * load.prompt * speed.prefill_s_per_token


def end_s(view: View, costs: Costs, counts: Mapping[str, int]) -> float:
    """Seconds to the end of the rollout, with so many blocks for each role."""
    return Outlook(view, costs).end_s(counts)


class Outlook:
    """A view, and what follows from it whoever has the blocks: many divisions are compared under one."""

    def __init__(self, view: View, costs: Costs) -> None:
        self.view, self.costs = view, costs
        grid = costs.grid
        self.per_block = {role: grid.per_block(role) for role in grid.roles}
        policy = view.loads[POLICY]
        fresh = _fresh(policy)
        self._to_make = [_to_make(policy, fresh, share) for share in FRACTIONS]
        # of those with work: replicas a block, seconds of one replica for all, verdicts to come, seconds of the last
        self._judges: list[tuple[str, int, float, float, float]] = []
        for role in grid.roles:
            load, speed = view.loads[role], costs.speeds[role]
            if role == POLICY or load.needed <= 0:
                continue
            missing = max(0.0, load.needed - load.at_hand)  # not generated yet
            alone = speed.base_s * load.mean + speed.prefill_s_per_token * load.prompt
            self._judges.append((role, self.per_block[role], judged_s(load, speed), missing, alone))

    def generated_s(self, counts: Mapping[str, int]) -> float:
        """When all responses that are needed have been generated."""
        return _takes_s(self._to_make[-1], self.costs.speeds[POLICY], counts[POLICY] * self.per_block[POLICY])

    def end_s(self, counts: Mapping[str, int]) -> float:
        """Seconds to the end of the rollout, with so many blocks for each role."""
        speed, replicas = self.costs.speeds[POLICY], counts[POLICY] * self.per_block[POLICY]
        times = [_takes_s(to_make, speed, replicas) for to_make in self._to_make]
        end = times[-1]
        for role, per_block, judged, missing, alone in self._judges:
            judges = counts[role] * per_block
            if not judges:
                return math.inf
            work = judged / judges
            future = work * missing / self.view.loads[role].needed  # for what is not generated yet
            last = max([t + (1 - share) * future for t, share in zip(times, FRACTIONS, strict=True)]) + alone
            end = max(end, work, last if future else alone)
        return end
