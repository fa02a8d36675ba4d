"""What is measured during rollouts: requests per group, and the relative speed of every block. Pure.

Controllers (monitor.py) and the simulator (simulate/cluster.py) use the same code: counters go in, numbers come out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gcore.cost.replica_speed import ReplicaSpeed
from gcore.placement.grid import POLICY
from gcore.protocols import EngineStats

DECAY = 0.98  # weight of the older speed measurements at each poll
QUANTILES = 64
LEAST_GROUPS = 2  # before requests per group are known
LEAST_SAMPLES = 16  # of a block, before its relative speed is known
SAME_SPEED = 0.2  # log: blocks that differ by less from the others count as equally fast
CERTAINTY = 4.0  # standard errors by which a block must differ beyond that: successive measurements are correlated
DEFAULT_SPEED = ReplicaSpeed(
    0.02, 0.0005, prefill_s_per_token=0.0, max_concurrent=256, sleep_s=0.5, wake_s=0.5, weights_s=0.5
)  # until measurements exist


def quantiles(lengths: Iterable[float]) -> list[float]:
    """At most QUANTILES sorted values that represent all; the longest is one of them."""
    ordered = sorted(lengths)
    return [float(ordered[i]) for i in _evenly_spread(len(ordered))]


def call_quantiles(calls: Iterable[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """At most QUANTILES calls that represent all, by their longest request."""
    ordered = sorted(calls, key=max)
    return [ordered[i] for i in _evenly_spread(len(ordered))]


def _evenly_spread(count: int) -> Iterable[int]:
    if count <= QUANTILES:
        return range(count)
    return [round(i * (count - 1) / (QUANTILES - 1)) for i in range(QUANTILES)]


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Requests per group, by role. GroupCounts(groups={"policy": 48.0, "judge": 47.0}, ended={"policy": 384.0, ...})"""

    groups: Mapping[str, float] = field(default_factory=dict)  # whose requests have ended
    ended: Mapping[str, float] = field(default_factory=dict)  # requests

    def plus(self, decided: int, judging: int, ended: Mapping[str, int]) -> GroupCounts:
        """With the current rollout: groups that were decided on and groups being judged. Of the latter, all policy
        requests have ended, and about half of the judges' requests."""
        groups = {role: decided + (judging if role == POLICY else judging / 2) for role in ended}
        return GroupCounts(
            {role: self.groups.get(role, 0.0) + count for role, count in groups.items()},
            {role: self.ended.get(role, 0.0) + count for role, count in ended.items()},
        )

    def halved(self) -> GroupCounts:
        """After a rollout: older ones count less."""
        return GroupCounts(*({r: count / 2 for r, count in each.items()} for each in (self.groups, self.ended)))

    def per_group(self, role: str, unknown: float) -> float:
        """Requests of a role per group, siblings and repeats included. `unknown`: the value until enough have ended."""
        groups, ended = self.groups.get(role, 0.0), self.ended.get(role, 0.0)
        return ended / groups if ended and groups >= LEAST_GROUPS else unknown


@dataclass
class LinearFit:
    """Weighted least squares: step_s = base + per_sequence * running."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, running: float, step_s: float) -> None:
        self.n, self.x, self.y = DECAY * self.n + 1, DECAY * self.x + running, DECAY * self.y + step_s
        self.xx, self.xy = DECAY * self.xx + running * running, DECAY * self.xy + running * step_s

    def fit(self) -> tuple[float, float]:
        """Base and slope. If the batch sizes differ little, the ratio of base and slope of DEFAULT_SPEED is used: it
        counts as one measurement."""
        default = DEFAULT_SPEED
        if self.n < 1:
            return default.base_s, default.per_sequence_s
        mean_x, mean_y = self.x / self.n, self.y / self.n
        spread = self.xx / self.n - mean_x**2
        prior = default.per_sequence_s / default.step_s(round(mean_x)) * mean_y  # slope by the default's ratio
        weight = (0.1 * mean_x**2 + 1e-9) / self.n
        slope = (self.xy / self.n - mean_x * mean_y + weight * prior) / (spread + weight)
        slope = min(max(0.0, slope), mean_y / max(mean_x, 1.0))
        return max(mean_y - slope * mean_x, 0.05 * mean_y), slope


def step_sample(before: EngineStats, now: EngineStats) -> tuple[float, float] | None:
    """Batch size and seconds of a decoding step between two polls. None: nothing was decoded, the replica was
    restarted, or the batch size is uncertain."""
    busy_s, tokens = now.busy_s - before.busy_s, now.generated_tokens - before.generated_tokens
    fewer, more = sorted((now.running, before.running))
    if tokens <= 0 or busy_s <= 0 or fewer < max(1, more / 2):
        return None
    running = (fewer + more) / 2
    return running, running * busy_s / tokens


@dataclass
class SpeedMeter:
    """The speed of each role, and the relative speed of each block, from the counters of replicas.

    A device that is throttled, or shared with another program, is slow for every role. Only a difference that is large
    and certain counts, so that blocks are equal unless one of them stands out. The speed of a role is that of its
    usual blocks.
    """

    fits: dict[str, LinearFit] = field(default_factory=dict)  # by role
    _blocks: dict[int, tuple[float, float, float]] = field(default_factory=dict)  # weight, sums of x, x^2: see `add`
    _relative: dict[int, float] = field(default_factory=dict)

    def add(self, role: str, polled: Iterable[tuple[int, EngineStats, EngineStats]]) -> None:
        """The replicas that the role owned between two polls: block, and the counters at both. They are compared with
        each other: prefill, which is not counted, makes all of them slower at the same times."""
        found = ((block, step_sample(before, now)) for block, before, now in polled)
        samples = [(block, *sample) for block, sample in found if sample is not None]
        if not samples:
            return
        fit = self.fits.setdefault(role, LinearFit())
        # x: log of the seconds of a step, compared with the fit and then with the other replicas
        if len(samples) > 1 and fit.n >= 1:
            base_s, per_s = fit.fit()
            slowness = [math.log(step_s / (base_s + per_s * running)) for _, running, step_s in samples]
            usual = statistics.median(slowness)
            for (block, _, _), x in zip(samples, slowness, strict=True):
                n, total, squares = self._blocks.get(block, (0.0, 0.0, 0.0))
                x -= usual
                self._blocks[block] = DECAY * n + 1, DECAY * total + x, DECAY * squares + x * x
        for block, running, step_s in samples:
            fit.add(running, step_s * self._relative.get(block, 1.0))

    def relative(self) -> dict[int, float]:
        """Relative speeds of the blocks that differ from the others."""
        known = {block: sums for block, sums in self._blocks.items() if sums[0] >= LEAST_SAMPLES}
        self._relative = {}
        if len(known) > 1:
            usual = statistics.median(total / n for n, total, _ in known.values())
            for block, (n, total, squares) in known.items():
                slower = total / n - usual
                error = math.sqrt(max(0.0, squares / n - (total / n) ** 2) / n)
                if abs(slower) > SAME_SPEED + CERTAINTY * error:
                    self._relative[block] = max(0.1, round(math.exp(-slower), 1))
        return dict(self._relative)
