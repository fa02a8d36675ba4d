"""How long the next rollout will take under a placement, from what a run knows before it begins. Pure.

    View (groups, acceptance, lengths) + Costs (speeds) ──Forecast──> seconds, for a split and a rule that moves blocks

The formulas of policy.py say when work ends that is under way. The division for a whole rollout needs more: a group
that is dropped is replaced by another, so late verdicts delay generation. So a small model of the rollout is run, event
by event. A role is one pool: all its requests make a token per step and share the replicas evenly, except that they
stay where they are when blocks join. Groups are quantiles of the lengths seen lately; at most GROUPS of them stand for
all. What the rollout before aborted is first in line.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Sequence

from gcore.config.sampling import MAX_OVERSAMPLING, acceptance_rate
from gcore.config.tree import Placement
from gcore.placement.grid import POLICY, Move, Split, neighbours
from gcore.placement.replica_speed import ReplicaSpeed
from gcore.placement.rules import Costs, Decide, Load, View, room

GROUPS = 64  # groups of a step that are told apart; of more, each stands for several
EVEN = 0.6180339887  # step of an evenly spread sequence of quantiles
LUCK = 4 * GROUPS
POLL_INTERVAL_S = Placement().poll_interval_s  # the default: a forecast does not know the configuration
FORECAST_POLL_SHARE = 0.025  # of a rollout between two looks: less often than in a run (placer.POLL_SHARE), for speed
STUCK = 400  # looks without an event: the rule never ends this rollout


class Pool:
    """The replicas of one role. Every request here stands for `weight` requests."""

    def __init__(self, speed: ReplicaSpeed, replicas: int, room: int, weight: float, least: float) -> None:
        self.speed, self.replicas, self.room, self.weight = speed, replicas, room, weight
        self.least = least  # requests in the batch of a replica that has any: siblings stay together
        self.used = float(replicas)  # replicas that share what runs
        self.at = self.clock = self.stall = self.began = 0.0  # clock: tokens made by a request that began at 0
        self.running = 0
        self.step_s = speed.base_s
        self.ending: list[tuple[float, int]] = []  # when on the clock, group
        self.waiting: deque[tuple[int, float, float]] = deque()  # group, tokens, prompt

    def _changed(self) -> None:
        """Requests or replicas are others: so is the time of a step."""
        if self.used:
            speed = self.speed
            batch, most = max(self.running * self.weight / self.used, self.least), speed.max_concurrent
            self.step_s = speed.base_s + speed.per_sequence_s * min(batch, most)
            if batch > most:
                self.step_s *= batch / most

    @property
    def age(self) -> float:
        return self.clock - self.began / self.running if self.running else 0.0

    def next_s(self) -> float:
        """When the next request ends."""
        if not self.ending or not self.used:
            return math.inf
        rest = self.ending[0][0] - self.clock
        return self.at + self.stall + (rest * self.step_s if rest > 0.0 else 0.0)

    def advance(self, to: float) -> None:
        passed, self.at = to - self.at, to
        if self.stall:
            stalled = min(self.stall, passed)
            self.stall -= stalled
            passed -= stalled
        if self.running and self.used:
            self.clock += passed / self.step_s

    def end(self) -> int:
        """The next request ends; its group."""
        when, group = heapq.heappop(self.ending)
        self.clock = max(self.clock, when)
        self.began -= self.began / self.running
        self.running -= 1
        self._changed()
        return group

    def admit(self) -> None:
        """Requests that wait go to replicas that have room. New ones go to replicas that joined, old ones stay."""
        most = self.replicas * self.room / self.weight
        if not self.waiting or self.running >= most:
            return
        while self.waiting and self.running < most:
            group, tokens, prompt = self.waiting.popleft()
            grown = self.used * (self.running + 1) / self.running if self.running else self.replicas
            self.used = min(self.replicas, grown)
            self.running += 1
            self.began += self.clock
            self.stall += prompt * self.weight * self.speed.prefill_s_per_token / self.replicas
            heapq.heappush(self.ending, (self.clock + tokens, group))
        self._changed()

    def resize(self, replicas: int) -> None:
        if replicas:
            self.stall *= self.replicas / replicas
        if replicas < self.replicas and replicas:  # what runs there is read once more elsewhere
            moved = self.running * self.weight * (self.replicas - replicas) / self.replicas
            self.stall += moved * self.age * self.speed.prefill_s_per_token / replicas
        self.replicas = replicas
        self.used = min(self.used, replicas) or float(replicas)
        self._changed()
        self.admit()


class Forecast:
    """One expected rollout, to be tried under several placements."""

    def __init__(self, view: View, costs: Costs, seed: int = 0) -> None:
        """`view`: before the rollout, with `groups`, `rate` and `samples`. `seed`: of lengths and acceptance, the same
        for all placements that are compared."""
        dice = random.Random(seed)
        self._still: dict[Split, float] = {}  # seconds without moves, as far as they were asked for
        self.first, self.head = list[int](), 0  # groups that are first in line, and the first of the others
        self.offset, self.luck = dice.random(), [dice.random() for _ in range(LUCK)]
        self.costs, self.loads, self.samples = costs, view.loads, max(1, view.samples)
        policy = view.loads[POLICY]
        self.weight = max(1.0, view.groups / GROUPS)
        self.groups, self.rate = max(1, round(view.groups / self.weight)), min(1.0, max(view.rate, 0.05))
        self.over = max(1.0, policy.waiting / policy.needed) if policy.needed else 1.0
        self.longest = policy.longest or policy.lengths
        longest, others = sum(self.longest) / len(self.longest), self.samples - 1
        self.other = 1.0  # length of the other siblings, against that of the longest
        if others:
            self.other = min(1.0, max(0.02, (self.samples * policy.mean / longest - 1) / others))
        self.rooms = {role: room(view.loads[role], costs.speeds[role]) for role in costs.grid.roles}
        self.rooms[POLICY] = costs.speeds[POLICY].max_concurrent
        self.judges = [role for role in costs.grid.roles if role != POLICY]
        per_response = {role: view.loads[role].needed / max(1e-9, policy.needed) for role in self.judges}
        self.verdicts = {role: max(1, round(self.samples * per_response[role])) for role in self.judges}

    def seconds(self, split: Split, decide: Decide | None = None, poll_interval_s: float = 1.0) -> float:
        """Of the rollout that begins with this split; None: no block moves. inf: it never ends."""
        if decide is not None:
            return _Rollout(self, split, decide, poll_interval_s).run()
        if split not in self._still:
            self._still[split] = _Rollout(self, split, None, poll_interval_s).run()
        return self._still[split]

    def follow(self, split: Split) -> Forecast:
        """From now on for the rollout after one with this split: what that aborts is first in line. Long groups are."""
        before = _Rollout(self, split, None, 1.0)
        if before.run() < math.inf:
            self.first, self.head = sorted(before.left), before.drawn
            self._still.clear()
        return self

    def accepted(self, group: int) -> bool:
        return self.luck[group % LUCK] < self.rate

    def lengths_of(self, group: int) -> list[float]:
        """Tokens of the siblings."""
        others, longest = self.samples - 1, self.quantile(self.longest, group)
        width = min(0.4, 1 / self.other - 1)  # none is longer than the longest
        places = [(2 * k + 1) / others - 1 for k in range(others)]  # from -1 to 1
        return [longest, *(longest * self.other * (1 + width * place) for place in places)]

    def quantile(self, values: Sequence[float], i: int) -> float:
        return values[int((self.offset + i * EVEN) % 1.0 * len(values))]


class _Rollout:
    def __init__(self, about: Forecast, split: Split, decide: Decide | None, poll_interval_s: float) -> None:
        self.about, self.split, self.decide, self.poll_interval_s = about, split, decide, poll_interval_s
        self.grid, self.now = about.costs.grid, 0.0
        counts = split.counts()
        self.pools = {
            role: Pool(
                about.costs.speeds[role],
                counts.get(role, 0) * self.grid.per_block(role),
                about.rooms[role],
                about.weight,
                float(about.samples) if role == POLICY else 1.0,
            )
            for role in self.grid.roles
        }
        self.policy = self.pools[POLICY]
        self.kept = self.dropped = self.judged = 0
        self.first, self.drawn = deque(about.first), about.head
        self.generating = self.judging = 0  # groups
        self.left: dict[int, int] = {}  # requests of a group's present stage
        self.arriving: list[tuple[float, int, Move]] = []  # when, block

    def run(self) -> float:
        self._fill()
        next_poll, idle = self.poll_interval_s if self.decide is not None else math.inf, 0
        role, pool = POLICY, self.policy
        while self.kept < self.about.groups:
            ends_s = math.inf
            for name, some in self.pools.items():
                if (next_s := some.next_s()) < ends_s:
                    ends_s, role, pool = next_s, name, some
            arrives_s = self.arriving[0][0] if self.arriving else math.inf
            self.now = min(ends_s, arrives_s, next_poll)
            if self.now == math.inf or idle > STUCK:
                return math.inf
            idle = idle + 1 if self.now == next_poll < min(ends_s, arrives_s) else 0
            if self.now == ends_s:
                pool.advance(self.now)
                self._ended(role, pool.end())
                pool.admit()
            elif self.now == arrives_s:
                self._arrive()
            else:
                self._poll()
                next_poll += self.poll_interval_s
        return self.now

    def _fill(self) -> None:
        about = self.about
        rate = max(self._rate(), 1 / MAX_OVERSAMPLING)
        wanted = math.ceil((about.groups * about.over - self.kept) / rate - 1e-9)
        prompt = about.loads[POLICY].prompt
        self.policy.advance(self.now)
        while self.generating + self.judging < wanted:
            group, self.drawn = (self.first.popleft(), self.drawn) if self.first else (self.drawn, self.drawn + 1)
            self.policy.waiting.extend((group, tokens, prompt) for tokens in about.lengths_of(group))
            self.left[group] = about.samples
            self.generating += 1
        self.policy.admit()

    def _rate(self) -> float:
        return acceptance_rate(self.about.rate, self.kept, self.dropped, self.about.groups)

    def _ended(self, role: str, group: int) -> None:
        about = self.about
        self.left[group] -= 1
        if self.left[group]:
            return
        if role == POLICY:
            self.generating -= 1
            self.judging += 1
            self.left[group] = sum(about.verdicts.values())
            for judge in about.judges:
                self._ask(judge, group)
            if about.judges:
                return
        del self.left[group]
        self.judging -= 1
        good = about.accepted(group)
        self.kept, self.dropped = self.kept + good, self.dropped + (not good)
        self._fill()

    def _ask(self, judge: str, group: int) -> None:
        pool, load = self.pools[judge], self.about.loads[judge]
        pool.advance(self.now)
        for _ in range(self.about.verdicts[judge]):
            self.judged += 1
            pool.waiting.append((group, self.about.quantile(load.lengths, self.judged), load.prompt))
        pool.admit()

    # ---- moves ----------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        assert self.decide is not None
        for pool in self.pools.values():
            pool.advance(self.now)
        for move in self.decide(self.split, self._view(), self.about.costs):
            self.split = self.split.after([move])
            source = self.pools[move.source]
            source.resize(source.replicas - self.grid.per_block(move.source))
            arrives_s = self.now + self.about.costs.switch_s(move)
            heapq.heappush(self.arriving, (arrives_s, move.block, move))

    def _arrive(self) -> None:
        """Blocks that arrive together share what waits for them."""
        joined = Counter[str]()
        while self.arriving and self.arriving[0][0] <= self.now:
            joined[heapq.heappop(self.arriving)[2].target] += 1
        for role, blocks in joined.items():
            pool = self.pools[role]
            pool.advance(self.now)
            pool.resize(pool.replicas + blocks * self.grid.per_block(role))

    def _view(self) -> View:
        """As the controllers would see it."""
        about, weight = self.about, self.about.weight
        groups = (about.groups - self.kept) / max(self._rate(), 0.05)
        missing = max(0.0, groups - self.judging)  # still to generate
        loads, work = {}, dict[int, float]()
        moving = frozenset(block for _, block, _ in self.arriving)
        for role, pool in self.pools.items():
            under_way = (pool.running + len(pool.waiting)) * weight
            if role == POLICY:
                share = min(1.0, missing / max(1, self.generating))
                more = max(0.0, missing - self.generating) * about.samples
            else:
                share, more = min(1.0, groups / max(1, self.judging)), missing * about.verdicts[role]
            load = about.loads[role]
            loads[role] = Load(
                round(pool.running * weight), round(len(pool.waiting) * weight), share * under_way + more * weight,
                pool.age, load.lengths, load.longest, load.prompt,
            )  # fmt: skip
            self._work(role, pool, moving, work)
        return View(loads, work, moving, elapsed_s=self.now, rate=self._rate())

    def _work(self, role: str, pool: Pool, moving: frozenset[int], work: dict[int, float]) -> None:
        """Siblings stay together, and so do requests that were there before others joined: the rest is empty."""
        blocks = [block for block in self.split.blocks(role) if block not in moving]
        per_block, there = self.grid.per_block(role), pool.running * pool.weight
        calls = self.generating * pool.weight if role == POLICY else there
        used = min(len(blocks), math.ceil(min(pool.used, calls) / per_block))
        work.update((block, there / used if i < used else 0.0) for i, block in enumerate(blocks))


def poll_interval_s(expected_s: float) -> float:
    """Seconds between two looks in the forecast of a rollout that takes about `expected_s`."""
    return max(POLL_INTERVAL_S, FORECAST_POLL_SHARE * expected_s)


def best_still(forecast: Forecast, near: Split, stride: int) -> tuple[float, Split]:
    """The split without moves that ends first, and when: `stride` blocks from one role to another, then fewer."""
    grid, best, best_s = forecast.costs.grid, near, forecast.seconds(near)
    tried = {tuple(near.counts().items())}
    while stride:
        last = best
        for split in neighbours(last, grid, stride):
            if (key := tuple(split.counts().items())) not in tried:
                tried.add(key)
                if (seconds := forecast.seconds(split)) < best_s:
                    best, best_s = split, seconds
        if best == last:
            stride //= 2
    return best_s, best
