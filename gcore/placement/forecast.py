"""Forecasts how long the next rollout takes under a placement, from what is known before it begins. Pure.

    View (groups, acceptance, lengths) + Costs (speeds) ──Forecast──> seconds, for a split and a rule that moves blocks

The formulas of rules.py estimate when the requests in progress end. That is not enough for a whole rollout: a dropped
group is replaced by another, so late verdicts delay generation. Therefore a small model of the rollout is simulated,
event by event. Each role is one pool: all its requests make one token per step and share the replicas evenly, except
that running requests stay where they are when blocks join. Group lengths are quantiles of the recent lengths; at most
MAX_GROUPS groups represent all. Groups that the previous rollout aborted start first.
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
from gcore.placement.rules import Costs, Decide, Load, View, request_limit

MAX_GROUPS = 64  # groups simulated per step; with more, each represents several
QUANTILE_STEP = 0.6180339887  # golden ratio: consecutive multiples modulo 1 are evenly spread
NUM_DRAWS = 4 * MAX_GROUPS
POLL_INTERVAL_S = Placement().poll_interval_s  # the default: a forecast does not know the configuration
FORECAST_POLL_SHARE = 0.025  # of a rollout between two polls: less often than in a run (placer.POLL_SHARE), for speed
MAX_IDLE_POLLS = 400  # polls without an event: the rule never ends this rollout


class _RolePool:
    """The replicas of one role. Every request here represents `weight` requests.

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
        self.waiting: deque[tuple[int, float, float]] = deque()  # group, tokens, prompt

    def _update_step_s(self) -> None:
        """Call after the number of requests or replicas changed."""
        if self.used:
            speed = self.speed
            batch, most = max(self.running * self.weight / self.used, self.min_batch), speed.max_concurrent
            self.step_s = speed.base_s + speed.per_sequence_s * min(batch, most)
            if batch > most:
                self.step_s *= batch / most

    @property
    def age(self) -> float:
        """Mean tokens of the running requests."""
        return self.clock - self.start_sum / self.running if self.running else 0.0

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
        self._update_step_s()
        return group

    def admit(self) -> None:
        """Send waiting requests to replicas below their limit. Replicas that joined get new requests; running requests
        stay where they are."""
        most = self.replicas * self.limit / self.weight
        if not self.waiting or self.running >= most:
            return
        while self.waiting and self.running < most:
            group, tokens, prompt = self.waiting.popleft()
            grown = self.used * (self.running + 1) / self.running if self.running else self.replicas
            self.used = min(self.replicas, grown)
            self.running += 1
            self.start_sum += self.clock
            self.prefill_left_s += prompt * self.weight * self.speed.prefill_s_per_token / self.replicas
            heapq.heappush(self.ending, (self.clock + tokens, group))
        self._update_step_s()

    def resize(self, replicas: int) -> None:
        if replicas:
            self.prefill_left_s *= self.replicas / replicas
        if replicas < self.replicas and replicas:  # requests of the lost replicas are prefilled again elsewhere
            moved = self.running * self.weight * (self.replicas - replicas) / self.replicas
            self.prefill_left_s += moved * self.age * self.speed.prefill_s_per_token / replicas
        self.replicas = replicas
        self.used = min(self.used, replicas) or float(replicas)
        self._update_step_s()
        self.admit()


