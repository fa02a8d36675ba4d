"""Time of one role by a fluid model of requests: how long its replicas need per step, and when groups are complete.

    ReplicaSpeed, Lengths, requests ──> Span: until the queue is empty, then until the longest running request ends
                            └─> arrivals: share of complete groups over time, the input of judges

With a linear ReplicaSpeed, a replica needs base_s per step, per_sequence_s per token, and the prefill, in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from gcore.cost.costs import Shape
from gcore.cost.replica_speed import ReplicaSpeed
from gcore.planner.lengths import Array, Lengths


@dataclass(frozen=True)
class Role:
    """An engine role and its work per drawn prompt. Siblings share a prefix, and so do repeated verdicts.

    Role("judge", shape, tp=4, speed=speed, lengths=Lengths(512, 0.8, 2048), per_draw=16, prefill_tokens=2560)
    """

    name: str
    shape: Shape
    tp: int
    speed: ReplicaSpeed
    lengths: Lengths
    per_draw: int  # requests
    prefill_tokens: float  # per request

    def span(self, gpus: int, draws: float) -> Span:
        """Time for `draws` prompts on `gpus`, if all are known from the start."""
        speed, lengths, replicas = self.speed, self.lengths, gpus // self.tp
        requests = self.per_draw * draws / replicas  # per replica
        running = min(float(speed.max_concurrent), max(1.0, requests))
        tokens = requests * lengths.mean
        queue = 0.0  # steps until no request waits
        if lengths.sigma == 0:
            own = last = math.ceil(requests / running - 1e-9) * lengths.mean
            queue = last - lengths.mean
        elif requests <= running:
            own, last = lengths.longest_of(requests), lengths.longest_of(requests * replicas)
        else:
            queue = max(0.0, tokens / running - lengths.mean_rest)
            own = queue + lengths.longest_rest_of(running)
            last = max(queue + lengths.longest_rest_of(running * replicas), lengths.longest_of(requests * replicas))
        fixed = requests * self.prefill_tokens * speed.prefill_s_per_token + speed.per_sequence_s * tokens
        return Span(fixed + speed.base_s * last, fixed + speed.base_s * min(own, last), running, queue)

    def arrivals(self, gpus: int, draws: float) -> tuple[Array, Array]:
        """When groups are complete: times, and the share of groups that is done at each.

        Groups start in order as sequences end; a group is done when its last sibling is.
        """
        return _arrivals(self, gpus, draws)

    def latency_s(self, draws: float = 1.0) -> float:
        """Seconds of one group alone on an idle replica."""
        return self.span(self.tp, draws).total_s

    @cached_property
    def tail_s(self) -> float:
        """Seconds of the last running response of a full replica beyond the mean, from the end of the queue."""
        rest = self.lengths.longest_rest_of(self.speed.max_concurrent) - self.lengths.mean_rest
        return self.speed.base_s * rest

    def device_s(self, gpus: int, draws: float) -> float:
        """GPU-seconds of `draws` prompts on replicas that stay as full as `gpus` allow, without the tail."""
        requests = self.per_draw * draws
        running = min(float(self.speed.max_concurrent), max(1.0, requests * self.tp / gpus))
        token_s = self.speed.base_s / running + self.speed.per_sequence_s
        return self.tp * requests * (self.lengths.mean * token_s + self.prefill_tokens * self.speed.prefill_s_per_token)


@lru_cache(maxsize=65536)
def _arrivals(role: Role, gpus: int, draws: float) -> tuple[Array, Array]:
    span, speed, lengths = role.span(gpus, draws), role.speed, role.lengths
    requests = role.per_draw * draws * role.tp / gpus
    steps = np.linspace(0.0, span.queue + lengths.longest, 65)
    first = span.running / max(span.running, requests)  # share of groups that start at once
    starts = np.maximum(0.0, np.linspace(0.0, 1.0, 33) - first) * requests * lengths.mean / span.running
    done = lengths.group_done(role.per_draw, steps[:, None] - starts[None, :]).mean(axis=1)
    left = steps - span.queue
    tokens = span.running * (np.minimum(steps, span.queue) + lengths.made(np.maximum(left, 0.0)))
    tokens *= requests * lengths.mean / tokens[-1]
    prefilled_s = (
        requests * role.prefill_tokens * speed.prefill_s_per_token * np.minimum(1.0, first + steps / steps[-1])
    )
    times = np.minimum(prefilled_s + speed.base_s * steps + speed.per_sequence_s * tokens, span.total_s)
    done[times >= span.total_s] = 1.0
    return times, done


@dataclass(frozen=True)
class Span:
    """Span(total_s=61.0, own_s=52.0, running=256.0, queue=900.0): the last replica is done after 61 s, a typical one
    after 52 s; 256 sequences run at the same time, and the queue is empty after 900 steps"""

    total_s: float
    own_s: float
    running: float
    queue: float
