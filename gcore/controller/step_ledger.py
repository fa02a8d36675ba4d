"""What the controllers know in common of the rollout phase, and when it ends. Pure.

    every controller: ProgressReport ──all_gather (a tick)──> StepLedger.add ──> chosen: None, or the same prompts

All of them feed the same news in the same order and so come to the same decision without a word more. Only prompt
numbers cross; the groups stay where they were made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

REWARD_ERROR, WORKFLOW_ERROR, NO_SPREAD = "reward_error", "workflow_error", "no_spread"
FAILURES = (REWARD_ERROR, WORKFLOW_ERROR)  # counted against rewards.max_error_frac


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """What one controller saw since the last tick. ProgressReport(kept=[(130, 2)], dropped=[(134, "no_spread")])"""

    kept: list[tuple[int, int]] = field(default_factory=list)  # prompt, oldest policy version in its group
    dropped: list[tuple[int, str]] = field(default_factory=list)  # prompt, why
    withdrawn: list[int] = field(default_factory=list)  # kept before, too old by now
    idle: bool = False  # nothing under way here, and nothing left that may be drawn
    due: int = 0  # groups under way that would be too old for the next step
    running: int = 0  # groups under way


class StepLedger:
    """`strict` takes the first good groups in prompt order. Otherwise a step ends when enough groups are there, and
    takes those of the oldest policy, in prompt order. Arrival order would leave the long responses behind until they
    are too old, and train on the short ones."""

    def __init__(self, target: int, strict: bool) -> None:
        self.target, self.strict = target, strict
        self.kept: dict[int, int] = {}  # prompt -> version
        self.dropped: dict[int, str] = {}  # of this step
        self._base = self._window = self.seen = 0
        self._idle, self._due = False, 0
        self.running = self.ticks = 0  # groups under way on all controllers, as of the last of so many ticks
        self._frontier: int | None = None

    def begin(self, base: int, window: int) -> None:
        """A new step; strict: its prompts are among `window` numbers from `base` on."""
        self._base, self._window = base, window
        self.dropped = {}
        self._idle, self._due = False, 0
        self.seen, self._frontier = 0, None

    def add(self, parts: Sequence[ProgressReport]) -> None:
        for cursor in (c for part in parts for c in part.withdrawn):
            self.kept.pop(cursor, None)
        arrived = sorted(entry for part in parts for entry in part.kept)
        self.kept |= dict(arrived)
        self.dropped |= dict(entry for part in parts for entry in part.dropped)
        self.seen += len(arrived)
        self._frontier = None
        self._idle = all(part.idle for part in parts)
        self._due = sum(part.due for part in parts)
        self.running = sum(part.running for part in parts)
        self.ticks += 1

    def chosen(self) -> list[int] | None:
        """The prompts of this step, once that is certain; fewer than the target when nothing more can come."""
        if self.strict:
            return self._prefix()
        if (len(self.kept) >= self.target and not self._due) or self._idle:
            return sorted(self.kept, key=lambda cursor: (self.kept[cursor], cursor))[: self.target]
        return None

    def missing(self, wanted: float, rate: float, rank: int, size: int) -> int:
        """How many more groups controller `rank` of `size` should start until `wanted` have passed the filter, of which
        a share of `rate` does; below 0 when too many are under way. The parts of all controllers add up to the gap."""
        if wanted <= len(self.kept):
            return -self.running  # none, also in the place of one that is dropped
        gap = math.ceil((wanted - len(self.kept)) / rate - 1e-9) - self.running
        turn = (rank + self.ticks) % size  # what does not divide evenly goes to another controller after each tick
        return -(-gap * (turn + 1) // size) + (-gap * turn // size)

    def frontier(self) -> int:
        """Strict: no group beyond this prompt can be needed as long as all before it are decided as they stand."""
        if self._frontier is None:  # asked for after every group; it changes with the news alone
            kept = sorted(self.kept)
            enough = len(kept) >= self.target
            last = max((*kept, *self.dropped), default=self._base - 1)
            self._frontier = kept[self.target - 1] if enough else last
        return self._frontier

    def _prefix(self) -> list[int] | None:
        found: list[int] = []
        for cursor in range(self._base, self._base + self._window):
            if cursor in self.kept:
                found.append(cursor)
                if len(found) == self.target:
                    return found
            elif cursor not in self.dropped:
                return None
        return found
