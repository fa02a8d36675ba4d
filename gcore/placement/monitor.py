"""What the roles have before them and how fast they are, from what every controller sees. Pure: equal on all of them.

    every controller: Report ──all_gather (a look)──> Monitor.add ──> View and Costs, the same everywhere

Nobody is asked by everybody: controller r of N asks replicas r, r + N, ... for their counters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gcore.placement.grid import POLICY, DeviceGrid, Move, Split
from gcore.placement.replica_speed import ReplicaSpeed
from gcore.placement.rules import Costs, Load, View
from gcore.protocols import EngineStats, RoleReport

QUANTILES = 64
REMEMBERED = 2048  # lengths of a role
LEAST_RATE = 0.05  # acceptance rates below this one are not extrapolated to the groups that are still needed
FADE = 0.98  # how much of an older measurement of the speed stays at each look
GUESS = ReplicaSpeed(0.02, 0.0005, prefill_s_per_token=0.0, max_concurrent=256, sleep_s=0.5, wake_s=0.5, weights_s=0.5)


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """How far one controller is. RolloutProgress(target=32.0, kept=12, decided=20, under_way=24, rate=0.6)"""

    target: float  # its share of the groups a step needs
    kept: int  # groups it has
    decided: int  # groups it has kept or dropped in this rollout
    under_way: int  # groups it is working on
    rate: float  # of groups that are kept, lately


@dataclass(frozen=True, slots=True)
class Report:
    """What one controller says at a look."""

    at_s: float  # its clock; controller 0's counts
    progress: RolloutProgress
    roles: Mapping[str, RoleReport]
    drained: frozenset[int] = frozenset()  # blocks that have nothing of its requests any more
    arrived: frozenset[int] = frozenset()  # controller 0: blocks whose new owner is awake
    failed: Mapping[int, str] = field(default_factory=dict)  # controller 0: moves that came to nothing, and why
    stuck: frozenset[tuple[str, int]] = frozenset()  # controller 0: role, replica that could not be woken after that
    done: bool = False  # its rollout has ended


@dataclass
class _Line:
    """Weighted least squares: step_s = base + per_sequence * running."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, running: float, step_s: float) -> None:
        self.n, self.x, self.y = FADE * self.n + 1, FADE * self.x + running, FADE * self.y + step_s
        self.xx, self.xy = FADE * self.xx + running * running, FADE * self.xy + running * step_s

    def fit(self, guess: ReplicaSpeed) -> tuple[float, float]:
        """With little spread among the batches the guess decides how much of a step is the base. It counts as one
        measurement among those that were made."""
        if self.n < 1:
            return guess.base_s, guess.per_sequence_s
        mean_x, mean_y = self.x / self.n, self.y / self.n
        spread = self.xx / self.n - mean_x**2
        prior = guess.per_sequence_s / guess.step_s(round(mean_x)) * mean_y  # slope, as the guess would split it
        weight = (0.1 * mean_x**2 + 1e-9) / self.n
        slope = (self.xy / self.n - mean_x * mean_y + weight * prior) / (spread + weight)
        slope = min(max(0.0, slope), mean_y / max(mean_x, 1.0))
        return max(mean_y - slope * mean_x, 0.05 * mean_y), slope


