"""An event loop whose time is virtual: benches and tests run emulated roles for hours within seconds."""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop without waiting: when all tasks sleep, its time jumps to the moment when the first one wakes.

    Its time starts at 0. Running tasks take no virtual time, unless `work_counts`: then real time is added while tasks
    run. The loop does not wait for threads: its time may jump while a thread is working.

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(main())
    """

    def __init__(self, work_counts: bool = False) -> None:
        self._jumped_s, self._work_counts, self._started = 0.0, work_counts, time.monotonic()
        super().__init__(_JumpingSelector(self))
        self._clock_resolution = 1e-7  # resolution of a float after years of virtual time

    def time(self) -> float:
        return self._jumped_s + (time.monotonic() - self._started if self._work_counts else 0.0)

    def jump(self, seconds: float) -> None:
        self._jumped_s += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Returns ready events. Where it would wait, the loop's time jumps instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:  # no task sleeps: wait for an event from outside
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            self._loop.jump(timeout)
        return ready


if __name__ == "__main__":  # a part of other benches
    print(__doc__)
