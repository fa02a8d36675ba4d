"""Clusters that are not there: devices whose time passes and nothing is computed, and time that nobody waits for.

costs, shapes, planner ...       seconds and bytes of models on GPUs, by formulas: `gcore plan`
scenario, cluster, fleet, run    whole runs, event by event: `gcore simulate`
device                           one replica's time; the simulated cluster and the emulated engine share it
engine, trainer                  roles of real runs that sleep where others compute
VirtualLoop                      an event loop in which sleeping takes no time
"""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which nobody waits: when all sleep, its time jumps to the moment the first of them wakes.

    Its time starts at 0. Work takes none of it, unless `work_counts`: then the time of day passes too while tasks run.
    It knows of sleepers alone: a thread at work does not hold it back.

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(main())
    """

    def __init__(self, work_counts: bool = False) -> None:
        self._jumped_s, self._work_counts, self._started = 0.0, work_counts, time.monotonic()
        super().__init__(_Leaping(self))
        self._clock_resolution = 1e-7  # what a float can tell apart after years of virtual time

    def time(self) -> float:
        return self._jumped_s + (time.monotonic() - self._started if self._work_counts else 0.0)

    def jump(self, seconds: float) -> None:
        self._jumped_s += seconds


class _Leaping(selectors.DefaultSelector):
    """Looks for what is ready; where it would wait, the loop's time jumps instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:  # nobody sleeps: something from outside must come
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            self._loop.jump(timeout)
        return ready
