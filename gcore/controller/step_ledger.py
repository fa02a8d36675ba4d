"""The progress of all controllers in the rollout phase of a step. Decides when it ends, and with which prompts.

    every controller: ProgressReport ──merged (one exchange)──> StepLedger.add ──> chosen: None, or the same prompts

Every controller adds the same merged reports and therefore makes the same decision without further messages.
Only prompt numbers are exchanged; groups stay on the controller that made them (prompt_ledger.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

REWARD_ERROR, WORKFLOW_ERROR, NO_SPREAD = "reward_error", "workflow_error", "no_spread"
FAILURES = (REWARD_ERROR, WORKFLOW_ERROR)  # counted against rewards.max_error_frac


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """One controller since the last exchange. ProgressReport(kept=[(130, 2)], dropped=[(134, "no_spread")])"""

    kept: list[tuple[int, int]] = field(default_factory=list)  # prompt, oldest policy version in its group
    dropped: list[tuple[int, str]] = field(default_factory=list)  # prompt, reason
    withdrawn: list[int] = field(default_factory=list)  # kept before, but too old now
    idle: bool = False  # no group is in progress, and no more prompts may be drawn
    due: int = 0  # groups in progress that would be too old for the next step
    running: int = 0  # groups in progress

    def merged(self, other: ProgressReport) -> ProgressReport:
        """Of two sets of controllers, in any order."""
        return ProgressReport(
            self.kept + other.kept,
            self.dropped + other.dropped,
            self.withdrawn + other.withdrawn,
            self.idle and other.idle,
            self.due + other.due,
            self.running + other.running,
        )


class StepLedger:
    """`strict`: a step takes the first groups that pass the filter, in prompt order. Otherwise a step ends when enough
    groups are kept, and takes those of the oldest policy version first, then in prompt order. Order of arrival would
    prefer short responses, and long ones would become too old."""

    def __init__(self, target: int, strict: bool) -> None:
        self.target, self.strict = target, strict
        self.kept: dict[int, int] = {}  # prompt -> version; not yet taken by a step
        self.dropped: dict[int, str] = {}  # prompt -> reason, reported in this step
        self.num_passed = 0  # groups that passed the filter, reported in this step
        self._base = self._window = 0
        self._idle, self._due = False, 0
        self._running = 0  # groups in progress on all controllers, as of the last exchange
        self._exchanges = 0
        self._frontier: int | None = None

    def begin(self, base: int, window: int) -> None:
        """Start a step. Strict: its prompts are among the `window` numbers from `base` on."""
        self._base, self._window = base, window
        self.dropped = {}
        self._idle, self._due = False, 0
        self.num_passed, self._frontier = 0, None

    def restore(self, kept: dict[int, int]) -> None:
        """The groups that a checkpoint kept for later steps: prompt -> version."""
        self.kept = kept

    def add(self, report: ProgressReport) -> None:
        """Add the merged report of one exchange. The order in which reports were merged makes no difference."""
        for number in report.withdrawn:
            self.kept.pop(number, None)
        self.kept |= dict(sorted(report.kept))
        self.dropped |= dict(sorted(report.dropped))
        self.num_passed += len(report.kept)
        self._frontier = None
        self._idle, self._due, self._running = report.idle, report.due, report.running
        self._exchanges += 1

    def chosen(self) -> list[int] | None:
        """The prompts of this step; None: not decided yet. Fewer than the target if no more prompts may be drawn."""
        if self.strict:
            return self._prefix()
        if (len(self.kept) >= self.target and not self._due) or self._idle:
            return sorted(self.kept, key=lambda number: (self.kept[number], number))[: self.target]
        return None

    def take(self, chosen: Sequence[int]) -> None:
        """End the step with these prompts. Other kept groups wait for the next steps."""
        for number in chosen:
            del self.kept[number]

    def clear(self) -> None:
        """End the step. No controller keeps other groups, finished or in progress."""
        self.kept.clear()
        self._running = 0

    def missing(self, wanted: float, rate: float, rank: int, size: int) -> int:
        """How many more groups controller `rank` of `size` should start so that `wanted` groups pass the filter, if a
        fraction `rate` passes; negative if too many are in progress. The numbers of all controllers add up to the gap.
        """
        if wanted <= len(self.kept):
            return -self._running  # start no more, not even to replace dropped groups
        gap = math.ceil((wanted - len(self.kept)) / rate - 1e-9) - self._running
        turn = (rank + self._exchanges) % size  # the remainder goes to another controller after each exchange
        return _ceil_div(gap * (turn + 1), size) - _ceil_div(gap * turn, size)

    def frontier(self) -> int:
        """Strict: all prompts up to this number must be started, because a later one is already decided. If enough
        groups are kept, the step needs no prompt after it."""
        if self._frontier is None:  # cached: read after every group, changes only with an exchange
            kept = sorted(self.kept)
            enough = len(kept) >= self.target
            last = max((*kept, *self.dropped), default=self._base - 1)
            self._frontier = kept[self.target - 1] if enough else last
        return self._frontier

    def _prefix(self) -> list[int] | None:
        """The first kept groups in prompt order; None while an earlier prompt is undecided."""
        found: list[int] = []
        for number in range(self._base, self._base + self._window):
            if number in self.kept:
                found.append(number)
                if len(found) == self.target:
                    return found
            elif number not in self.dropped:
                return None
        return found


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
