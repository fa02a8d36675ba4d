"""Forecasts how long the next rollout takes under a placement, from what is known before it begins. Pure.

    ClusterLoad (groups, acceptance, lengths) + RoleSpeeds ─Forecast─> seconds, of a split and a rule that moves blocks

The formulas of rules.py estimate when the requests in progress end. That is not enough for a whole rollout: a dropped
group is replaced by another, so late verdicts delay generation. Therefore a small model of the rollout is simulated,
event by event. Replicas of a role that are equally fast are one pool (RolePool): all its requests make one
token per step and share the replicas evenly, except that running requests stay where they are when blocks join. The
lengths of siblings are those of siblings of the last rollout, so that a mixture of short and long groups stays one; at
most MAX_GROUPS groups represent all. Groups that the previous rollout aborted start first.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from gcore.config.sampling import MAX_OVERSAMPLING, acceptance_rate
from gcore.cost.replica_speed import ReplicaSpeed
from gcore.placement.grid import POLICY, Move, Split, best_split
from gcore.placement.rules import LEAST_RATE, ClusterLoad, RoleSpeeds, Rule, arranged, request_limit, with_needed

MAX_GROUPS = 64  # groups simulated per step; with more, each represents several
QUANTILE_STEP = 0.6180339887  # golden ratio: consecutive multiples modulo 1 are evenly spread
NUM_DRAWS = 4 * MAX_GROUPS
POLL_INTERVAL_S = 0.25  # between polls of the roles' remaining work; more after long rollouts (placer.POLL_SHARE)
FORECAST_POLL_SHARE = 0.025  # of a rollout between two polls: less often than in a run (placer.POLL_SHARE), for speed
MAX_IDLE_POLLS = 400  # polls without an event: the rule never ends this rollout


class RolloutTimes(NamedTuple):
    """RolloutTimes(seconds=98.0, generating_s=61.0, switching_s=2.4, turns=1)"""

    seconds: float  # inf: the rollout never ends
    generating_s: float  # while responses are generated
    switching_s: float  # while all blocks change their owner
    turns: float  # how often they do


class Forecast:
    """One expected rollout, which can be simulated under several placements."""

    def __init__(self, view: ClusterLoad, costs: RoleSpeeds, seed: int = 0) -> None:
        """`view`: before the rollout, with `groups`, `rate` and `samples`. `seed`: of lengths and acceptance, the same
        for all placements that are compared."""
        rng = random.Random(seed)
        self._static: dict[Split, RolloutTimes] = {}  # cache of rollouts without moves
        self.resumed, self.first_new = list[int](), 0  # groups that start first; the first group after them
        self.offset, self.acceptance_draws = rng.random(), [rng.random() for _ in range(NUM_DRAWS)]
        self.view, self.costs, self.loads, self.samples = view, costs, view.loads, max(1, view.samples)
        policy = view.loads[POLICY]
        self.weight = max(1.0, view.groups / MAX_GROUPS)
        self.groups, self.rate = max(1, round(view.groups / self.weight)), min(1.0, max(view.rate, LEAST_RATE))
        self.oversampling = max(1.0, policy.waiting / policy.needed) if policy.needed else 1.0
        self.calls = view.calls or [(length,) * self.samples for length in policy.longest or policy.lengths]
        self.limits = {role: request_limit(view.loads[role], costs.speeds[role]) for role in costs.grid.roles}
        self.limits[POLICY] = costs.speeds[POLICY].max_concurrent
        self.relative = sorted({1.0, *costs.relative.values()}, reverse=True)
        self.judges = [role for role in costs.grid.roles if role != POLICY]
        per_response = {role: view.loads[role].needed / max(1e-9, policy.needed) for role in self.judges}
        self.verdicts = {role: max(1, round(self.samples * per_response[role])) for role in self.judges}

    def times(self, split: Split, rule: Rule | None = None, poll_interval_s: float = 1.0) -> RolloutTimes:
        """Of the rollout that begins with this split. `rule` None: no block moves."""
        if rule is not None:
            return _RolloutModel(self, split, rule, poll_interval_s).run()
        if split not in self._static:
            self._static[split] = _RolloutModel(self, split, None, poll_interval_s).run()
        return self._static[split]

    def start_after(self, split: Split) -> Forecast:
        """From now on forecast the rollout after one with this split: groups that it aborted, mostly long ones, start
        first."""
        before = _RolloutModel(self, split, None, 1.0)
        if before.run().seconds < math.inf:
            self.resumed, self.first_new = sorted(before.remaining), before.drawn
            self._static.clear()
        return self

    def arranged(self, split: Split) -> Split:
        return arranged(split, self.view, self.costs)

    def accepted(self, group: int) -> bool:
        return self.acceptance_draws[group % NUM_DRAWS] < self.rate

    def lengths_of(self, group: int) -> list[float]:
        """Tokens of the siblings: those of siblings that ended together recently."""
        lengths, i = list[float](), group
        while len(lengths) < self.samples:  # a workflow may generate one response at a time
            lengths.extend(self.calls[self._place(i, len(self.calls))])
            i += NUM_DRAWS
        return lengths[: self.samples]

    def quantile(self, values: Sequence[float], i: int) -> float:
        return values[self._place(i, len(values))]

    def _place(self, i: int, count: int) -> int:
        return int((self.offset + i * QUANTILE_STEP) % 1.0 * count)


class _RolloutModel:
    """Simulates one rollout of a forecast under one placement."""

    def __init__(self, forecast: Forecast, split: Split, rule: Rule | None, poll_interval_s: float) -> None:
        self.forecast, self.split, self.rule, self.poll_interval_s = forecast, split, rule, poll_interval_s
        self.grid, self.now = forecast.costs.grid, 0.0
        self.roles = {role: self._role(role) for role in self.grid.roles}
        self.pools = [(role, pool) for role, owner in self.roles.items() for pool in owner.pools]
        self.policy = self.roles[POLICY]
        self.kept = self.dropped = self.judged = 0
        self.resumed, self.drawn = deque(forecast.resumed), forecast.first_new
        self.generating = self.judging = 0  # groups
        self.remaining: dict[int, int] = {}  # group -> unfinished requests of its current stage
        self.arriving: list[tuple[float, int, Move]] = []  # arrival time, block
        self.generating_s = self.switching_s = 0.0
        self.turns = 0

    def _role(self, role: str) -> RolePools:
        forecast, blocks = self.forecast, self.split.blocks(role)
        siblings = float(forecast.samples) if role == POLICY else 1.0
        pools = []
        for factor in forecast.relative:
            count = sum(forecast.costs.relative.get(block, 1.0) == factor for block in blocks)
            speed, replicas = forecast.costs.speeds[role].scaled(factor), count * self.grid.per_block(role)
            pools.append(RolePool(speed, replicas, forecast.limits[role], forecast.weight, siblings))
        return RolePools(pools, together=role == POLICY)

    def _pool(self, role: str, block: int) -> RolePool:
        factor = self.forecast.costs.relative.get(block, 1.0)
        return self.roles[role].pools[self.forecast.relative.index(factor)]

    def run(self) -> RolloutTimes:
        self._draw_groups()
        next_poll, idle = self.poll_interval_s if self.rule is not None else math.inf, 0
        role, pool = self.pools[0]
        while self.kept < self.forecast.groups:
            ends_s = math.inf
            for name, other in self.pools:
                if (next_s := other.next_s()) < ends_s:
                    ends_s, role, pool = next_s, name, other
            arrives_s = self.arriving[0][0] if self.arriving else math.inf
            before_s, self.now = self.now, min(ends_s, arrives_s, next_poll)
            if self.now == math.inf or idle > MAX_IDLE_POLLS:
                self.now = math.inf
                break
            if self.policy.running:
                self.generating_s += self.now - before_s
            elif len(self.arriving) == self.grid.num_blocks:
                self.switching_s += self.now - before_s
            idle = idle + 1 if self.now == next_poll < min(ends_s, arrives_s) else 0
            if self.now == ends_s:
                pool.advance(self.now)
                self._request_ended(role, pool.end())
                self.roles[role].admit()
            elif self.now == arrives_s:
                self._arrive()
            else:
                self._poll()
                next_poll += self.poll_interval_s
        return RolloutTimes(self.now, self.generating_s, self.switching_s, self.turns)

    def _draw_groups(self) -> None:
        """Start as many groups as the missing ones need at the acceptance rate, as controllers do."""
        forecast = self.forecast
        rate = max(self._rate(), 1 / MAX_OVERSAMPLING)
        wanted = math.ceil((forecast.groups * forecast.oversampling - self.kept) / rate - 1e-9)
        prompt = forecast.loads[POLICY].prompt
        self.policy.advance(self.now)
        while self.generating + self.judging < wanted:
            if self.resumed:
                group = self.resumed.popleft()
            else:
                group, self.drawn = self.drawn, self.drawn + 1
            self.policy.waiting.extend((group, tokens, prompt) for tokens in forecast.lengths_of(group))
            self.remaining[group] = forecast.samples
            self.generating += 1
        self.policy.admit()

    def _rate(self) -> float:
        return acceptance_rate(self.forecast.rate, self.kept, self.dropped, self.forecast.groups)

    def _request_ended(self, role: str, group: int) -> None:
        forecast = self.forecast
        self.remaining[group] -= 1
        if self.remaining[group]:
            return
        if role == POLICY:
            self.generating -= 1
            self.judging += 1
            self.remaining[group] = sum(forecast.verdicts.values())
            for judge in forecast.judges:
                self._judge(judge, group)
            if forecast.judges:
                return
        del self.remaining[group]
        self.judging -= 1
        accepted = forecast.accepted(group)
        self.kept, self.dropped = self.kept + accepted, self.dropped + (not accepted)
        self._draw_groups()

    def _judge(self, judge: str, group: int) -> None:
        role, load = self.roles[judge], self.forecast.loads[judge]
        role.advance(self.now)
        for _ in range(self.forecast.verdicts[judge]):
            self.judged += 1
            role.waiting.append((group, self.forecast.quantile(load.lengths, self.judged), load.prompt))
        role.admit()

    # ---- moves ----------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        assert self.rule is not None
        for role in self.roles.values():
            role.advance(self.now)
        for move in self.rule(self.split, self._view(), self.forecast.costs):
            self.split = self.split.after([move])
            pool = self._pool(move.source, move.block)
            self.roles[move.source].resize(pool, pool.replicas - self.grid.per_block(move.source))
            arrives_s = self.now + self.forecast.costs.switch_s(move)
            heapq.heappush(self.arriving, (arrives_s, move.block, move))
            self.turns += len(self.arriving) == self.grid.num_blocks

    def _arrive(self) -> None:
        """Blocks that arrive at the same time share the waiting requests, so the pool grows once."""
        joined = Counter[tuple[str, RolePool]]()  # replicas
        while self.arriving and self.arriving[0][0] <= self.now:
            _, block, move = heapq.heappop(self.arriving)
            joined[move.target, self._pool(move.target, block)] += self.grid.per_block(move.target)
        for (role, pool), replicas in joined.items():
            self.roles[role].advance(self.now)
            self.roles[role].resize(pool, pool.replicas + replicas)

    def _view(self) -> ClusterLoad:
        """The view that the controllers would have."""
        forecast, weight = self.forecast, self.forecast.weight
        groups = (forecast.groups - self.kept) / max(self._rate(), LEAST_RATE)
        loads, work, per_group = {}, dict[int, float](), {}
        moving = frozenset(block for _, block, _ in self.arriving)
        for role, owner in self.roles.items():
            running, waiting = round(owner.running * weight), round(len(owner.waiting) * weight)
            loads[role] = replace(forecast.loads[role], running=running, waiting=waiting, age=owner.age)
            per_group[role] = weight * (forecast.samples if role == POLICY else forecast.verdicts[role])
            for factor, pool in zip(forecast.relative, owner.pools, strict=True):
                self._work(role, pool, factor, moving, work)
        loads = with_needed(loads, groups, self.generating, self.judging, per_group)
        return ClusterLoad(loads, work, moving, elapsed_s=self.now, rate=self._rate())

    def _work(self, role: str, pool: RolePool, factor: float, moving: frozenset[int], work: dict[int, float]) -> None:
        """Add the requests per block to `work`. Siblings stay together, and running requests stay where they are when
        blocks join, so the other blocks are empty."""
        relative = self.forecast.costs.relative
        mine = (block for block in self.split.blocks(role) if relative.get(block, 1.0) == factor)
        blocks = [block for block in mine if block not in moving]
        per_block, running = self.grid.per_block(role), pool.running * pool.weight
        calls = self.generating * pool.weight if role == POLICY else running
        used = min(len(blocks), math.ceil(min(pool.used, calls) / per_block))
        work.update((block, running / used if i < used else 0.0) for i, block in enumerate(blocks))


def poll_interval_s(expected_s: float) -> float:
    """Seconds between two polls in the forecast of a rollout that takes about `expected_s`."""
    return max(POLL_INTERVAL_S, FORECAST_POLL_SHARE * expected_s)


def mean_times(
    forecasts: Sequence[Forecast], split: Split, rule: Rule | None = None, poll_interval_s: float = 1.0
) -> RolloutTimes:
    """Of forecasts of one rollout with different seeds."""
    times = [forecast.times(split, rule, poll_interval_s) for forecast in forecasts]
    return RolloutTimes(*(sum(values) / len(values) for values in zip(*times, strict=True)))


def best_static_split(forecasts: Sequence[Forecast], near: Split, stride: int) -> tuple[float, Split]:
    """The split with the shortest rollout without moves, and its seconds. `stride`: of the search from `near`."""
    first = forecasts[0]

    def seconds(split: Split) -> float:
        return mean_times(forecasts, first.arranged(split)).seconds

    best = best_split(near, first.costs.grid, stride, seconds)
    return seconds(best), first.arranged(best)


# ---- the replicas of a role -----------------------------------------------------------------------------------------
# waiting requests ──admit──> RolePool, one per relative speed: all its requests make one token per step ──> end

Request = tuple[int, float, float]  # group, tokens, prompt


class RolePool:
    """Replicas of one role that are equally fast. Every request here represents `weight` requests.

    Time is counted on a token clock: `clock` is the number of tokens of a request that has run from the start.
    """

    def __init__(self, speed: ReplicaSpeed, replicas: int, limit: int, weight: float, min_batch: float) -> None:
        self.speed, self.replicas, self.limit, self.weight = speed, replicas, limit, weight
        self.min_batch = min_batch  # requests in the batch of a replica that is not idle: siblings stay together
        self.used = float(replicas)  # replicas that share the running requests
        self.now_s = self.clock = self.prefill_left_s = self.start_sum = 0.0  # start_sum: of the running, on the clock
        self.running = 0
        self.step_s = speed.base_s
        self.ending: list[tuple[float, int]] = []  # clock, group

    def update_step_s(self) -> None:
        """Call after the number of requests or replicas changed."""
        if self.used:
            batch = max(self.running * self.weight / self.used, self.min_batch)
            self.step_s = self.speed.step_s(batch) * max(1.0, batch / self.speed.max_concurrent)

    @property
    def age(self) -> float:
        """Mean tokens of the running requests."""
        return self.clock - self.start_sum / self.running if self.running else 0.0

    @property
    def has_room(self) -> bool:
        return self.running < self.replicas * self.limit / self.weight

    def next_s(self) -> float:
        """When the next request ends."""
        if not self.ending or not self.used:
            return math.inf
        rest = self.ending[0][0] - self.clock
        return self.now_s + self.prefill_left_s + (rest * self.step_s if rest > 0.0 else 0.0)

    def advance(self, to: float) -> None:
        passed, self.now_s = to - self.now_s, to
        if self.prefill_left_s:
            prefill_s = min(self.prefill_left_s, passed)
            self.prefill_left_s -= prefill_s
            passed -= prefill_s
        if self.running and self.used:
            self.clock += passed / self.step_s

    def end(self) -> int:
        """End the next request. Returns its group."""
        when, group = heapq.heappop(self.ending)
        self.clock = max(self.clock, when)
        self.start_sum -= self.start_sum / self.running
        self.running -= 1
        self.update_step_s()
        return group

    def start(self, request: Request) -> None:
        """Replicas that joined get new requests; running requests stay where they are. Then call update_step_s."""
        group, tokens, prompt = request
        grown = self.used * (self.running + 1) / self.running if self.running else self.replicas
        self.used = min(self.replicas, grown)
        self.running += 1
        self.start_sum += self.clock
        self.prefill_left_s += prompt * self.weight * self.speed.prefill_s_per_token / self.replicas
        heapq.heappush(self.ending, (self.clock + tokens, group))

    def resize(self, replicas: int) -> None:
        if replicas:
            self.prefill_left_s *= self.replicas / replicas
        if replicas < self.replicas and replicas:  # requests of the lost replicas are prefilled again elsewhere
            moved = self.running * self.weight * (self.replicas - replicas) / self.replicas
            self.prefill_left_s += moved * self.age * self.speed.prefill_s_per_token / replicas
        self.replicas = replicas
        self.used = min(self.used, replicas) or float(replicas)
        self.update_step_s()

    def evict(self) -> Iterator[Request]:
        """All requests, for other replicas: they continue from the tokens they have, which are prefilled again."""
        age = self.age
        yield from ((group, max(0.0, end - self.clock), age) for end, group in sorted(self.ending))
        self.ending.clear()
        self.running, self.start_sum, self.prefill_left_s = 0, 0.0, 0.0


class RolePools:
    """The replicas of a role: a pool for each relative speed, and the waiting requests."""

    def __init__(self, pools: Sequence[RolePool], together: bool) -> None:
        """`together`: requests of a group go to one replica."""
        self.pools, self.together = pools, together
        self.waiting = deque[Request]()
        self._pool_of: dict[int, RolePool] = {}

    @property
    def replicas(self) -> int:
        return sum(pool.replicas for pool in self.pools)

    @property
    def running(self) -> int:
        return sum(pool.running for pool in self.pools)

    @property
    def age(self) -> float:
        return sum(pool.age * pool.running for pool in self.pools) / max(1, self.running)

    def advance(self, to: float) -> None:
        for pool in self.pools:
            pool.advance(to)

    def admit(self) -> None:
        """Send waiting requests to replicas below their limit, those with the fewest requests first."""
        waiting, started = self.waiting, False
        while waiting and (pool := self._choose(waiting[0][0])) is not None:
            pool.start(waiting.popleft())
            started = True
        if started:
            for pool in self.pools:
                pool.update_step_s()

    def _choose(self, group: int) -> RolePool | None:
        if len(self.pools) == 1:
            return self.pools[0] if self.pools[0].has_room else None
        if self.together and (pool := self._pool_of.get(group)) is not None and pool.has_room:
            return pool
        pools = [pool for pool in self.pools if pool.has_room]
        if not pools:
            return None
        self._pool_of[group] = least = min(pools, key=lambda pool: pool.running / pool.replicas)
        return least

    def resize(self, pool: RolePool, replicas: int) -> None:
        if not replicas and self.replicas > pool.replicas:
            self.waiting.extendleft(pool.evict())
        pool.resize(replicas)
        self.admit()