class Monitor:
    """Remembers lengths and speeds over the run. All controllers feed it the same reports in the same order."""

    def __init__(self, grid: DeviceGrid, max_concurrent: Mapping[str, int]) -> None:
        self._grid, self._most = grid, max_concurrent
        self._lengths: dict[str, list[int]] = {role: [] for role in grid.roles}
        self._longest: dict[str, list[int]] = {role: [] for role in grid.roles}
        self._lines = {role: _Line() for role in grid.roles}
        self._samples = 1  # siblings of a group
        self._per_group: dict[str, float] = {}  # requests of a role for one group; not known: one for each sibling
        self._ended: dict[str, int] = dict.fromkeys(grid.roles, 0)  # requests, in this rollout
        self._decided: dict[int, int] = {}  # controller -> groups, in this rollout
        self._ended_before: dict[str, float] = dict.fromkeys(grid.roles, 0.0)  # in those before; the last weighs most
        self._decided_before = 0.0
        self._at_s: float | None = None
        self.switch_s: dict[str, float] = {}  # to a role, as measured last
        self.latest: dict[tuple[str, int], EngineStats] = {}  # role, replica -> what it told last
        self._before: dict[tuple[str, int], EngineStats] = {}  # what it told at the look before, in this rollout
        self.busy: dict[str, float] = dict.fromkeys(grid.roles, 0.0)

    @property
    def costs(self) -> Costs:
        speeds = {}
        for role, line in self._lines.items():
            base_s, per_s = line.fit(GUESS)
            switch_s = self.switch_s.get(role, GUESS.wake_s)
            speeds[role] = ReplicaSpeed(base_s, per_s, 0.0, self._most[role], 0.0, switch_s, 0.0)
        return Costs(self._grid, speeds)

    def knows(self, role: str) -> bool:
        """Its speed was measured often enough to be no guess."""
        return self._lines[role].n >= 8

    def moved(self, target: str, seconds: float) -> None:
        self.switch_s[target] = seconds

    def add(self, parts: Sequence[Report], split: Split, moving: Mapping[int, Move], since_move_s: float) -> View:
        """One look."""
        for role in self._grid.roles:
            self._learn(role, parts)
        self._speed(parts, split, moving)
        loads = self._loads(parts)
        work = {
            block: sum(
                counters.running + counters.waiting
                for part in parts
                for i, counters in part.roles[owner].replicas.items()
                if i in self._grid.replicas(owner, block)
            )
            for block, owner in enumerate(split.owners)
            if block not in moving
        }
        stopping = all(part.done for part in parts)
        rate = min(1.0, sum(part.progress.rate for part in parts) / len(parts))
        return View(loads, work, frozenset(moving), since_move_s, stopping, rate=rate)

    def expected(self, groups: float, rate: float, samples: int) -> View:
        """Before a rollout: so many groups are needed, and nothing is under way. Before all speeds and lengths were
        measured, `groups` of the view is 0: a forecast would be made of guesses."""
        self._samples = samples
        needed = groups / max(rate, LEAST_RATE)
        loads = {}
        for role in self._grid.roles:
            requests = needed * (samples if role == POLICY else self._each(role))
            waiting = round(requests) if role == POLICY else 0
            lengths, longest = self._seen(role)
            loads[role] = Load(waiting=waiting, needed=requests, lengths=lengths, longest=longest)
        known = all(self.knows(role) and self._lengths[role] for role in self._grid.roles)
        return View(loads, groups=groups if known else 0.0, rate=min(1.0, max(rate, LEAST_RATE)), samples=samples)

    def _seen(self, role: str) -> tuple[list[float], list[float]]:
        lengths = quantiles(self._lengths[role]) or [128.0]
        return lengths, quantiles(self._longest[role]) or lengths

    def _learn(self, role: str, parts: Sequence[Report]) -> None:
        for memory, found in (
            (self._lengths[role], [n for part in parts for n in part.roles[role].ended]),
            (self._longest[role], [n for part in parts for n in part.roles[role].longest]),
        ):
            memory.extend(found)
            del memory[:-REMEMBERED]
        self._ended[role] += sum(len(part.roles[role].ended) for part in parts)

    def _speed(self, parts: Sequence[Report], split: Split, moving: Mapping[int, Move]) -> None:
        """How long a decoding step was, by how many requests ran in it; and how busy the owners' replicas were."""
        now = parts[0].at_s
        passed = now - self._at_s if self._at_s is not None else 0.0
        self._at_s, before_all, self._before = now, self._before, {}
        for role in self._grid.roles:
            busy, count = 0.0, 0
            for part in parts:
                for i, counters in part.roles[role].replicas.items():
                    before = before_all.get((role, i))
                    self.latest[role, i] = self._before[role, i] = counters
                    block = i // self._grid.per_block(role)
                    if before is None or split[block] != role or block in moving:
                        continue
                    busy_s, tokens = (
                        counters.busy_s - before.busy_s,
                        counters.generated_tokens - before.generated_tokens,
                    )
                    if busy_s < 0 or tokens < 0:  # it was started again
                        continue
                    busy, count = busy + busy_s, count + 1
                    fewer, more = sorted((counters.running, before.running))
                    if tokens > 0 and busy_s > 0 and fewer >= max(1, more / 2):  # else who knows what ran in between
                        running = (fewer + more) / 2
                        self._lines[role].add(running, running * busy_s / tokens)
            if passed > 0 and count:
                self.busy[role] = min(1.0, busy / (count * passed))

    def _loads(self, parts: Sequence[Report]) -> dict[str, Load]:
        at_work = [part for part in parts if not part.done]  # who is done has handed its groups over, and needs none
        target, kept = sum(part.progress.target for part in at_work), sum(part.progress.kept for part in at_work)
        under_way = sum(part.progress.under_way for part in at_work)
        rate = sum(part.progress.rate for part in parts) / len(parts)
        groups = max(0.0, target - kept) / max(rate, LEAST_RATE)  # still to judge
        generating = min(under_way, sum(part.roles[POLICY].calls for part in parts))
        judging = under_way - generating
        missing = max(0.0, groups - judging)  # still to generate
        for rank, part in enumerate(parts):
            self._decided[rank] = max(part.progress.decided, self._decided.get(rank, 0))
        self._count_per_group(judging)
        loads = {}
        for role in self._grid.roles:
            requests = sum(part.roles[role].requests for part in parts)
            queued = sum(part.roles[role].waiting for part in parts)
            waiting = queued + sum(c.waiting for part in parts for c in part.roles[role].replicas.values())
            running = max(0, round(requests + queued - waiting))
            at_hand = running + round(waiting)
            if role == POLICY:
                share = missing / max(1, generating)
                needed = min(1.0, share) * at_hand + max(0.0, missing - generating) * self._each(role)
            else:
                needed = min(1.0, groups / max(1, judging)) * at_hand + missing * self._each(role)
            found = [c for part in parts for c in part.roles[role].replicas.values()]
            age = sum(c.running_tokens for c in found) / max(1.0, sum(c.running for c in found))
            lengths, longest = self._seen(role)
            loads[role] = Load(running, round(waiting), needed, age, lengths, longest, busy=self.busy[role])
        return loads

    def _each(self, role: str) -> float:
        return self._per_group.get(role, self._samples)

    def _count_per_group(self, judging: int) -> None:
        """How many requests of each role a group takes, siblings and repeats together. Groups that are being judged
        have all of the policy's behind them, and about half of the judges'."""
        decided = self._decided_before + sum(self._decided.values())
        for role in self._grid.roles:
            groups = decided + (judging if role == POLICY else judging / 2)
            if groups >= 4:
                self._per_group[role] = max(1.0, (self._ended_before[role] + self._ended[role]) / groups)

    def ended_rollout(self) -> bool:
        """The next one begins; what was counted weighs half from now on. An evaluation decides on no groups, and its
        requests tell nothing about them: then False."""
        if decided := sum(self._decided.values()):
            self._decided_before = (self._decided_before + decided) / 2
            self._ended_before = {role: (self._ended_before[role] + count) / 2 for role, count in self._ended.items()}
        self._ended, self._decided = dict.fromkeys(self._ended, 0), {}
        self._at_s, self._before = None, {}
        self._per_group = {}
        self._count_per_group(0)
        return decided > 0


def quantiles(lengths: Sequence[int]) -> list[float]:
    """At most so many values that stand for all, in order; the longest is among them."""
    ordered = sorted(lengths)
    if len(ordered) <= QUANTILES:
        return [float(length) for length in ordered]
    last = len(ordered) - 1
    return [float(ordered[round(i * last / (QUANTILES - 1))]) for i in range(QUANTILES)]
