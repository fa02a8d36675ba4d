"""Collectives among many controllers: the tree of gcore/runtime/tree.py against torch.distributed's gloo.

    python bench/collectives.py --sizes 16,64,256,1024 --write docs/controllers.md
    python bench/collectives.py --sizes 4,16 --rounds 5

Members are threads with their own sockets, spread over --processes processes of this machine. Every round exchanges a
report of progress, as in a rollout (`small`, about 100 bytes; merged by `reduce`), or one that describes 64 samples
(`large`, about 2 KB). Printed: CPU seconds of all members together per collective, messages and bytes of the busiest
member, wall time (which depends on the load of the machine), and seconds until all members have met.

gloo connects every pair of members: with 1,024 of them this would be half a million connections on one machine. Sizes
above --most-gloo are left out for it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import free_address, markdown, write_between, write_json  # noqa: E402
from gcore.controller.prompt_ledger import ProgressReport  # noqa: E402
from gcore.protocols import Rendezvous  # noqa: E402
from gcore.runtime.tree import FAN_OUT, TreeGroup, children_of  # noqa: E402

LARGE = [((i, 3), 512 + i, 512, 1, (), 0.25) for i in range(64)]
NAMES = {"gloo": "all_gather, gloo", "tree": "all_gather, tree", "reduce": "reduce, tree"}
MARK, END = "<!-- collectives -->", "<!-- end of collectives -->"


def progress(rank: int) -> ProgressReport:
    """In an exchange few controllers have a new decision."""
    return ProgressReport(kept=[(rank, 3)] if rank % 16 == 0 else [], running=32)


class GlooMember:
    """torch.distributed without its global state, so that threads can be members."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        import torch.distributed as dist

        host, _, port = (rendezvous.address or "").rpartition(":")
        limit, self.rank, self.size = timedelta(seconds=300), rendezvous.rank, rendezvous.size
        torch_dist: Any = dist  # its types of groups and stores do not name their methods
        store = torch_dist.TCPStore(host, int(port), self.size, rendezvous.rank == 0, limit, False)
        self._group = torch_dist.ProcessGroupGloo(store, self.rank, self.size, limit)

    def _all_gather(self, name: str, value: Any) -> list[Any]:
        """As torch.distributed.all_gather_object: sizes, then padded bytes."""
        import torch

        sent = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._group.allgather([sizes], [torch.tensor([len(sent)])]).wait()
        most = int(max(sizes))
        padded = torch.nn.functional.pad(sent, (0, most - len(sent)))
        found = [torch.zeros(most, dtype=torch.uint8) for _ in range(self.size)]
        self._group.allgather([found], [padded]).wait()
        return [pickle.loads(part[: int(n)].numpy().tobytes()) for part, n in zip(found, sizes, strict=True)]


def values_of(kind: str, rank: int) -> list[tuple[str, Any]]:
    return [("small", progress(rank)), *([] if kind == "reduce" else [("large", LARGE)])]