class Forecast:
    """One expected rollout, which can be simulated under several placements."""

    def __init__(self, view: View, costs: Costs, seed: int = 0) -> None:
        """`view`: before the rollout, with `groups`, `rate` and `samples`. `seed`: of lengths and acceptance, the same
        for all placements that are compared."""
        rng = random.Random(seed)
        self._static_s: dict[Split, float] = {}  # cache of seconds without moves
        self.resumed, self.first_new = list[int](), 0  # groups that start first; the first group after them
        self.offset, self.acceptance_draws = rng.random(), [rng.random() for _ in range(NUM_DRAWS)]
        self.costs, self.loads, self.samples = costs, view.loads, max(1, view.samples)
        policy = view.loads[POLICY]
        self.weight = max(1.0, view.groups / MAX_GROUPS)
        self.groups, self.rate = max(1, round(view.groups / self.weight)), min(1.0, max(view.rate, 0.05))
        self.oversampling = max(1.0, policy.waiting / policy.needed) if policy.needed else 1.0
        self.longest = policy.longest or policy.lengths
        longest, others = sum(self.longest) / len(self.longest), self.samples - 1
        self.relative_length = 1.0  # mean length of the other siblings / length of the longest
        if others:
            self.relative_length = min(1.0, max(0.02, (self.samples * policy.mean / longest - 1) / others))
        self.limits = {role: request_limit(view.loads[role], costs.speeds[role]) for role in costs.grid.roles}
        self.limits[POLICY] = costs.speeds[POLICY].max_concurrent
        self.judges = [role for role in costs.grid.roles if role != POLICY]
        per_response = {role: view.loads[role].needed / max(1e-9, policy.needed) for role in self.judges}
        self.verdicts = {role: max(1, round(self.samples * per_response[role])) for role in self.judges}

    def seconds(self, split: Split, decide: Decide | None = None, poll_interval_s: float = 1.0) -> float:
        """Seconds of the rollout that begins with this split. `decide` None: no block moves. inf: it never ends."""
        if decide is not None:
            return _RolloutModel(self, split, decide, poll_interval_s).run()
        if split not in self._static_s:
            self._static_s[split] = _RolloutModel(self, split, None, poll_interval_s).run()
        return self._static_s[split]

    def start_after(self, split: Split) -> Forecast:
        """From now on forecast the rollout after one with this split: groups that it aborted, mostly long ones, start
        first."""
        before = _RolloutModel(self, split, None, 1.0)
        if before.run() < math.inf:
            self.resumed, self.first_new = sorted(before.remaining), before.drawn
            self._static_s.clear()
        return self

    def accepted(self, group: int) -> bool:
        return self.acceptance_draws[group % NUM_DRAWS] < self.rate

    def lengths_of(self, group: int) -> list[float]:
        """Tokens of the siblings."""
        others, longest = self.samples - 1, self.quantile(self.longest, group)
        width = min(0.4, 1 / self.relative_length - 1)  # none is longer than the longest
        places = [(2 * k + 1) / others - 1 for k in range(others)]  # from -1 to 1
        return [longest, *(longest * self.relative_length * (1 + width * place) for place in places)]

    def quantile(self, values: Sequence[float], i: int) -> float:
        return values[int((self.offset + i * QUANTILE_STEP) % 1.0 * len(values))]


