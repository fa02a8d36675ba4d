"""Records one rollout for metrics and the report: which role owned which slots, for how long, how busy; all moves.

Times are controller 0's. Busy seconds are counted by the replicas and known up to the last poll.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore.placement.grid import DeviceGrid, Move, Split
from gcore.protocols import EngineStats


class PlacementTimeline:
    """`latest`: the last counters of every replica; the monitor keeps them up to date."""

    def __init__(
        self, grid: DeviceGrid, split: Split, latest: Mapping[tuple[str, int], EngineStats], step: int, now: float
    ) -> None:
        self.moves: list[dict[str, Any]] = []
        self.intervals: list[dict[str, Any]] = []
        self.owned_s: dict[str, float] = {}  # slot-seconds per role
        self.busy_s: dict[str, float] = {}
        self.seconds = 0.0
        self._grid, self._latest, self._step, self._began = grid, latest, step, now
        self._owners: dict[int, tuple[str, float, float]] = {}  # block -> owner, start time, busy seconds at start
        for block, owner in enumerate(split.owners):
            self._set_owner(block, owner, now)

    def move_started(self, move: Move, now: float) -> None:
        self._close(move.block, now)

    def move_ended(self, move: Move, since: float, now: float, failure: str | None) -> None:
        self._add_interval(move.block, "switch", since, now, None)
        self._set_owner(move.block, move.target if failure is None else move.source, now)
        self.moves.append(
            {
                "step": self._step,
                "at_s": since,
                "slots": list(self._grid.slots_of(move.block)),
                "from": move.source,
                "to": move.target,
                "seconds": now - since,
                "reason": move.reason if failure is None else f"reverted: {failure}",
            }
        )

    def close(self, now: float) -> None:
        """End of the rollout; no move is in progress."""
        for block in range(self._grid.num_blocks):
            self._close(block, now)
        self.seconds = now - self._began

    def _set_owner(self, block: int, owner: str, now: float) -> None:
        self._owners[block] = owner, now, self._busy_of(owner, block)

    def _busy_of(self, role: str, block: int) -> float:
        counters = [self._latest.get((role, i)) for i in self._grid.replicas(role, block)]
        return sum(c.busy_s for c in counters if c is not None) / len(counters)

    def _close(self, block: int, now: float) -> None:
        """End the interval of the block's owner."""
        role, start, busy_at_start = self._owners.pop(block)
        busy = min(max(0.0, self._busy_of(role, block) - busy_at_start), max(0.0, now - start))
        self._add_interval(block, role, start, now, busy / (now - start) if now > start else 0.0)
        for table, seconds in ((self.owned_s, now - start), (self.busy_s, busy)):
            table[role] = table.get(role, 0.0) + seconds * self._grid.slots_per_block

    def _add_interval(self, block: int, role: str, start: float, end: float, busy: float | None) -> None:
        for slot in self._grid.slots_of(block):
            interval: dict[str, Any] = {"step": self._step, "slot": slot, "role": role, "start": start, "end": end}
            self.intervals.append(interval | ({} if busy is None else {"busy": busy}))
