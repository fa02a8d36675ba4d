"""Sandboxes: how long one takes to start and to run commands, alone and with others.

    python bench/sandboxes.py                     # the kinds that work on this machine
    python bench/sandboxes.py --kinds bubblewrap --at-once 1 64

Columns, in milliseconds, medians over the rounds: a start, and one from the pool; a command (`true`), a Python program
(`print(1)`), writing and reading a file of 1 MB; a snapshot of 10 MB of files, and its restore; the stop. With several
sandboxes at once, all do it at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import markdown, write_json  # noqa: E402
from gcore.config.sandbox import SandboxSettings  # noqa: E402
from gcore.sandbox.base import Sandbox, Sandboxes  # noqa: E402
from gcore.sandbox.pool import KINDS, SandboxPool, make_kind  # noqa: E402
from gcore.types import UserError  # noqa: E402

Value = TypeVar("Value")


class Times:
    def __init__(self) -> None:
        self.of = defaultdict[str, list[float]](list)

    async def take(self, name: str, call: Awaitable[Value]) -> Value:
        begin = time.perf_counter()
        value = await call
        self.of[name].append(time.perf_counter() - begin)
        return value


async def one(box: Sandbox, times: Times) -> None:
    data = os.urandom(1 << 20)
    await times.take("true", box.run(["true"]))
    assert (await times.take("python", box.run(["python3", "-c", "print(1)"]))).text == "1\n"
    await times.take("write", box.write("a", data))
    assert await times.take("read", box.read("a")) == data
    await box.run("for i in 1 2 3 4 5 6 7 8 9; do cp a $i; done")
    copy = await times.take("snapshot", box.snapshot())
    await times.take("restore", box.restore(copy))
    await times.take("stop", box.stop())


async def measure(settings: SandboxSettings, kind: Sandboxes, at_once: int, rounds: int) -> Times:
    times = Times()
    for _ in range(rounds):
        boxes = await asyncio.gather(*(times.take("start", kind.start()) for _ in range(at_once)))
        await asyncio.gather(*(one(box, times) for box in boxes))
    pool = SandboxPool(settings, kind)
    for _ in range(rounds):
        await pool.fill()
        begin = time.perf_counter()
        async with pool.one():
            times.of["pool"].append(time.perf_counter() - begin)
    await pool.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--image", default=None, help="of kinds that have images")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = ("start", "pool", "true", "python", "write", "read", "snapshot", "restore", "stop")
    rows, values = [], []
    for name in args.kinds:
        settings = SandboxSettings.model_validate(
            {"kind": name, "pool": 1, **({"image": args.image} if args.image and name != "bubblewrap" else {})}
        )
        try:
            kind = make_kind(settings)
        except UserError as error:
            print(error)
            continue
        for at_once in args.at_once:
            times = asyncio.run(measure(settings, kind, at_once, args.rounds))
            medians = {each: 1000 * statistics.median(times.of[each]) for each in names}
            values.append({"kind": name, "at_once": at_once, **medians})
            rows.append([name, at_once, *(f"{medians[each]:.3g}" for each in names)])
    print(markdown(["kind", "at once", *names], rows))
    write_json(args.json, values)


if __name__ == "__main__":
    main()
