"""ReplicaSwitch: sleep, wake and the state of each replica, with replicas that die and hang."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bench.virtual_loop import VirtualLoop
from gcore.clients import EngineClient
from gcore.placement.replica_switch import ReplicaSwitch
from gcore.protocols import EngineStats, MemoryChange, RoleDied


class Replica:
    """Counts its commands. `requests` end one per poll; a method in `fails` raises, a method in `hangs` never ends."""

    def __init__(self, name: str, requests: int = 0, gigabytes: float = 1.0) -> None:
        self.name, self.requests, self.gigabytes = name, requests, gigabytes
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, Exception] = {}
        self.hangs: set[str] = set()
        self.commands = 0  # running now

    def submit(self, method: str, *args: Any) -> Any:
        raise NotImplementedError

    async def call(self, method: str, *args: Any) -> Any:
        if method == "stats":
            self.requests -= self.requests > 0
            return EngineStats(0, self.requests, 0.0, 0.0)
        assert self.requests == 0 and self.commands == 0, "an engine refuses to sleep while it has requests"
        self.calls.append((method, *args))
        self.commands += 1
        try:
            await asyncio.sleep(0.5)
            if method in self.hangs:
                await asyncio.Event().wait()
            if method in self.fails:
                raise self.fails[method]
        finally:
            self.commands -= 1
        return MemoryChange(0.5, self.gigabytes)


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(asyncio.wait_for(main(), 1000))


def make(*replicas: Replica, load: Any = None) -> ReplicaSwitch:
    return ReplicaSwitch([EngineClient(replica) for replica in replicas], 2, load)


def test_a_replica_sleeps_when_its_requests_are_gone_and_the_largest_change_is_measured():
    async def main() -> None:
        a, b = Replica("a", requests=3, gigabytes=2.0), Replica("b", gigabytes=4.0)
        switch = make(a, b)
        assert (switch.maybe_awake(), switch.maybe_asleep()) == ({0, 1}, set())
        await switch.sleep([0, 1])
        assert a.calls == b.calls == [("sleep", 2)]
        assert (switch.maybe_awake(), switch.maybe_asleep()) == (set(), {0, 1})
        assert switch.metrics == {"placement/sleep_s": 0.5, "placement/sleep_gb": 4.0}

    run(main)


def test_waking_in_two_stages_around_a_transfer():
    async def main() -> None:
        a, b, c = Replica("a"), Replica("b"), Replica("c")
        switch, alive = make(a, b, c), [0, 1]
        await switch.sleep([0, 1])
        async with switch.waking(lambda: alive):
            assert a.calls[-1] == b.calls[-1] == ("wake", "weights")
            assert switch.maybe_asleep() == {0, 1}  # they cannot serve yet
            alive.remove(1)
        assert a.calls == [("sleep", 2), ("wake", "weights"), ("wake", "kv_cache")]
        assert b.calls == a.calls[:2] and c.calls == []  # b died during the transfer; c never slept
        assert switch.maybe_asleep() == {1}
        assert {"placement/wake_weights_s", "placement/wake_cache_gb"} <= switch.metrics.keys()
        async with switch.waking(lambda: alive):
            pass
        assert len(a.calls) == 3  # it is awake

    run(main)


def test_a_serving_replica_has_current_weights():
    async def main() -> None:
        a, b, loaded = Replica("a"), Replica("b"), list[list[int]]()

        async def load(engines: Any) -> None:
            loaded.append(list(engines))
            assert switch.maybe_asleep() == {1}  # without weights it does not serve
            if len(loaded) == 2:
                raise RoleDied("b", "it took no weights")

        switch = make(a, b, load=load)
        for _ in range(2):
            await switch.sleep([1])
            if not loaded:
                await switch.wake_with_weights([1])
                assert switch.maybe_asleep() == set()
        with pytest.raises(RoleDied, match="it took no weights"):
            await switch.wake_with_weights([1])
        assert loaded == [[1], [1]] and switch.maybe_asleep() == {1} and a.calls == []

    run(main)


def test_all_commands_end_before_an_error_is_raised_and_a_dead_replica_returns_awake():
    async def main() -> None:
        a, b = Replica("a"), Replica("b", requests=100)
        a.fails["sleep"] = RoleDied("a", "gone")
        switch = make(a, b)
        with pytest.raises(RoleDied, match="a died: gone"):
            await switch.sleep([0, 1])
        assert b.calls == [("sleep", 2)] and switch.maybe_awake() == {0}
        await switch.sleep([0], skip_dead=True)
        a.fails["sleep"] = ValueError("strange")
        with pytest.raises(ValueError, match="strange"):
            await switch.sleep([0], skip_dead=True)
        assert 0 in switch.maybe_awake() and 0 in switch.maybe_asleep()  # unknown
        switch.mark_dead(0)
        assert switch.maybe_asleep() == {1}

    run(main)


@pytest.mark.parametrize("skip_dead", [True, False])
def test_a_replica_that_a_command_did_not_reach_is_reported(skip_dead):
    """It may be alive: if nobody reported it, it could sleep and get requests for the rest of the step."""

    async def main() -> None:
        a, b, c, lost = Replica("a"), Replica("b"), Replica("c"), list[str]()
        switch = ReplicaSwitch([EngineClient(replica) for replica in (a, b, c)], 2, on_death=lost.append)
        a.fails["sleep"], c.fails["sleep"] = (RoleDied(name, "the connection was cut") for name in "ac")
        with contextlib.nullcontext() if skip_dead else pytest.raises(RoleDied, match="a died"):
            await switch.sleep([0, 1, 2], skip_dead=skip_dead)
        assert lost == ["a", "c"]

    run(main)


def test_a_cancelled_command_leaves_the_state_unknown():
    async def main() -> None:
        a = Replica("a")
        switch = make(a)
        a.hangs.add("sleep")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await switch.sleep([0])
        assert switch.maybe_awake() == switch.maybe_asleep() == {0}
        await switch.wake([0])
        assert switch.maybe_asleep() == set()

    run(main)


def test_one_command_at_a_time_per_replica():
    """Replica.call detects two concurrent commands."""

    async def main() -> None:
        a = Replica("a")
        switch = make(a)
        await asyncio.gather(switch.sleep([0]), switch.wake([0]), switch.sleep([0]))
        assert [call[0] for call in a.calls] == ["sleep", "wake", "sleep"]

    run(main)
