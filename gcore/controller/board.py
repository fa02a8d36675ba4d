"""What the controllers know in common of the rollout phase, and when it ends. Pure.

    every controller: News ──all_gather (a tick)──> Board.add ──> Board.chosen: None, or the same prompts everywhere

All of them feed the same news in the same order and so come to the same decision without a word more. Only prompt
numbers cross; the groups stay where they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

REWARD_ERROR, NO_SPREAD = "reward_error", "no_spread"


@dataclass(frozen=True, slots=True)
class News:
    """News(kept=[(130, 2)], dropped=[(134, "no_spread")], idle=False): what one controller saw since the last tick"""

    kept: list[tuple[int, int]] = field(default_factory=list)  # prompt, oldest policy version in its group
    dropped: list[tuple[int, str]] = field(default_factory=list)  # prompt, why
    withdrawn: list[int] = field(default_factory=list)  # kept before, too old by now
    idle: bool = False  # nothing under way here, and nothing left that may be drawn
    due: int = 0  # groups under way that would be too old for the next step


class Board:
    """`strict` takes the first good groups in the order of the prompts; else the oldest policy's, first come first."""

    def __init__(self, target: int, strict: bool) -> None:
        self.target, self.strict = target, strict
        self.kept: dict[int, int] = {}  # prompt -> version, in the order they became known
        self.dropped: dict[int, str] = {}  # of this step
        self._base = self._window = self.seen = 0
        self._idle, self._due = False, 0
        self._frontier: int | None = None

    def begin(self, base: int, window: int) -> None:
        """A new step; strict: its prompts are among `window` numbers from `base` on."""
        self._base, self._window = base, window
        self.dropped = {}
        self._idle, self._due = False, 0
        self.seen, self._frontier = 0, None

    def add(self, parts: Sequence[News]) -> None:
        for cursor in (c for part in parts for c in part.withdrawn):
            self.kept.pop(cursor, None)
        arrived = sorted(entry for part in parts for entry in part.kept)
        self.kept |= dict(arrived)
        self.dropped |= dict(entry for part in parts for entry in part.dropped)
        self.seen += len(arrived)
        self._frontier = None
        self._idle = all(part.idle for part in parts)
        self._due = sum(part.due for part in parts)

    def chosen(self) -> list[int] | None:
        """The prompts of this step, once that is certain; fewer than the target when nothing more can come."""
        if self.strict:
            return self._prefix()
        if (len(self.kept) >= self.target and not self._due) or self._idle:
            return sorted(self.kept, key=self.kept.__getitem__)[: self.target]  # stable: first come within a version
        return None

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
