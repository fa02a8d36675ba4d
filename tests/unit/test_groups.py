"""protocols.Group: everyone's values by rank, and lines that do not know of one another. Tasks, and real processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gcore.protocols import Group, Rendezvous
from gcore.runtime.local import Hub, LocalGroup

Program = Callable[[Group], Coroutine[Any, Any, Any]]


def with_tasks(size: int, program: Program) -> list[Any]:
    async def everyone() -> list[Any]:
        hub = Hub(size)
        groups = [LocalGroup(Rendezvous(rank, size, None, hub)) for rank in range(size)]
        return await asyncio.wait_for(asyncio.gather(*map(program, groups)), 20)

    return asyncio.run(everyone())


def with_processes(size: int, program: Program) -> list[Any]:
    """`program` must be a function of this module: the processes start from nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    members = [
        context.Process(target=_member, args=(rank, size, address, program, pipes[rank][1]), daemon=True)
        for rank in range(size)
    ]
    for member in members:
        member.start()
    for _, theirs in pipes:
        theirs.close()  # so that a death is an end of file here
    try:
        answers = []
        for mine, _ in pipes:
            assert mine.poll(90), "no answer"
            answers.append(mine.recv())
    finally:
        for member in members:
            member.join(5)
            member.kill()
    return answers


def _member(rank: int, size: int, address: str, program: Program, answer: Any) -> None:
    import os

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from gcore.runtime.gloo import GlooGroup

    group = GlooGroup(Rendezvous(rank, size, address), timeout_s=60.0)
    answer.send(asyncio.run(asyncio.wait_for(program(group), 60)))


RUNNERS = {"local": with_tasks, "gloo": with_processes}


async def talk(group: Group) -> dict[str, Any]:
    """Rank 0 goes ahead on the second line; rank 1 comes there only after both have met on the first, thrice."""
    first, second = group.subgroup(), group.subgroup()
    found: dict[str, Any] = {"rank": group.rank, "size": (group.size, first.size, second.rank)}
    early = asyncio.ensure_future(first.all_gather("ahead", f"ahead {group.rank}")) if group.rank == 0 else None
    found["main"] = [await group.all_gather("main", (group.rank, i)) for i in range(3)]
    found["second"] = await second.all_gather("second", {"from": group.rank})
    if early is not None:
        found["waited"] = not early.done()
    found["late"] = await group.all_gather("rank 1 is about to follow", None)
    found["ahead"] = await (early or first.all_gather("ahead", f"ahead {group.rank}"))
    found["together"] = await asyncio.gather(  # all under way at once
        *(line.all_gather(f"{name} {i}", f"{name}{i}") for i in range(3) for name, line in (("m", group), ("f", first)))
    )
    return found


@pytest.mark.parametrize("kind", list(RUNNERS))
def test_lines_are_independent(kind):
    found = RUNNERS[kind](2, talk)
    for rank, seen in enumerate(found):
        assert (seen["rank"], seen["size"]) == (rank, (2, 2, rank))
        assert seen["main"] == [[(0, i), (1, i)] for i in range(3)]
        assert seen["second"] == [{"from": 0}, {"from": 1}]
        assert seen["ahead"] == ["ahead 0", "ahead 1"]
        assert seen["together"] == [[f"{name}{i}"] * 2 for i in range(3) for name in "mf"]
    assert found[0]["waited"] is True


def test_a_line_has_the_time_limit_of_the_group():
    """Who is done with a step waits at the line for the slowest, however long that takes."""
    import torch

    from gcore.runtime.gloo import TIMEOUT_S, GlooGroup

    line: Any = GlooGroup(Rendezvous(0, 1, None)).subgroup()
    assert line._members._get_backend(torch.device("cpu")).options._timeout.total_seconds() == TIMEOUT_S


def test_a_line_of_a_line_is_refused_where_numbers_would_clash():
    group = LocalGroup(Rendezvous(0, 1, None, Hub(1)))
    with pytest.raises(AssertionError, match="only the first group can make subgroups"):
        group.subgroup().subgroup()


def test_alone():
    async def program(group: Group) -> list[Any]:
        return [await group.all_gather("a", 1), await group.subgroup().all_gather("b", 2)]

    assert with_tasks(1, program) == [[[1], [2]]]
