"""What happened in one rollout: who had which slots, how long, how busy; what was moved. For metrics and the report.

Times are controller 0's. Busy seconds are those the replicas counted themselves, as of the last look.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore.placement.grid import DeviceGrid, Move, Split
from gcore.protocols import EngineStats


class PlacementTimeline:
    """`latest`: what every replica told last; it is kept up to date by the monitor."""

    def __init__(
        self, grid: DeviceGrid, split: Split, latest: Mapping[tuple[str, int], EngineStats], step: int, now: float
    ) -> None:
        self.moves: list[dict[str, Any]] = []
        self.intervals: list[dict[str, Any]] = []
        self.owned_s: dict[str, float] = {}  # slot seconds of each role
        self.busy_s: dict[str, float] = {}
        self.seconds = 0.0
        self._grid, self._latest, self._step, self._began = grid, latest, step, now
        self._owners: dict[int, tuple[str, float, float]] = {}  # block -> owner, since when, its busy seconds then
        for block, owner in enumerate(split.owners):
            self._own(block, owner, now)

    def began(self, move: Move, now: float) -> None:
        self._close(move.block, now)

    def ended(self, move: Move, since: float, now: float, failure: str | None) -> None:
        self._piece(move.block, "switch", since, now, None)
        self._own(move.block, move.target if failure is None else move.source, now)
        self.moves.append(
            {
                "step": self._step,
                "at_s": since,
                "slots": list(self._grid.slots_of(move.block)),
                "from": move.source,
                "to": move.target,
                "seconds": now - since,
                "reason": move.reason if failure is None else f"taken back: {failure}",
            }
        )

    def close(self, now: float) -> None:
        """No move is under way."""
        for block in range(self._grid.num_blocks):
            self._close(block, now)
        self.seconds = now - self._began

    def _own(self, block: int, owner: str, now: float) -> None:
        self._owners[block] = owner, now, self._busy_of(owner, block)

    def _busy_of(self, role: str, block: int) -> float:
        found = [self._latest.get((role, i)) for i in self._grid.replicas(role, block)]
        return sum(c.busy_s for c in found if c is not None) / len(found)

    def _close(self, block: int, now: float) -> None:
        """The owner's time on the block ends here."""
        role, start, busy_then = self._owners.pop(block)
        busy = min(max(0.0, self._busy_of(role, block) - busy_then), max(0.0, now - start))
        self._piece(block, role, start, now, busy / (now - start) if now > start else 0.0)
        for table, seconds in ((self.owned_s, now - start), (self.busy_s, busy)):
            table[role] = table.get(role, 0.0) + seconds * self._grid.block

    def _piece(self, block: int, role: str, start: float, end: float, busy: float | None) -> None:
        for slot in self._grid.slots_of(block):
            piece: dict[str, Any] = {"step": self._step, "slot": slot, "role": role, "start": start, "end": end}
            self.intervals.append(piece | ({} if busy is None else {"busy": busy}))
