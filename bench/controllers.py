"""Three control planes, measured: a classic single controller, a metadata-only one, and G-Core's parallel controllers.

    python bench/controllers.py                      the tables and plots of docs/controllers.md (writes the page)
    python bench/controllers.py --quick              small workloads, under two minutes, writes nothing
    python bench/controllers.py --only text --json text.json
    python bench/controllers.py --kill               only the batches at which a memory limit kills a controller

    driver ──> hosts: emulated engines, judges and ranks, many per process     (bench/control_roles.py)
           └─> controllers of one plane ──step──> Report                       (bench/control_planes.py)

Every row is a new Ray cluster on this machine: real processes, RPC and object store. Engines and ranks sleep or do
nothing. All planes have the same prompts, lengths, rewards, filter and layout; the ranks hash what they receive, and
the bench fails if two planes deliver different samples.

Steps of a row: one in which bytes are counted, one in which memory and latencies are sampled, one in which Python
functions are counted, then `--rounds` steps that are only timed. CPU seconds are those of whole processes, with the
threads of Ray. Weight updates are not included.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from bench.common import markdown, write_between, write_json  # noqa: E402
from bench.control_planes import Plane, Program, Report, Seat  # noqa: E402
from bench.control_roles import HEAVY, Host, Workload  # noqa: E402

TEXT = Workload("text", prompts=128, siblings=8, tokens=2048)
IMAGES = Workload("images", prompts=16, siblings=8, tokens=256, images=4)
VIDEO = Workload("video", prompts=8, siblings=4, tokens=64, images=1, image_bytes=8 * 2**20)
REWARDS = Workload("reward-heavy", prompts=32, siblings=8, tokens=512, judges=3, feedback=32, rejected=0.5)
MANY_REWARDS = replace(REWARDS, prompts=128)  # with 32 prompts, 16 controllers have two each: no load is even
WORKLOADS = {workload.name: workload for workload in (TEXT, REWARDS, IMAGES, VIDEO)}
QUICK = {
    "text": replace(TEXT, prompts=16, tokens=512),
    "images": replace(IMAGES, prompts=8, siblings=4),
    "video": replace(VIDEO, prompts=2),
    "reward-heavy": replace(REWARDS, prompts=8, siblings=4),
}
KILL = Workload("kill", prompts=8, siblings=8, tokens=2048)  # the smallest batch; each next one has twice the prompts
KILL_MB, MOST_SAMPLES, KILL_SIZES = 64.0, 8192, (1, 2, 4, 8)
SKEW = Workload("skew", prompts=384, siblings=4, tokens=400, slots=16, per_sequence_s=0.0005)
SKEW_ENGINES, SKEW_STEPS, SKEW_SIZES = 16, 5, (2, 4, 8)
MANY_ENGINES = 512
HOSTS = 2
MEDIA = ("images", "video")
Job = tuple[Workload, int, Sequence[Plane]]  # engines (and ranks), control planes
PAGE, BEGIN, END = ROOT / "docs" / "controllers.md", "<!-- bench/controllers.py -->", "<!-- end -->"
STEP_S = 2e-4  # emulated seconds per token
STORE_SAMPLE_S = 0.05


# ---- rows ------------------------------------------------------------------------------------------------------------


def role_names(workload: Workload, num_engines: int, num_hosts: int) -> list[list[str]]:
    """The roles of each host: engines, ranks and judges (as many replicas per judge as a quarter of the engines)."""
    names = [f"engine-{i}" for i in range(num_engines)] + [f"rank-{i}" for i in range(num_engines)]
    names += [f"judge-{j}-{i}" for j in range(workload.judges) for i in range(max(1, num_engines // 4))]
    return [names[host::num_hosts] for host in range(num_hosts)]


async def start_hosts(
    runtime: Any, workload: Workload, num_engines: int, num_hosts: int = HOSTS, step_s: float = STEP_S
) -> list[tuple[Any, list[str]]]:
    """Handles of the hosts, and the names of their roles. `runtime`: a runtime of the product, Ray or local."""
    names = role_names(workload, num_engines, num_hosts)
    handles = await runtime.start_group("host", Host, [(part, workload, step_s) for part in names])
    return list(zip(handles, names, strict=True))


async def run_plane(
    controllers: Sequence[Any], plane: Plane, workload: Workload, places: Any, rounds: int, media: str, virtual: bool
) -> dict[str, Any]:
    """All steps of one row. `controllers`: their handles. `places`: from start_hosts."""
    hosts = [handle for handle, _ in places]
    folder = media if plane.kind == "parallel" and plane.media else None
    await asyncio.gather(*(host.call("open", folder) for host in hosts))
    usage = Usage()
    steps, digest = [], ""
    for number, mode in enumerate(("count", *["observe", "profile"] * (not virtual), *["plain"] * rounds), start=1):
        before = await usage.read(hosts, hashing=mode == "count")
        with usage.store_sampled(mode == "observe"):
            reports: list[Report] = await asyncio.gather(*(c.call("step", number, mode) for c in controllers))
        after = await usage.read(hosts)
        if mode == "count":
            digest = samples_digest(after["digests"])
            num_samples = len(after["digests"])
        steps.append(
            {
                "mode": mode,
                "reports": [asdict(report) for report in reports],
                "hosts_cpu_s": after["hosts_cpu_s"] - before["hosts_cpu_s"],
                "ray_cpu_s": after["ray_cpu_s"] - before["ray_cpu_s"],
                "to_training_s": after["started"] - max(report.last_sample for report in reports),
            }
        )
    return {
        "plane": plane.name,
        "workload": workload.name,
        "engines": sum(name.startswith("engine-") for _, names in places for name in names),
        "controllers": plane.controllers,
        "digest": digest,
        "samples": num_samples,
        "store_mb": usage.store_peak / 2**20,
        "steps": steps,
    }


async def run_locally(
    plane: Plane, workload: Workload, num_engines: int, rounds: int, media: str, step_s: float, virtual: bool = False
) -> dict[str, Any]:
    """One row with all roles on this event loop."""
    from gcore.runtime.local import LocalRuntime

    runtime = LocalRuntime()
    places = await start_hosts(runtime, workload, num_engines, step_s=step_s)
    args = (plane, workload, places, virtual)
    controllers = await runtime.start_group("controller", Program, [args] * plane.controllers)
    return await run_plane(controllers, plane, workload, places, rounds, media, virtual)


async def run_seated(
    seats: Sequence[Any], plane: Plane, workload: Workload, places: Any, rounds: int, media: str
) -> dict[str, Any]:
    """One row on processes that exist already."""
    seats = seats[: plane.controllers]
    address = await seats[0].call("address")
    opened = (seat.call("open", plane, workload, places, rank, address) for rank, seat in enumerate(seats))
    await asyncio.gather(*opened)
    row = await run_plane(seats, plane, workload, places, rounds, media, virtual=False)
    await asyncio.gather(*(seat.call("close") for seat in seats))
    return row


def samples_digest(digests: Mapping[Any, bytes]) -> str:
    total = hashlib.blake2b(digest_size=8)
    for key in sorted(digests):
        total.update(repr(key).encode() + digests[key])
    return total.hexdigest()


class Usage:
    """CPU seconds outside of the controllers, and the peak of the object store."""

    def __init__(self) -> None:
        import psutil

        self.store_peak = 0
        family = psutil.Process().children(recursive=True)
        self._daemons = [p for p in family if p.name().startswith(("raylet", "gcs_server"))]
        self._task: asyncio.Task[None] | None = None

    async def read(self, hosts: Sequence[Any], hashing: bool = False) -> dict[str, Any]:
        found = await asyncio.gather(*(host.call("observe", hashing) for host in hosts))
        times = [process.cpu_times() for process in self._daemons]
        return {
            "digests": {key: digest for part in found for key, digest in part["digests"].items()},
            "started": max(part["started"] for part in found),
            "hosts_cpu_s": sum(part["cpu_s"] for part in found),
            "ray_cpu_s": sum(t.user + t.system for t in times),
        }

    def store_sampled(self, sampled: bool) -> Any:
        import contextlib

        @contextlib.contextmanager
        def block() -> Any:
            task = asyncio.ensure_future(self._sample()) if sampled and self._daemons else None
            try:
                yield
            finally:
                if task is not None:
                    task.cancel()

        return block()

    async def _sample(self) -> None:
        import ray
        from ray._private.internal_api import get_memory_info_reply, get_state_from_address

        state = get_state_from_address(ray.get_runtime_context().gcs_address)
        while True:
            reply = await asyncio.to_thread(get_memory_info_reply, state)
            self.store_peak = max(self.store_peak, reply.store_stats.object_store_bytes_used)
            await asyncio.sleep(STORE_SAMPLE_S)


def run_all(jobs: Sequence[Job], rounds: int, save: Path | None) -> list[dict[str, Any]]:
    """All rows, on one Ray cluster. `save`: a file that has every row as soon as it is measured."""
    from gcore.runtime.ray import RayRuntime

    payload = max(w.samples * w.images * w.image_bytes for w, _, _ in jobs)
    media = Path(tempfile.mkdtemp(prefix="gcore-media-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    logs = Path(tempfile.mkdtemp(prefix="gcore-controllers-"))
    runtime, rows = RayRuntime(1024 + 4 * payload // 2**20, logs=logs), list[dict[str, Any]]()

    async def run() -> None:
        seats = await runtime.start_group(
            "controller", Seat, [()] * max(p.controllers for _, _, planes in jobs for p in planes)
        )
        for workload, num_engines, planes in jobs:
            places = await start_hosts(runtime, workload, num_engines)
            own: list[dict[str, Any]] = []
            for plane in planes:
                began = time.monotonic()
                own.append(await run_seated(seats, plane, workload, places, rounds, str(media)))
                for file in media.iterdir():
                    file.unlink()
                print(f"{workload.name}, {plane.name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
                if own[-1]["digest"] != own[0]["digest"]:
                    sys.exit(f"{workload.name}: {plane.name} delivered other samples than {own[0]['plane']}")
                rows.append(summary(own[-1], own[0]["steps"][0]["reports"][0]["payload_bytes"]))
                write_json(save, {"rows": rows})
            await runtime.stop_group("host")

    try:
        asyncio.run(run())
    finally:
        runtime.stop()
        shutil.rmtree(media)
    shutil.rmtree(logs)
    return rows


# ---- numbers of a row ------------------------------------------------------------------------------------------------


def summary(row: Mapping[str, Any], payload_bytes: int) -> dict[str, Any]:
    """`payload_bytes`: of all samples of a step, as the classic controller has them."""
    count = row["steps"][0]["reports"]
    observed = row["steps"][1]["reports"]
    profiled, plain = row["steps"][2]["reports"], row["steps"][3:]
    samples, share = row["samples"], payload_bytes / row["controllers"]
    cpu = [sum(r["cpu_s"] for r in step["reports"]) for step in plain]
    busiest = [max(r["cpu_s"] for r in step["reports"]) for step in plain]
    probes = sorted(ms for r in observed for ms in r["probes_ms"])
    return {
        **{name: value for name, value in row.items() if name != "steps"},
        "payload_mb": payload_bytes / 1e6,
        "by_method": max((r["by_method"] for r in count), key=lambda found: sum(map(sum, found.values()))),
        "busiest_mb": max(r["bytes_in"] + r["bytes_out"] for r in count) / 1e6,
        "all_mb": sum(r["bytes_in"] + r["bytes_out"] for r in count) / 1e6,
        "private_mb": max(r["private_mb"] for r in observed),
        "private_all_mb": sum(r["private_mb"] for r in observed),
        "base_mb": max(r["base_mb"] for r in observed),
        "of_share": max(r["private_mb"] for r in observed) * 2**20 / share,
        "cpu_ms": 1000 * statistics.median(cpu) / samples,
        "cpu_ms_least": 1000 * min(cpu) / samples,
        "cpu_ms_most": 1000 * max(cpu) / samples,
        "busiest_cpu_s": statistics.median(busiest),
        "rest_cpu_ms": 1000 * statistics.median(s["hosts_cpu_s"] + s["ray_cpu_s"] for s in plain) / samples,
        "calls": sum(r["calls"] for r in count),
        "functions": sum(r["functions"] for r in profiled) / samples,
        "busiest_functions_k": max(r["functions"] for r in profiled) / 1000,
        "collectives": max(r["collectives"] for r in count),
        "p50_ms": probes[len(probes) // 2] if probes else 0.0,
        "p99_ms": probes[len(probes) * 99 // 100] if probes else 0.0,
        "wall_s": statistics.median(max(r["wall_s"] for r in s["reports"]) for s in plain),
        "to_training_s": statistics.median(s["to_training_s"] for s in plain),
    }


BYTES = {
    "control plane": "{plane}",
    "MB through the busiest": "{busiest_mb:,.2f}",
    "MB through all": "{all_mb:,.2f}",
    "memory of the largest, MB": "{private_mb:,.1f}",
    "in shares": "{of_share:.1f}",
    "memory of all, MB": "{private_all_mb:,.1f}",
    "object store, MB": "{store_mb:,.0f}",
}
SECONDS = {
    "control plane": "{plane}",
    "CPU ms per sample": "{cpu_ms:.2f}",
    "least-most": "{cpu_ms_least:.2f}-{cpu_ms_most:.2f}",
    "CPU ms per sample of engines, ranks, Ray": "{rest_cpu_ms:.2f}",
    "CPU s of the busiest per step": "{busiest_cpu_s:.2f}",
    "functions per sample": "{functions:,.0f}",
    "functions of the busiest, thousands": "{busiest_functions_k:,.0f}",
    "calls per step": "{calls:,}",
    "collectives": "{collectives}",
    "p50 ms": "{p50_ms:.1f}",
    "p99 ms": "{p99_ms:.1f}",
    "step, s": "{wall_s:.2f}",
    "last sample to training, s": "{to_training_s:.2f}",
}
SKEWED = {
    "controllers": "{controllers}",
    "balanced, s": "{balanced_s:.1f}",
    "skewed, spill-over, s": "{spill_s:.1f}",
    "/ balanced": "{spill_x:.2f}",
    "skewed, own engines only, s": "{own_s:.1f}",
    "/ balanced ": "{own_x:.2f}",
    "bytes through the heavy controller": "{busiest:.0%}",
}


def table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [[form.format(**row) for form in columns.values()] for row in rows]
    return markdown(list(columns), lines, ["---", *["---:"] * (len(columns) - 1)])


def goals(rows: Sequence[Mapping[str, Any]], skew: Sequence[Mapping[str, Any]]) -> str:
    """The goals, and the worst number that was measured for each of them."""
    found: list[tuple[str, str, float, float]] = []  # goal, what was measured, value, limit
    of = {(row["workload"], row["engines"], row["plane"]): row for row in rows}
    for (workload, engines, _), row in of.items():
        size, classic = row["controllers"], of[workload, engines, "classic"]
        meta, single = of[workload, engines, "metadata"], of.get((workload, engines, "parallel N=1"))
        if not row["plane"].startswith("parallel") or "inline" in row["plane"]:
            continue
        where = f"{workload}, {engines} engines, N={size}"
        if workload not in MEDIA:  # which are references: no part of the memory of a controller
            found.append(("memory of a controller / its share <= 1.2", where, row["of_share"], 1.2))
        ratio = row["busiest_mb"] / classic["busiest_mb"] * size
        found.append(("N x bytes through the busiest / classic <= 1.3", where, ratio, 1.3))
        if workload in MEDIA:
            ratio = row["busiest_mb"] / meta["busiest_mb"]
            found.append(("images, video: bytes per controller / metadata-only <= 1.1", where, ratio, 1.1))
        if single is not None and size > 1:
            ratio = row["cpu_ms_least"] / single["cpu_ms_least"]
            found.append(("CPU per sample / that of N=1: flat (<= 1.1)", where, ratio, 1.1))
            ratio = row["functions"] / single["functions"]
            found.append(("functions per sample / that of N=1: flat (<= 1.1)", where, ratio, 1.1))
        if workload == "reward-heavy" and size > 1:
            ratio = size * row["busiest_cpu_s"] / meta["busiest_cpu_s"]
            found.append(("reward-heavy: N x CPU of the busiest / metadata-only <= 1.3", where, ratio, 1.3))
            ratio = size * row["busiest_functions_k"] / meta["busiest_functions_k"]
            found.append(("reward-heavy: N x functions of the busiest / metadata-only <= 1.3", where, ratio, 1.3))
            found.append(("reward-heavy: step / metadata-only <= 1", where, row["wall_s"] / meta["wall_s"], 1.0))
    found += [("10x skew: step / balanced <= 1.15", f"N={r['controllers']}", r["spill_x"], 1.15) for r in skew]
    lines = []
    for goal in dict.fromkeys(entry[0] for entry in found):
        own = sorted((value, where, limit) for name, where, value, limit in found if name == goal)
        met = sum(value <= limit for value, _, limit in own)
        (low, best, _), (high, worst, _) = own[0], own[-1]
        lines.append([goal, f"{met} of {len(own)}", f"{low:.2f} ({best})", f"{high:.2f} ({worst})"])
    return markdown(["goal", "met", "best", "worst"], lines)


def write_page(
    rows: Sequence[Mapping[str, Any]], skew: Sequence[Mapping[str, Any]], kills: Sequence[Mapping[str, Any]]
) -> None:
    parts = ["### Goals\n\n" + goals(rows, skew)]
    for workload, engines in dict.fromkeys((row["workload"], row["engines"]) for row in rows):
        own = [row for row in rows if (row["workload"], row["engines"]) == (workload, engines)]
        title = f"### {workload}, {engines} engines and ranks"
        size = f"{own[0]['samples']} samples are trained on, {own[0]['payload_mb']:,.1f} MB of payload."
        parts += [title, size, table(BYTES, own), table(SECONDS, own)]
    parts += ["![bytes and CPU seconds of the busiest controller](controllers.png)"]
    parts += [f"### A limit of {KILL_MB:.0f} MB on the memory of each controller", table(KILLS, kills)]
    parts += [f"### Skew: one share {HEAVY} x heavier", table(SKEWED, skew)]
    write_between(PAGE, BEGIN, END, "\n" + "\n\n".join(parts) + "\n")
    plot(rows)


def plot(rows: Sequence[Mapping[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    places = list(dict.fromkeys((row["workload"], row["engines"]) for row in rows))
    figure, axes = pyplot.subplots(2, len(places), figsize=(3.6 * len(places), 6), squeeze=False)
    for column, place in enumerate(places):
        own = [row for row in rows if (row["workload"], row["engines"]) == place]
        parallel = [row for row in own if row["plane"].startswith("parallel") and "inline" not in row["plane"]]
        for axis, key, label in zip(axes[:, column], ("busiest_mb", "busiest_cpu_s"), ("MB", "CPU s"), strict=True):
            sizes = [row["controllers"] for row in parallel]
            axis.plot(sizes, [row[key] for row in parallel], "o-", label="parallel")
            for row, style in zip((r for r in own if r["plane"] in ("classic", "metadata")), ("--", ":"), strict=True):
                axis.axhline(row[key], linestyle=style, color="black", label=row["plane"])
            axis.set(xscale="log", xlabel="controllers", ylabel=f"{label} of the busiest, per step")
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.minorticks_off()
        axes[0, column].set_yscale("log")
        axes[0, column].yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes[0, column].yaxis.set_minor_formatter(ticker.NullFormatter())
        axes[0, column].yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes[1, column].set_ylim(bottom=0)
        axes[0, column].set_title(f"{place[0]}, {place[1]} engines")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(PAGE.with_suffix(".png"), dpi=110)


# ---- memory limit ------------------------------------------------------------------------------------------------


def killed_at(plane: Plane) -> dict[str, Any]:
    """Twice the batch in every step, until a controller dies because its private memory has grown by KILL_MB."""
    from gcore.protocols import RoleDied
    from gcore.runtime.ray import RayRuntime

    logs = Path(tempfile.mkdtemp(prefix="gcore-controllers-"))
    runtime, survived, grown = RayRuntime(2048, logs=logs), 0, 0.0

    async def run() -> None:
        nonlocal survived, grown
        seats = await runtime.start_group("controller", Seat, [()] * plane.controllers)
        places = await start_hosts(runtime, replace(KILL, prompts=MOST_SAMPLES // KILL.siblings), SKEW_ENGINES)
        workload, limited = KILL, False
        while workload.samples <= MOST_SAMPLES:
            address = await seats[0].call("address")
            opened = (seat.call("open", plane, workload, places, rank, address) for rank, seat in enumerate(seats))
            await asyncio.gather(*opened)
            if not limited:  # after a first step, which imports and allocates
                await asyncio.gather(*(seat.call("step", 1, "plain") for seat in seats))
                await asyncio.gather(*(seat.call("limit_memory", KILL_MB) for seat in seats))
                limited = True
            reports = await asyncio.gather(*(seat.call("step", 2, "observe") for seat in seats))
            survived, grown = workload.samples, max(report.private_mb for report in reports)
            await asyncio.gather(*(seat.call("close") for seat in seats))
            workload = replace(workload, prompts=2 * workload.prompts)

    died = True
    try:
        asyncio.run(run())
        died = False
    except RoleDied as error:
        print(f"{plane.name}: {error.role} died after {survived} samples", file=sys.stderr, flush=True)
    finally:
        runtime.stop()
    shutil.rmtree(logs)
    dies = f"{2 * survived if survived else KILL.samples:,}" if died else f"not with {MOST_SAMPLES:,}"
    return {"plane": plane.name, "survived": survived, "dies": dies, "grown_mb": grown}


KILLS = {
    "control plane": "{plane}",
    "largest batch that survived, samples": "{survived:,}",
    "its growth, MB": "{grown_mb:.0f}",
    "dies with": "{dies}",
}


# ---- skew ------------------------------------------------------------------------------------------------------------


def kill_rows() -> list[dict[str, Any]]:
    planes = [Plane("classic"), Plane("metadata"), *(Plane("parallel", size) for size in KILL_SIZES)]
    return [killed_at(plane) for plane in planes]


def skewed_step(num_controllers: int, heavy: str, spill: bool) -> tuple[float, float]:
    """Emulated seconds of a step (mean of SKEW_STEPS), and the busiest controller's part of all bytes. In virtual
    time and in this process: only the engines take time."""
    from bench.virtual_loop import VirtualLoop

    workload = replace(SKEW, heavy=heavy, shares=num_controllers)
    plane = Plane("parallel", num_controllers, spill=spill)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        run = run_locally(plane, workload, SKEW_ENGINES, SKEW_STEPS - 1, "", step_s=0.01, virtual=True)
        steps = runner.run(run)["steps"]
    sizes = [r["bytes_in"] + r["bytes_out"] for r in steps[0]["reports"]]
    seconds = [max(r["wall_s"] for r in step["reports"]) for step in steps]
    return statistics.mean(seconds), max(sizes) / sum(sizes)


def skew_rows(sizes: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        balanced, _ = skewed_step(size, "spread", spill=True)
        found = {name: skewed_step(size, "one share", spill) for name, spill in (("spill", True), ("own", False))}
        rows.append({"controllers": size, "balanced_s": balanced, "busiest": found["spill"][1]})
        rows[-1] |= {f"{name}_s": seconds for name, (seconds, _) in found.items()}
        rows[-1] |= {f"{name}_x": seconds / balanced for name, (seconds, _) in found.items()}
    return rows


# ---- the experiment --------------------------------------------------------------------------------------------------


def planes_of(workload: Workload, sizes: Sequence[int]) -> list[Plane]:
    planes = [Plane("classic"), Plane("metadata"), *(Plane("parallel", n) for n in sizes)]
    return [*planes, Plane("parallel", 4, media=False)] if workload.images and 4 in sizes else planes


def main() -> None:
    args = parse()
    if args.kill:
        kills = kill_rows()
        print(table(KILLS, kills))
        return write_json(args.json, {"kills": kills})
    sizes = [2] if args.quick else [int(size) for size in args.sizes.split(",")]
    workloads = QUICK if args.quick else WORKLOADS
    jobs: list[Job] = [(w, args.engines, planes_of(w, sizes)) for w in workloads.values() if args.only in w.name]
    if args.only in REWARDS.name and not args.quick:
        jobs.append((MANY_REWARDS, MANY_ENGINES, planes_of(MANY_REWARDS, [n for n in sizes if n > 1])))
    saved = json.loads(args.rows.read_text()) if args.rows else {}
    rows = saved.get("rows") or run_all(jobs, 1 if args.quick else args.rounds, args.json)
    for place in dict.fromkeys((row["workload"], row["engines"]) for row in rows):
        own = [row for row in rows if (row["workload"], row["engines"]) == place]
        print(f"\n{place[0]}, {place[1]} engines: {own[0]['samples']} samples, {own[0]['payload_mb']:,.1f} MB")
        print(f"\n{table(BYTES, own)}\n\n{table(SECONDS, own)}", flush=True)
    if args.quick or args.only:
        return
    skew = saved.get("skew") or skew_rows(SKEW_SIZES)
    kills = saved.get("kills") or kill_rows()
    write_json(args.json, {"rows": rows, "skew": skew, "kills": kills})
    write_page(rows, skew, kills)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kill", action="store_true", help="only the batches at which a memory limit kills; no page")
    parser.add_argument("--quick", action="store_true", help="small workloads, under two minutes; writes no page")
    parser.add_argument("--only", default="", help="workloads whose name contains this; writes no page")
    parser.add_argument("--sizes", default="1,2,4,8,16", help="numbers of parallel controllers")
    parser.add_argument("--engines", type=int, default=64, help="emulated engines, and as many ranks")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps per row")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--rows", type=Path, help="write the page from such a file; what it has is not measured again")
    return parser.parse_args()


if __name__ == "__main__":
    main()