def member(kind: str, rank: int, size: int, address: str, rounds: int, results: dict[str, Any]) -> None:
    started = time.perf_counter()
    rendezvous = Rendezvous(rank, size, address, secret=b"bench")
    group: Any = GlooMember(rendezvous) if kind == "gloo" else TreeGroup(rendezvous, timeout_s=600.0)
    group._all_gather("warm", None)
    met_s = time.perf_counter() - started
    for name, value in values_of(kind, rank):
        group._all_gather("begin", None)
        cpu, wall = time.process_time(), time.perf_counter()
        for i in range(rounds):
            if kind == "reduce":
                merged = group._exchange(f"{name} {i}", value, ProgressReport.merged)
            else:
                found = group._all_gather(f"{name} {i}", value)
        if kind == "reduce":
            assert merged.running == 32 * size and len(merged.kept) == -(-size // 16)
        else:
            assert len(found) == size and found[rank] == value
        group._all_gather("end", None)
        if rank == results["first"]:  # one thread per process measures the CPU time of all of its threads
            results[name] = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    if rank == 0:
        results["met_s"] = met_s


def process(kind: str, ranks: list[int], size: int, address: str, rounds: int, answer: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    threading.stack_size(512 * 1024)
    results: dict[str, Any] = {"first": ranks[0]}
    with ThreadPoolExecutor(len(ranks)) as threads:
        list(threads.map(lambda rank: member(kind, rank, size, address, rounds, results), ranks))
    answer.send(results)


def measure(kind: str, size: int, processes: int, rounds: int, limit_s: float) -> dict[str, Any]:
    context, address = multiprocessing.get_context("spawn"), free_address()
    count = min(processes, size)
    shares = [list(range(i, size, count)) for i in range(count)]
    pipes = [context.Pipe(duplex=False) for _ in shares]
    started = [
        context.Process(target=process, args=(kind, share, size, address, rounds, pipe[1]), daemon=True)
        for share, pipe in zip(shares, pipes, strict=True)
    ]
    for each in started:
        each.start()
    deadline, answers = time.monotonic() + limit_s, list[dict[str, Any]]()
    try:
        for mine, theirs in pipes:
            theirs.close()
            if not mine.poll(max(0.0, deadline - time.monotonic())):
                return {"kind": kind, "size": size, "failed": f"no answer within {limit_s:.0f} s"}
            answers.append(mine.recv())
    except EOFError:
        return {"kind": kind, "size": size, "failed": "a process died"}
    finally:
        for each in started:
            each.join(2)
            each.kill()
    found: dict[str, Any] = {"kind": kind, "size": size, "met_s": next(a["met_s"] for a in answers if "met_s" in a)}
    for name, value in values_of(kind, 0):
        one = len(pickle.dumps(value))
        found[name] = {
            "cpu_ms": 1e3 * sum(answer[name]["cpu_s"] for answer in answers) / rounds,
            "wall_ms": 1e3 * answers[0][name]["wall_s"] / rounds,
            **traffic(kind, size, one),
        }
    return found


def traffic(kind: str, size: int, one: int) -> dict[str, int]:
    """Of the busiest member, from the algorithm: messages and payload bytes in both directions."""
    if kind == "gloo":  # a ring: size - 1 steps, once for the sizes and once for the values
        return {"messages": 4 * (size - 1), "bytes": 2 * (size - 1) * (one + 8)}
    links = len(children_of(0, size, FAN_OUT))
    if kind == "reduce":  # a merged report has the decisions of a 16th of the members
        merged = len(pickle.dumps(ProgressReport(kept=[(rank, 3) for rank in range(0, size, 16)], running=32 * size)))
        return {"messages": 2 * links, "bytes": 2 * links * merged}
    return {"messages": 2 * links, "bytes": (size - 1) * one + links * size * one}


def table(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    head = ["members", "", "met after, s", "CPU ms per exchange", "per member", "wall ms", "messages of busiest"]
    lines = []
    for row in rows:
        if "failed" in row:
            lines.append([f"{row['size']:,}", row["kind"], row["failed"], "", "", "", "", ""])
            continue
        sizes = [row[name] for name in ("small", "large") if name in row]

        def both(key: str, form: str, divisor: float = 1.0, sizes: list[dict[str, Any]] = sizes) -> str:
            return " / ".join(format(each[key] / divisor, form) for each in sizes)

        times = [both("cpu_ms", ",.0f"), both("cpu_ms", ".2f", row["size"]), both("wall_ms", ",.0f")]
        of_busiest = [f"{sizes[0]['messages']:,}", both("bytes", ",.0f")]
        lines.append([f"{row['size']:,}", NAMES[row["kind"]], f"{row['met_s']:.1f}", *times, *of_busiest])
    title = f"`bench/collectives.py --sizes {','.join(map(str, args.sizes))} --rounds {args.rounds}`, small / large:"
    return f"{title}\n\n{markdown([*head, 'its bytes'], lines)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], default=[16, 64, 256, 1024])
    parser.add_argument("--kinds", default=",".join(NAMES), help="of collectives")
    parser.add_argument("--most-gloo", type=int, default=64)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit", type=float, default=600, help="seconds per measurement")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, help="a page with the markers of this table")
    args = parser.parse_args()
    rows = []
    for size in args.sizes:
        for kind in args.kinds.split(","):
            if kind == "gloo" and size > args.most_gloo:
                continue
            rounds = max(1, args.rounds * 256 // size) if size > 256 else args.rounds
            rows.append(measure(kind, size, args.processes, rounds, args.limit))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    text = table(rows, args)
    print(text)
    write_json(args.json, rows)
    if args.write:
        write_between(args.write, MARK, END, text)


if __name__ == "__main__":
    main()