class _RolloutModel:
    """Simulates one rollout of a forecast under one placement."""

    def __init__(self, forecast: Forecast, split: Split, decide: Decide | None, poll_interval_s: float) -> None:
        self.forecast, self.split, self.decide, self.poll_interval_s = forecast, split, decide, poll_interval_s
        self.grid, self.now = forecast.costs.grid, 0.0
        counts = split.counts()
        self.pools = {
            role: _RolePool(
                forecast.costs.speeds[role],
                counts.get(role, 0) * self.grid.per_block(role),
                forecast.limits[role],
                forecast.weight,
                float(forecast.samples) if role == POLICY else 1.0,
            )
            for role in self.grid.roles
        }
        self.policy = self.pools[POLICY]
        self.kept = self.dropped = self.judged = 0
        self.resumed, self.drawn = deque(forecast.resumed), forecast.first_new
        self.generating = self.judging = 0  # groups
        self.remaining: dict[int, int] = {}  # group -> unfinished requests of its current stage
        self.arriving: list[tuple[float, int, Move]] = []  # arrival time, block

    def run(self) -> float:
        """Seconds of the rollout; inf: it never ends."""
        self._draw_groups()
        next_poll, idle = self.poll_interval_s if self.decide is not None else math.inf, 0
        role, pool = POLICY, self.policy
        while self.kept < self.forecast.groups:
            ends_s = math.inf
            for name, other in self.pools.items():
                if (next_s := other.next_s()) < ends_s:
                    ends_s, role, pool = next_s, name, other
            arrives_s = self.arriving[0][0] if self.arriving else math.inf
            self.now = min(ends_s, arrives_s, next_poll)
            if self.now == math.inf or idle > MAX_IDLE_POLLS:
                return math.inf
            idle = idle + 1 if self.now == next_poll < min(ends_s, arrives_s) else 0
            if self.now == ends_s:
                pool.advance(self.now)
                self._request_ended(role, pool.end())
                pool.admit()
            elif self.now == arrives_s:
                self._arrive()
            else:
                self._poll()
                next_poll += self.poll_interval_s
        return self.now

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
        pool, load = self.pools[judge], self.forecast.loads[judge]
        pool.advance(self.now)
        for _ in range(self.forecast.verdicts[judge]):
            self.judged += 1
            pool.waiting.append((group, self.forecast.quantile(load.lengths, self.judged), load.prompt))
        pool.admit()

    # ---- moves ----------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        assert self.decide is not None
        for pool in self.pools.values():
            pool.advance(self.now)
        for move in self.decide(self.split, self._view(), self.forecast.costs):
            self.split = self.split.after([move])
            source = self.pools[move.source]
            source.resize(source.replicas - self.grid.per_block(move.source))
            arrives_s = self.now + self.forecast.costs.switch_s(move)
            heapq.heappush(self.arriving, (arrives_s, move.block, move))

    def _arrive(self) -> None:
        """Blocks that arrive at the same time share the waiting requests, so the pool grows once."""
        joined = Counter[str]()
        while self.arriving and self.arriving[0][0] <= self.now:
            joined[heapq.heappop(self.arriving)[2].target] += 1
        for role, blocks in joined.items():
            pool = self.pools[role]
            pool.advance(self.now)
            pool.resize(pool.replicas + blocks * self.grid.per_block(role))

    def _view(self) -> View:
        """The view that the controllers would have."""
        forecast, weight = self.forecast, self.forecast.weight
        groups = (forecast.groups - self.kept) / max(self._rate(), 0.05)
        missing = max(0.0, groups - self.judging)  # still to generate
        loads, work = {}, dict[int, float]()
        moving = frozenset(block for _, block, _ in self.arriving)
        for role, pool in self.pools.items():
            in_progress = (pool.running + len(pool.waiting)) * weight
            if role == POLICY:
                share = min(1.0, missing / max(1, self.generating))
                more = max(0.0, missing - self.generating) * forecast.samples
            else:
                share, more = min(1.0, groups / max(1, self.judging)), missing * forecast.verdicts[role]
            load = forecast.loads[role]
            loads[role] = Load(
                round(pool.running * weight), round(len(pool.waiting) * weight), share * in_progress + more * weight,
                pool.age, load.lengths, load.longest, load.prompt,
            )  # fmt: skip
            self._work(role, pool, moving, work)
        return View(loads, work, moving, elapsed_s=self.now, rate=self._rate())

    def _work(self, role: str, pool: _RolePool, moving: frozenset[int], work: dict[int, float]) -> None:
        """Add the requests per block to `work`. Siblings stay together, and running requests stay where they are when
        blocks join, so the other blocks are empty."""
        blocks = [block for block in self.split.blocks(role) if block not in moving]
        per_block, running = self.grid.per_block(role), pool.running * pool.weight
        calls = self.generating * pool.weight if role == POLICY else running
        used = min(len(blocks), math.ceil(min(pool.used, calls) / per_block))
        work.update((block, running / used if i < used else 0.0) for i, block in enumerate(blocks))


def poll_interval_s(expected_s: float) -> float:
    """Seconds between two polls in the forecast of a rollout that takes about `expected_s`."""
    return max(POLL_INTERVAL_S, FORECAST_POLL_SHARE * expected_s)


def best_static_split(forecast: Forecast, near: Split, stride: int) -> tuple[float, Split]:
    """The split with the shortest rollout without moves, and its seconds. Local search from `near`: `stride` blocks
    change their role, then fewer."""
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
