"""Measures the load and the speed of each role, from the reports of all controllers.

Deterministic, without a clock or communication of its own: the state is the same on all controllers.

    every controller: Report ──all_gather (a poll)──> Monitor.add ──> View and Costs, the same on all controllers

Each replica is polled by one controller only: controller r of N polls replicas r, r + N, ... for their counters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gcore.placement.grid import POLICY, DeviceGrid, Move, Split
from gcore.placement.replica_speed import ReplicaSpeed
from gcore.placement.rules import Costs, Load, View
from gcore.protocols import EngineStats, RoleReport

QUANTILES = 64
MAX_LENGTHS = 2048  # recent lengths that are kept per role
LEAST_RATE = 0.05  # lower bound of the acceptance rate when the missing groups are estimated
DECAY = 0.98  # weight of the older speed measurements at each poll
DEFAULT_SPEED = ReplicaSpeed(
    0.02, 0.0005, prefill_s_per_token=0.0, max_concurrent=256, sleep_s=0.5, wake_s=0.5, weights_s=0.5
)  # until measurements exist


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """Progress of one controller. RolloutProgress(target=32.0, kept=12, decided=20, in_progress=24, rate=0.6)"""

    target: float  # its share of the groups per step
    kept: int  # groups kept so far
    decided: int  # groups kept or dropped in this rollout
    in_progress: int  # groups being generated or judged
    rate: float  # recent share of groups that are kept


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one controller at a poll."""

    at_s: float  # its clock; only controller 0's is used
    progress: RolloutProgress
    roles: Mapping[str, RoleReport]
    drained: frozenset[int] = frozenset()  # moving blocks that have none of its requests any more
    arrived: frozenset[int] = frozenset()  # controller 0: blocks whose new owner is awake
    failed: Mapping[int, str] = field(default_factory=dict)  # controller 0: failed moves, with the reason
    stuck: frozenset[tuple[str, int]] = frozenset()  # controller 0: role, replica that did not wake after a failed move
    done: bool = False  # its rollout has ended


