"""Records one rollout, of a run or simulated: which role owned which slots, for how long, how busy; all moves.

In a run, times are controller 0's; busy seconds are counted by the replicas and known up to the last poll.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gcore.placement.grid import DeviceGrid, Move, Split


class PlacementTimeline:
    """`busy_of`: seconds with a request so far, of the replicas of a role on a block, mean."""

    def __init__(
        self, grid: DeviceGrid, split: Split, busy_of: Callable[[str, int], float], step: int, now: float
    ) -> None:
        self.moves: list[dict[str, Any]] = []
        self.intervals: list[dict[str, Any]] = []
        self.owned_s: dict[str, float] = {}  # slot-seconds per role
        self.busy_s: dict[str, float] = {}
        self.switch_s = 0.0  # slot-seconds of moves
        self.seconds = 0.0
        self._grid, self._busy_of, self._step, self._began = grid, busy_of, step, now
        self._owners: dict[int, tuple[str, float, float]] = {}  # block -> owner, start time, busy seconds at start
        self._moving: dict[int, tuple[Move, float]] = {}  # block -> move, start time
        for block, owner in enumerate(split.owners):
            self._set_owner(block, owner, now)

    @property
    def idle(self) -> float:
        """Share of all slot-seconds without a request, moves included."""
        return 1 - sum(self.busy_s.values()) / (self.seconds * self._grid.slots)

    def move_started(self, move: Move, now: float) -> None:
        self._close(move.block, now)
        self._moving[move.block] = move, now

    def move_ended(self, block: int, now: float, failure: str | None = None) -> None:
        move = self._close_move(block, now, failure)
        self._set_owner(block, move.target if failure is None else move.source, now)

    def owned_until(self, now: float) -> dict[str, float]:
        """Slot-seconds per role that `owned_s` does not contain yet, because the role still owns the block."""
        owned: dict[str, float] = {}
        for role, start, _ in self._owners.values():
            owned[role] = owned.get(role, 0.0) + (now - start) * self._grid.slots_per_block
        return owned

    def step_began(self, step: int, now: float) -> float:
        """Under asynchronous rollout one timeline has all steps. Intervals have the step in which they end."""
        self._step = step
        return now

    def close(self, now: float) -> None:
        """End of the rollout."""
        for block in range(self._grid.num_blocks):
            if block in self._moving:
                self._close_move(block, now, None)
            else:
                self._close(block, now)
        self.seconds = now - self._began
        del self._busy_of  # a finished rollout keeps no replicas alive

    def _set_owner(self, block: int, owner: str, now: float) -> None:
        self._owners[block] = owner, now, self._busy_of(owner, block)

    def _close(self, block: int, now: float) -> None:
        """End the interval of the block's owner."""
        role, start, busy_at_start = self._owners.pop(block)
        busy = min(max(0.0, self._busy_of(role, block) - busy_at_start), max(0.0, now - start))
        self._add_interval(block, role, start, now, busy / (now - start) if now > start else 0.0)
        for table, seconds in ((self.owned_s, now - start), (self.busy_s, busy)):
            table[role] = table.get(role, 0.0) + seconds * self._grid.slots_per_block

    def _close_move(self, block: int, now: float, failure: str | None) -> Move:
        move, since = self._moving.pop(block)
        self._add_interval(block, "switch", since, now, None)
        self.switch_s += (now - since) * self._grid.slots_per_block
        self.moves.append(
            {
                "step": self._step,
                "at_s": since,
                "slots": list(self._grid.slots_of(block)),
                "from": move.source,
                "to": move.target,
                "seconds": now - since,
                "reason": move.reason if failure is None else f"reverted: {failure}",
            }
        )
        return move

    def _add_interval(self, block: int, role: str, start: float, end: float, busy: float | None) -> None:
        for slot in self._grid.slots_of(block):
            interval: dict[str, Any] = {"step": self._step, "slot": slot, "role": role, "start": start, "end": end}
            self.intervals.append(interval | ({} if busy is None else {"busy": busy}))
