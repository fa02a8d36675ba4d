"""protocols.ControllerGroup: everyone's values by rank, and lines that do not know of one another. Tasks, and real
processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any

import pytest

from gcore.protocols import ControllerGroup, Rendezvous
from gcore.runtime.local import Hub, LocalGroup
from gcore.runtime.tree import TreeGroup, _link, parent_of

Program = Callable[[ControllerGroup], Coroutine[Any, Any, Any]]


def with_tasks(size: int, program: Program) -> list[Any]:
    async def everyone() -> list[Any]:
        hub = Hub(size)
        groups = [LocalGroup(Rendezvous(rank, size, None, hub)) for rank in range(size)]
        return await asyncio.wait_for(asyncio.gather(*map(program, groups)), 60)

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
    from gcore.runtime.tree import TreeGroup

    group = TreeGroup(Rendezvous(rank, size, address, secret=b"s"), timeout_s=60.0)
    answer.send(asyncio.run(asyncio.wait_for(program(group), 60)))


RUNNERS = {"local": with_tasks, "tree": with_processes}


async def talk(group: ControllerGroup) -> dict[str, Any]:
    """Rank 0 goes ahead on the second line; rank 1 comes there only after both have met on the first, thrice."""
    first, second = group.subgroup(), group.subgroup()
    found: dict[str, Any] = {"rank": group.rank, "size": (group.size, first.size, second.rank)}
    early = asyncio.ensure_future(first.all_gather("ahead", f"ahead {group.rank}")) if group.rank == 0 else None
    found["main"] = [await group.all_gather("main", (group.rank, i)) for i in range(3)]
    found["second"] = await second.all_gather("second", {"from": group.rank})
    if early is not None:
        found["waited"] = not early.done()
    found["late"] = await group.reduce("rank 1 is about to follow", {group.rank}, set.union)
    await group.barrier("both follow")
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
        assert seen["ahead"] == ["ahead 0", "ahead 1"] and seen["late"] == {0, 1}
        assert seen["together"] == [[f"{name}{i}"] * 2 for i in range(3) for name in "mf"]
    assert found[0]["waited"] is True


def tree(size: int, program: Callable[[TreeGroup], Any], timeout_s: float = 60.0, fan_out: int = 3) -> list[Any]:
    """Members in threads of this process, each with its own sockets. Exceptions are returned."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def member(rank: int) -> Any:
        given = listener if rank == 0 else None
        group = TreeGroup(Rendezvous(rank, size, address, listener=given, secret=b"s"), timeout_s, fan_out)
        try:
            return program(group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(member, range(size)))


@pytest.mark.parametrize("size", [2, 4, 5, 23])
def test_values_come_by_rank_through_several_levels(size):
    def program(group: TreeGroup) -> Any:
        line = group.subgroup()
        return group._all_gather("a", {"rank": group.rank}), line._all_gather("b", "x" * group.rank)

    wanted = [{"rank": rank} for rank in range(size)], ["x" * rank for rank in range(size)]
    assert tree(size, program) == [wanted] * size


@pytest.mark.parametrize("size", [2, 4, 5, 23])
def test_a_reduction_merges_every_value_once(size):
    def program(group: TreeGroup) -> Any:
        read = 0

        def merge(one: list[int], other: list[int]) -> list[int]:
            nonlocal read
            read += 1
            return sorted(one + other)

        return group._exchange("numbers", [group.rank], merge), read

    found = tree(size, program)
    assert [value for value, _ in found] == [list(range(size))] * size
    assert sum(read for _, read in found) == size - 1 and max(read for _, read in found) <= 3  # the fan-out


@pytest.mark.parametrize("missing", [1, 4, 13])  # a child of the root, one below it, one below that
def test_everyone_is_told_who_is_missing(missing):
    """The rank does not come to the second collective. It may be the one through which others are connected."""
    released = threading.Event()

    def program(group: TreeGroup) -> Any:
        group._all_gather("step 1", None)
        if group.rank == missing:
            released.wait(30)
            return "slept"
        try:
            return group._all_gather("step 2", None)
        finally:
            if group.rank == 0:
                released.set()

    found = tree(14, program, timeout_s=1.5)
    below = {rank for rank in range(14) if missing in ancestors(rank)}
    for rank, answer in enumerate(found):
        if rank != missing and rank not in below:
            assert isinstance(answer, TimeoutError)
            assert f"missing controller-{missing} (last seen at 'step 1')" in str(answer)
    assert found[missing] == "slept"
    assert all("no answer from controller-" in str(found[rank]) or "broke" in str(found[rank]) for rank in below)


def ancestors(rank: int, fan_out: int = 3) -> set[int]:
    found = set()
    while rank:
        rank = parent_of(rank, fan_out)
        found.add(rank)
    return found


def test_members_at_different_collectives_are_named():
    found = tree(2, lambda group: group._all_gather("save" if group.rank else "load", None))
    assert {str(error) for error in found} == {
        "collective 'load' failed after up to 60 s: controller-0 is at 'load' and controller-1 at 'save'",
        "collective 'save' failed after up to 60 s: controller-0 is at 'load' and controller-1 at 'save'",
    }


def test_a_member_that_is_gone_is_named():
    def program(group: TreeGroup) -> Any:
        group._all_gather("step 1", None)
        if group.rank == 1:
            assert group._up is not None
            return group._up.close()  # as if its process had died
        return group._all_gather("step 2", None)

    broke = "the connection to controller-1 broke (last seen at 'step 1')"
    assert [broke in str(answer) for answer in tree(3, program)] == [True, False, True]


@pytest.mark.parametrize("greeted", [False, True])
def test_a_member_that_dies_as_the_others_meet_is_missing(greeted):
    """The same kind of error as that of a collective: the driver starts the controllers again."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        joining = threads.submit(TreeGroup, Rendezvous(1, 2, address, secret=b"s"))
        link = _link(listener.accept()[0])
        if greeted:
            deliver_challenge(link, b"s")
            answer_challenge(link, b"s")
        link.close()
        with pytest.raises(TimeoutError, match="did not meet"):
            joining.result(20)


def test_a_stranger_is_not_let_in():
    """Without the secret, a connection is closed, and the members meet all the same."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with socket.create_connection(address) as stranger, ThreadPoolExecutor(2) as threads:
        stranger.sendall(b"\0\0\0\x04junk")
        rendezvous = [
            Rendezvous(rank, 2, f"127.0.0.1:{address[1]}", listener=listener if rank == 0 else None, secret=b"s")
            for rank in range(2)
        ]
        groups = list(threads.map(TreeGroup, rendezvous))
        assert list(threads.map(lambda group: group._all_gather("a", group.rank), groups)) == [[0, 1]] * 2
        assert stranger.recv(4096)  # the challenge
        assert not stranger.recv(4096)  # closed


def test_a_line_of_a_line_is_refused_where_numbers_would_clash():
    group = LocalGroup(Rendezvous(0, 1, None, Hub(1)))
    with pytest.raises(AssertionError, match="only the first group can make subgroups"):
        group.subgroup().subgroup()


def test_alone():
    async def program(group: ControllerGroup) -> list[Any]:
        await group.barrier("c")
        merged = await group.reduce("d", 3, max)
        return [await group.all_gather("a", 1), await group.subgroup().all_gather("b", 2), merged]

    assert with_tasks(1, program) == [[[1], [2], 3]]