@dataclass
class _LinearFit:
    """Weighted least squares: step_s = base + per_sequence * running."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, running: float, step_s: float) -> None:
        self.n, self.x, self.y = DECAY * self.n + 1, DECAY * self.x + running, DECAY * self.y + step_s
        self.xx, self.xy = DECAY * self.xx + running * running, DECAY * self.xy + running * step_s

    def fit(self, default: ReplicaSpeed) -> tuple[float, float]:
        """Base and slope. If the batch sizes differ little, the default's ratio of base and slope is used: it counts as
        one measurement."""
        if self.n < 1:
            return default.base_s, default.per_sequence_s
        mean_x, mean_y = self.x / self.n, self.y / self.n
        spread = self.xx / self.n - mean_x**2
        prior = default.per_sequence_s / default.step_s(round(mean_x)) * mean_y  # slope by the default's ratio
        weight = (0.1 * mean_x**2 + 1e-9) / self.n
        slope = (self.xy / self.n - mean_x * mean_y + weight * prior) / (spread + weight)
        slope = min(max(0.0, slope), mean_y / max(mean_x, 1.0))
        return max(mean_y - slope * mean_x, 0.05 * mean_y), slope


class Monitor:
    """Keeps lengths and speeds over the run. All controllers add the same reports in the same order."""

    def __init__(self, grid: DeviceGrid, max_concurrent: Mapping[str, int]) -> None:
        self._grid, self._max_concurrent = grid, max_concurrent
        self._lengths: dict[str, list[int]] = {role: [] for role in grid.roles}
        self._longest: dict[str, list[int]] = {role: [] for role in grid.roles}
        self._fits = {role: _LinearFit() for role in grid.roles}
        self._samples = 1  # responses per group
        self._per_group: dict[str, float] = {}  # requests of a role per group; unknown: one per response
        self._ended: dict[str, int] = dict.fromkeys(grid.roles, 0)  # requests, in this rollout
        self._decided: dict[int, int] = {}  # controller -> groups, in this rollout
        self._ended_before: dict[str, float] = dict.fromkeys(grid.roles, 0.0)  # in earlier rollouts, weights halved
        self._decided_before = 0.0
        self._at_s: float | None = None
        self.switch_s: dict[str, float] = {}  # of the last move to a role
        self.latest: dict[tuple[str, int], EngineStats] = {}  # role, replica -> its last counters
        self._before: dict[tuple[str, int], EngineStats] = {}  # its counters at the previous poll of this rollout
        self.busy: dict[str, float] = dict.fromkeys(grid.roles, 0.0)

    @property
    def costs(self) -> Costs:
        speeds = {}
        for role, fit in self._fits.items():
            base_s, per_s = fit.fit(DEFAULT_SPEED)
            switch_s = self.switch_s.get(role, DEFAULT_SPEED.wake_s)
            speeds[role] = ReplicaSpeed(base_s, per_s, 0.0, self._max_concurrent[role], 0.0, switch_s, 0.0)
        return Costs(self._grid, speeds)

    def saved(self) -> dict[str, Any]:
        """For a checkpoint, between two rollouts: what `expected` and `costs` are made of."""
        return {
            "lengths": {role: list(found) for role, found in self._lengths.items()},
            "longest": {role: list(found) for role, found in self._longest.items()},
            "fits": {role: asdict(fit) for role, fit in self._fits.items()},
            "ended_before": dict(self._ended_before),
            "decided_before": self._decided_before,
            "switch_s": dict(self.switch_s),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """The roles and their tensor parallel sizes must be those of the saved monitor."""
        self._lengths, self._longest = ({r: list(v) for r, v in saved[k].items()} for k in ("lengths", "longest"))
        self._fits = {role: _LinearFit(**fit) for role, fit in saved["fits"].items()}
        self._ended_before, self._decided_before = dict(saved["ended_before"]), saved["decided_before"]
        self.switch_s = dict(saved["switch_s"])
        self._count_per_group(0)

    def is_measured(self, role: str) -> bool:
        """Whether the speed of the role rests on enough measurements."""
        return self._fits[role].n >= 8

    def record_switch(self, target: str, seconds: float) -> None:
        self.switch_s[target] = seconds

    def add(self, reports: Sequence[Report], split: Split, moving: Mapping[int, Move], since_move_s: float) -> View:
        """Add the reports of one poll."""
        for role in self._grid.roles:
            self._add_lengths(role, reports)
        self._add_speeds(reports, split, moving)
        loads = self._loads(reports)
        work = {
            block: sum(
                counters.running + counters.waiting
                for report in reports
                for i, counters in report.roles[owner].replicas.items()
                if i in self._grid.replicas(owner, block)
            )
            for block, owner in enumerate(split.owners)
            if block not in moving
        }
        stopping = all(report.done for report in reports)
        rate = min(1.0, sum(report.progress.rate for report in reports) / len(reports))
        return View(loads, work, frozenset(moving), since_move_s, stopping, rate=rate)

    def expected(self, groups: float, rate: float, samples: int) -> View:
        """The view before a rollout that needs `groups` groups. Until the speeds and lengths of all roles are measured,
        `groups` of the view is 0: a forecast would use default values."""
        self._samples = samples
        needed = groups / max(rate, LEAST_RATE)
        loads = {}
        for role in self._grid.roles:
            requests = needed * (samples if role == POLICY else self._requests_per_group(role))
            waiting = round(requests) if role == POLICY else 0
            lengths, longest = self._length_quantiles(role)
            loads[role] = Load(waiting=waiting, needed=requests, lengths=lengths, longest=longest)
        known = all(self.is_measured(role) and self._lengths[role] for role in self._grid.roles)
        return View(loads, groups=groups if known else 0.0, rate=min(1.0, max(rate, LEAST_RATE)), samples=samples)

    def _length_quantiles(self, role: str) -> tuple[list[float], list[float]]:
        lengths = quantiles(self._lengths[role]) or [128.0]
        return lengths, quantiles(self._longest[role]) or lengths

    def _add_lengths(self, role: str, reports: Sequence[Report]) -> None:
        for kept, new in (
            (self._lengths[role], [n for report in reports for n in report.roles[role].ended]),
            (self._longest[role], [n for report in reports for n in report.roles[role].longest]),
        ):
            kept.extend(new)
            del kept[:-MAX_LENGTHS]
        self._ended[role] += sum(len(report.roles[role].ended) for report in reports)

    def _add_speeds(self, reports: Sequence[Report], split: Split, moving: Mapping[int, Move]) -> None:
        """Measure the seconds of a decoding step by batch size, and the busy share of the owners' replicas."""
        now = reports[0].at_s
        passed = now - self._at_s if self._at_s is not None else 0.0
        self._at_s, before_all, self._before = now, self._before, {}
        for role in self._grid.roles:
            busy, count = 0.0, 0
            for report in reports:
                for i, counters in report.roles[role].replicas.items():
                    before = before_all.get((role, i))
                    self.latest[role, i] = self._before[role, i] = counters
                    block = i // self._grid.per_block(role)
                    if before is None or split[block] != role or block in moving:
                        continue
                    busy_s, tokens = (
                        counters.busy_s - before.busy_s,
                        counters.generated_tokens - before.generated_tokens,
                    )
                    if busy_s < 0 or tokens < 0:  # the replica was restarted
                        continue
                    busy, count = busy + busy_s, count + 1
                    fewer, more = sorted((counters.running, before.running))
                    if tokens > 0 and busy_s > 0 and fewer >= max(1, more / 2):  # else the batch size is uncertain
                        running = (fewer + more) / 2
                        self._fits[role].add(running, running * busy_s / tokens)
            if passed > 0 and count:
                self.busy[role] = min(1.0, busy / (count * passed))

    def _loads(self, reports: Sequence[Report]) -> dict[str, Load]:
        active = [r for r in reports if not r.done]  # a controller that is done needs no more groups
        target, kept = sum(r.progress.target for r in active), sum(r.progress.kept for r in active)
        in_progress = sum(r.progress.in_progress for r in active)
        rate = sum(r.progress.rate for r in reports) / len(reports)
        groups = max(0.0, target - kept) / max(rate, LEAST_RATE)  # still to judge
        generating = min(in_progress, sum(r.roles[POLICY].calls for r in reports))
        judging = in_progress - generating
        missing = max(0.0, groups - judging)  # still to generate
        for rank, report in enumerate(reports):
            self._decided[rank] = max(report.progress.decided, self._decided.get(rank, 0))
        self._count_per_group(judging)
        loads = {}
        for role in self._grid.roles:
            per_group = self._requests_per_group(role)
            sent = sum(r.roles[role].requests for r in reports)
            queued = sum(r.roles[role].waiting for r in reports)
            waiting = queued + sum(c.waiting for r in reports for c in r.roles[role].replicas.values())
            running = max(0, round(sent + queued - waiting))
            requests = running + round(waiting)
            if role == POLICY:
                share = missing / max(1, generating)
                needed = min(1.0, share) * requests + max(0.0, missing - generating) * per_group
            else:
                needed = min(1.0, groups / max(1, judging)) * requests + missing * per_group
            counters = [c for r in reports for c in r.roles[role].replicas.values()]
            age = sum(c.running_tokens for c in counters) / max(1.0, sum(c.running for c in counters))
            lengths, longest = self._length_quantiles(role)
            loads[role] = Load(running, round(waiting), needed, age, lengths, longest, busy=self.busy[role])
        return loads

    def _requests_per_group(self, role: str) -> float:
        return self._per_group.get(role, self._samples)

    def _count_per_group(self, judging: int) -> None:
        """Update the requests of each role per group, siblings and repeats included. Of groups being judged, all policy
        requests have ended, and about half of the judges' requests."""
        decided = self._decided_before + sum(self._decided.values())
        for role in self._grid.roles:
            groups = decided + (judging if role == POLICY else judging / 2)
            if groups >= 4:
                self._per_group[role] = max(1.0, (self._ended_before[role] + self._ended[role]) / groups)

    def end_rollout(self) -> bool:
        """Halve the weight of what was counted so far. Returns False after an evaluation: it decides on no groups, so
        its requests are not counted."""
        if decided := sum(self._decided.values()):
            self._decided_before = (self._decided_before + decided) / 2
            self._ended_before = {role: (self._ended_before[role] + count) / 2 for role, count in self._ended.items()}
        self._ended, self._decided = dict.fromkeys(self._ended, 0), {}
        self._at_s, self._before = None, {}
        self._per_group = {}
        self._count_per_group(0)
        return decided > 0


def quantiles(lengths: Sequence[int]) -> list[float]:
    """At most QUANTILES sorted values that represent all; the longest is one of them."""
    ordered = sorted(lengths)
    if len(ordered) <= QUANTILES:
        return [float(length) for length in ordered]
    last = len(ordered) - 1
    return [float(ordered[round(i * last / (QUANTILES - 1))]) for i in range(QUANTILES)]
