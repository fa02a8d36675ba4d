"""Measures the load and the speed of each role, from the reports of all controllers.

Deterministic, without a clock or communication of its own: the state is the same on all controllers.

    every controller: Report ──all_gather (a poll)──> Monitor.add ──> ClusterLoad and RoleSpeeds, the same everywhere

Each replica is polled by one controller only: controller r of N polls replicas r, r + N, ... for their counters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gcore.cost.replica_speed import ReplicaSpeed
from gcore.placement.grid import POLICY, DeviceGrid, Move, Split
from gcore.placement.meters import DEFAULT_SPEED, GroupCounts, LinearFit, SpeedMeter, call_quantiles, quantiles
from gcore.placement.rules import LEAST_RATE, ClusterLoad, Load, RoleSpeeds, with_needed
from gcore.protocols import EngineStats, RoleReport

MAX_LENGTHS = 2048  # recent lengths that are kept per role
MAX_CALLS = 512  # recent calls


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


class Monitor:
    """Keeps lengths and speeds over the run. All controllers add the same reports in the same order."""

    def __init__(self, grid: DeviceGrid, max_concurrent: Mapping[str, int]) -> None:
        self._grid, self._max_concurrent = grid, max_concurrent
        self._lengths: dict[str, list[int]] = {role: [] for role in grid.roles}
        self._calls: dict[str, list[tuple[int, ...]]] = {role: [] for role in grid.roles}  # lengths of siblings
        self._speeds = SpeedMeter()
        self._samples = 1  # responses per group
        self._before_this = GroupCounts()
        self._ended: dict[str, int] = dict.fromkeys(grid.roles, 0)  # requests, in this rollout
        self._decided: dict[int, int] = {}  # controller -> groups, in this rollout
        self._judging = 0  # groups, at the last poll
        self._at_s: float | None = None
        self.switch_s: dict[str, float] = {}  # of the last move to a role
        self._latest: dict[tuple[str, int], EngineStats] = {}  # role, replica -> its last counters
        self._before: dict[tuple[str, int], EngineStats] = {}  # its counters at the previous poll of this rollout
        self.busy: dict[str, float] = dict.fromkeys(grid.roles, 0.0)

    @property
    def costs(self) -> RoleSpeeds:
        speeds = {}
        for role in self._grid.roles:
            base_s, per_s = self._speeds.fits.get(role, LinearFit()).fit()
            switch_s = self.switch_s.get(role, DEFAULT_SPEED.wake_s)
            speeds[role] = ReplicaSpeed(base_s, per_s, 0.0, self._max_concurrent[role], 0.0, switch_s, 0.0)
        return RoleSpeeds(self._grid, speeds, self._speeds.relative())

    def saved(self) -> dict[str, Any]:
        """For a checkpoint, between two rollouts: what `expected` and `costs` are made of. Not the speeds of blocks: a
        resumed run may have other devices."""
        return {
            "lengths": {role: list(lengths) for role, lengths in self._lengths.items()},
            "calls": {role: list(calls) for role, calls in self._calls.items()},
            "fits": {role: asdict(fit) for role, fit in self._speeds.fits.items()},
            "groups": asdict(self._before_this),
            "switch_s": dict(self.switch_s),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """The roles and their tensor parallel sizes must be those of the saved monitor."""
        if "groups" not in saved:  # of an earlier version: everything is measured again
            return
        self._lengths = {role: list(lengths) for role, lengths in saved["lengths"].items()}
        self._calls = {role: [tuple(call) for call in calls] for role, calls in saved["calls"].items()}
        self._speeds.fits = {role: LinearFit(**fit) for role, fit in saved["fits"].items()}
        self._before_this = GroupCounts(**saved["groups"])
        self.switch_s = dict(saved["switch_s"])

    def is_measured(self, role: str) -> bool:
        """Whether the speed of the role rests on enough measurements."""
        return role in self._speeds.fits and self._speeds.fits[role].n >= 8

    def busy_of(self, role: str, block: int) -> float:
        """Seconds with a request of the replicas of a role on a block, mean, since they were started."""
        counters = [self._latest.get((role, i)) for i in self._grid.replicas(role, block)]
        return sum(c.busy_s for c in counters if c is not None) / len(counters)

    def add(
        self, reports: Sequence[Report], split: Split, moving: Mapping[int, Move], since_move_s: float
    ) -> ClusterLoad:
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
        rate = min(1.0, sum(report.progress.rate for report in reports) / len(reports))
        return ClusterLoad(loads, work, frozenset(moving), since_move_s, rate=rate)

    def expected(self, groups: float, rate: float, samples: int) -> ClusterLoad:
        """The view before a rollout that needs `groups` groups. Until the speeds and lengths of all roles are measured,
        `groups` of the view is 0: a forecast would use default values."""
        self._samples = samples
        needed = groups / max(rate, LEAST_RATE)
        loads = {}
        for role in self._grid.roles:
            requests = needed * (samples if role == POLICY else self._before_this.per_group(role, samples))
            waiting = round(requests) if role == POLICY else 0
            lengths, longest = self._recent(role)
            loads[role] = Load(waiting=waiting, needed=requests, lengths=lengths, longest=longest)
        known = all(self.is_measured(role) and self._lengths[role] for role in self._grid.roles)
        rate, calls = min(1.0, max(rate, LEAST_RATE)), call_quantiles(self._calls[POLICY])
        return ClusterLoad(loads, groups=groups if known else 0.0, rate=rate, samples=samples, calls=calls)

    def _recent(self, role: str) -> tuple[list[float], list[float]]:
        """Quantiles of the lengths of requests that ended recently, and of the longest in each call."""
        lengths = quantiles(self._lengths[role]) or [128.0]
        return lengths, quantiles([max(call) for call in self._calls[role]]) or lengths

    def _add_lengths(self, role: str, reports: Sequence[Report]) -> None:
        calls = [call for report in reports for call in report.roles[role].ended]
        lengths = [length for call in calls for length in call]
        self._calls[role] = [*self._calls[role], *calls][-MAX_CALLS:]
        self._lengths[role] = [*self._lengths[role], *lengths][-MAX_LENGTHS:]
        self._ended[role] += len(lengths)

    def _add_speeds(self, reports: Sequence[Report], split: Split, moving: Mapping[int, Move]) -> None:
        """Measure the seconds of a decoding step by batch size, and the busy share of the owners' replicas."""
        now = reports[0].at_s
        passed = now - self._at_s if self._at_s is not None else 0.0
        self._at_s, before_all, self._before = now, self._before, {}
        for role in self._grid.roles:
            busy, count, polled = 0.0, 0, list[tuple[int, EngineStats, EngineStats]]()
            for report in reports:
                for i, counters in report.roles[role].replicas.items():
                    before = before_all.get((role, i))
                    self._latest[role, i] = self._before[role, i] = counters
                    block = i // self._grid.per_block(role)
                    if before is None or split[block] != role or block in moving:
                        continue
                    busy_s = counters.busy_s - before.busy_s
                    if busy_s < 0 or counters.generated_tokens < before.generated_tokens:  # the replica was restarted
                        continue
                    busy, count = busy + busy_s, count + 1
                    polled.append((block, before, counters))
            self._speeds.add(role, polled)
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
        for rank, report in enumerate(reports):
            self._decided[rank] = max(report.progress.decided, self._decided.get(rank, 0))
        if active:
            self._judging = judging
        counts, loads = self._counts(), {}
        for role in self._grid.roles:
            counters = [c for r in reports for c in r.roles[role].replicas.values()]
            sent = sum(r.roles[role].requests for r in reports)
            queued = sum(r.roles[role].waiting for r in reports)
            waiting = queued + sum(c.waiting for c in counters)
            running = max(0, round(sent + queued - waiting))
            age = sum(c.running_tokens for c in counters) / max(1.0, sum(c.running for c in counters))
            lengths, longest = self._recent(role)
            loads[role] = Load(running, round(waiting), age=age, lengths=lengths, longest=longest, busy=self.busy[role])
        per_group = {role: counts.per_group(role, self._samples) for role in loads}
        return with_needed(loads, groups, generating, judging, per_group)

    def _counts(self) -> GroupCounts:
        return self._before_this.plus(sum(self._decided.values()), self._judging, self._ended)

    def end_rollout(self) -> bool:
        """Halve the weight of what was counted so far. Returns False after an evaluation: it decides on no groups, so
        its requests are not counted."""
        if decided := sum(self._decided.values()):
            self._before_this = self._counts().halved()
        self._ended, self._decided, self._judging = dict.fromkeys(self._ended, 0), {}, 0
        self._at_s, self._before = None, {}
        return decided > 0
