"""The replicas and requests of a role in a forecast (forecast.py): a few numbers instead of every replica.

waiting requests ──admit──> RolePool, one per relative speed: all its requests make one token per step ──> end
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence

from gcore.cost.replica_speed import ReplicaSpeed

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
