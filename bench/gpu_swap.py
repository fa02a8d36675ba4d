"""Seconds to replace one engine by another on a GPU: sleep, wake and reload by size; and how often a run may do so.

    python bench/gpu_swap.py --json swap.json          # one H200 with vLLM: about five minutes
    python bench/gpu_swap.py --rehearse                # the embedded engine on a CPU, with a tiny model

Each size is measured in a process of its own with a time limit, with G-Core's engine over vLLM and random weights:

    host      sleep at level 1: the weights go to host memory; the wake brings them back. `first`: with the allocation
              of that memory. It is pinned if there is room for it (PyTorch rounds every block up to a power of 2, which
              may be twice the weights), else pageable
    disk      sleep at level 2 drops the weights; after the wake they are read from safetensors, which are not in the
              cache of the system (`cold`), and again (`warm`). Sizes above --disk-gb: computed from the rate of the
              largest one that was read, and marked ~
    start     a new process with weights made on the GPU: what no sleep saves

`GB/s`: of the weights, by the wake or the reload. The paper says 30 to 60 s for a swap of 32B models.

Then `gcore plan` (gcore/planner) answers for policy and judge of each size on --gpus H200: a step with co-location,
whose rollout swaps all engines, again for groups that the filter rejects, and with co-existence, whose engines keep
their GPUs. `kept`: share of the groups that the filter keeps. `swap`: a sleep and a wake from host memory, as measured.
`its swaps`: of a step with co-location. `break-even`: the swap with which both take the same (any: co-location is
faster whatever a swap takes; 0: never). `swaps a step`: how many of these swaps fit in before co-existence wins.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import random_model  # noqa: E402
from bench.common import SHAPES, choose_sizes, write_json  # noqa: E402
from bench.worker import finish, run_worker, save  # noqa: E402
from gcore.cost.costs import gpu_of, shape_of  # noqa: E402
from gcore.planner.inputs import Constraints, Workload  # noqa: E402
from gcore.planner.plan import plan  # noqa: E402
from gcore.planner.steps import Estimate  # noqa: E402

TURNS = 3
GB, GIB = 1e9, 2**30
PAPER = "the paper, 32B"
PAPER_S = (30.0, 60.0)
HEAD = ("size", "GB", "start s", "sleep s", "wake s", "GB/s", "first s", "disk sleep s", "cold s", "GB/s", "warm s")
MODES = ("colocated", "static")
ACCEPTANCE = (1.0, 0.5)  # share of the groups that the filter keeps: rejected ones are drawn again, with more swaps


# ---- one size, in a process of its own -------------------------------------------------------------------------------


def measure(args: argparse.Namespace, folder: Path, with_files: bool) -> None:
    """Saves every number as soon as it is known."""
    found: dict[str, Any] = {}

    async def run() -> None:
        began = time.perf_counter()
        weights = weight_bytes(args.size)
        fits = pinned_fits(weights)
        if not args.rehearse and not fits:
            without_pinned_memory()
        engine = make_engine(args, folder)
        found.update(start_s=time.perf_counter() - began, gb=weights / GB, pinned=fits or args.rehearse)
        save(found)
        for turn in range(TURNS):
            slept, woken = await engine.sleep(1), await engine.wake()
            first = {"first_sleep_s": slept.seconds, "first_wake_s": woken.seconds} if turn == 0 else {}
            for name, change in (("sleep_s", slept), ("wake_s", woken)):
                found[name] = min(found.get(name, change.seconds), change.seconds) if turn > 1 else change.seconds
            found.update(first, freed_gb=slept.gigabytes * GIB / GB)
            save(found)
        if not with_files:
            return
        for turn, name in enumerate(("cold_s", "warm_s")):
            if turn == 0:
                drop_from_cache(folder)
            slept = await engine.sleep(2)
            found["sleep2_s"] = slept.seconds
            started = time.perf_counter()
            await engine.wake("weights")
            parts = list(buckets(folder))
            for index, names in enumerate(parts):
                await engine.load_weights(turn + 1, read(folder, names), (index, len(parts)))
            await engine.wake("kv_cache")
            found[name] = time.perf_counter() - started
            save(found)

    asyncio.run(run())
    os._exit(0)  # the engine's thread would delay the end


def make_engine(args: argparse.Namespace, folder: Path) -> Any:
    from gcore.generation.engine_shell import SteppedEngine
    from gcore.generation.spec import LibraryOptions

    if args.rehearse:
        import torch
        from transformers import AutoModelForCausalLM

        from gcore.generation.embedded import EmbeddedBackend

        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return SteppedEngine(EmbeddedBackend(network, 8, 128))
    from gcore.generation.vllm import VllmBackend

    options = LibraryOptions(
        max_concurrent=64,
        max_length=1024,
        dtype="bfloat16",
        memory_fraction=args.fraction,
        eager=True,  # starts faster; graphs change neither sleep nor wake
        sleep=True,
        seeds=False,
        dummy=True,
    )
    return SteppedEngine(VllmBackend(folder, options))


def weight_bytes(size: str) -> float:
    """In bfloat16."""
    return 2.0 * SHAPES[size].parameters


def pinned_fits(weights: float) -> bool:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 2.0 * weights < 1024.0 * int(lines["MemAvailable"].split()[0])


def without_pinned_memory() -> None:
    """vLLM's engine runs in this process."""
    from vllm.device_allocator import cumem

    module: Any = cumem
    module.is_pin_memory_available = lambda: False


def drop_from_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def buckets(folder: Path) -> Iterator[list[str]]:
    """Names of tensors, about a GB at a time."""
    import torch

    from gcore.weights.bucket import bucket_names
    from gcore.weights.pretrained import WeightFiles

    empty = {name: torch.empty(shape, device="meta") for name, shape in WeightFiles(folder).shapes.items()}
    yield from bucket_names(empty, torch.bfloat16)


def read(folder: Path, names: Sequence[str]) -> Mapping[str, Any]:
    from gcore.weights.pretrained import WeightFiles

    files = WeightFiles(folder)
    return {name: files.read(name) for name in names}


# ---- the table of sizes ----------------------------------------------------------------------------------------------


def measure_all(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    print("  ".join(f"{name:>{width_of(name)}}" for name in HEAD), flush=True)
    for size in args.sizes:
        folder, with_files = work / f"model-{size}", args.rehearse or weight_bytes(size) <= args.disk_gb * GB
        arguments = [f"--size={size}", f"--model={folder}", f"--fraction={args.fraction}"]
        arguments += ["--rehearse"] if args.rehearse else []
        if with_files:
            made = run_worker(__file__, f"write {size}", arguments, work, args.limit)
            with_files = "error" not in made
        else:
            folder.mkdir(parents=True)
            random_model.write_config(size, folder)
        arguments += ["--with-files"] if with_files else []
        rows[size] = run_worker(__file__, f"measure {size}", arguments, work, args.limit)
        computed = {} if "cold_s" in rows[size] else from_rate(rows, size)
        print(
            "  ".join(
                f"{cell:>{width_of(name)}}" for name, cell in zip(HEAD, cells(size, rows[size] | computed), strict=True)
            )
        )
        notes = [] if rows[size].get("pinned", True) else ["in pageable host memory: pinned memory might not fit"]
        notes += [rows[size]["error"]] if "error" in rows[size] else []
        print(*(f"{'':>6}  {size}: {note}" for note in notes), sep="\n", end="\n" if notes else "", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def width_of(name: str) -> int:
    return max(6, len(name))


def from_rate(rows: Mapping[str, Any], size: str) -> dict[str, Any]:
    """Reading takes as long per byte as for the largest size that was read."""
    known = max((row for row in rows.values() if "cold_s" in row), key=lambda row: row["gb"], default=None)
    if known is None or "gb" not in rows[size]:
        return {}
    factor = rows[size]["gb"] / known["gb"]
    return {"computed": True, **{name: factor * known[name] for name in ("cold_s", "warm_s") if name in known}}


def cells(size: str, row: Mapping[str, Any]) -> list[str]:
    def number(value: float | None, mark: str = "") -> str:
        return "" if value is None else f"{mark}{value:.2f}"

    def rate(seconds: str) -> float | None:
        return row["gb"] / row[seconds] if row.get(seconds) and "gb" in row else None

    first = row["first_sleep_s"] + row["first_wake_s"] if "first_wake_s" in row else None
    mark = "~" if row.get("computed") else ""
    numbers = [row.get("gb"), row.get("start_s"), row.get("sleep_s"), row.get("wake_s"), rate("wake_s"), first]
    disk = [row.get("sleep2_s"), row.get("cold_s"), rate("cold_s"), row.get("warm_s")]
    return [size, *map(number, numbers), number(disk[0]), *(number(value, mark) for value in disk[1:])]


# ---- how often a run may swap ----------------------------------------------------------------------------------------


def step_of(size: str, gpus: int, workload: Workload, mode: Any, swap_s: float) -> Estimate | None:
    shape = shape_of(size)
    constraints = Constraints(modes=(mode,), swap_s=swap_s)
    return plan(shape, [shape], gpus, gpu_of("h200"), workload, constraints).of(mode)


def show_planned(args: argparse.Namespace, swaps: Mapping[str, float]) -> list[dict[str, Any]]:
    """`swaps`: seconds by size, as measured."""
    head = (
        "policy, judge",
        "kept",
        "swap s",
        "co-located s",
        "its swaps",
        "co-existing s",
        "break-even s",
        "swaps a step",
    )
    print(f"\n{args.gpus} H200, by the planner\n" + "  ".join(f"{name:>{width_of(name)}}" for name in head))
    rows = []
    named = [(size, size, swap_s) for size, swap_s in swaps.items()]
    named += [(PAPER, "32B", swap_s) for swap_s in PAPER_S]
    for name, size, swap_s in named:
        for acceptance in ACCEPTANCE:
            workload, used_s = replace(Workload(), acceptance=acceptance), max(swap_s, 0.01)
            found = [step_of(size, args.gpus, workload, mode, s) for mode in MODES for s in (0.0, used_s)]
            if any(each is None for each in found):
                print(f"{name:>{width_of(head[0])}}  does not fit")
                continue
            free_s, together_s, apart_free_s, apart_s = (each.step_s for each in found if each is not None)
            count, apart_count = (together_s - free_s) / used_s, (apart_s - apart_free_s) / used_s
            gain_s = apart_free_s - free_s  # of co-location, if swaps took no time
            limit_s = gain_s / (count - apart_count) if count - apart_count > 0.1 else math.inf if gain_s > 0 else 0.0
            row = {
                "swap_s": swap_s,
                "colocated_s": together_s,
                "swaps": count,
                "coexisting_s": apart_s,
                "break_even_s": max(0.0, limit_s),
                "swaps_a_step": max(0.0, apart_s - free_s) / used_s,
            }
            rows.append({"name": name, "acceptance": acceptance, **row})
            values = [name, f"{acceptance:.0%}", *("any" if v == math.inf else f"{v:.2f}" for v in row.values())]
            print(
                "  ".join(f"{value:>{width_of(title)}}" for title, value in zip(head, values, strict=True)), flush=True
            )
    return rows


def main() -> None:
    args = parse()
    if args.worker:
        job = args.worker.split()[0]
        if job == "write":
            args.model.mkdir(parents=True)
            return random_model.write(args.size, args.model)
        return measure(args, args.model, args.with_files)
    work = args.work or Path(tempfile.mkdtemp(prefix="gpu-swap-"))
    rows = measure_all(args, work)
    swaps = {size: row["sleep_s"] + row["wake_s"] for size, row in rows.items() if "wake_s" in row}
    if args.rehearse:  # the planner knows the tiny model only by another name
        swaps = {"1.5B": max(swaps.values(), default=0.0)}
    planned = show_planned(args, swaps)
    write_json(args.json, {"sizes": rows, "planned": planned})
    finish()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="the embedded engine on a CPU, with a tiny model")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=None, help="1.5B 7B 14B 32B")
    parser.add_argument("--disk-gb", type=float, default=16.0, help="largest weights that are written to the disk")
    parser.add_argument("--fraction", type=float, default=0.75, help="of the GPU, for weights and cache")
    parser.add_argument("--gpus", type=int, default=8, help="of the plan")
    parser.add_argument("--limit", type=float, default=120, help="seconds per process")
    parser.add_argument("--work", type=Path, help="folder of models and logs; by default a temporary one")
    parser.add_argument("--json", type=Path)
    for name in ("--worker", "--size"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--with-files", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    choose_sizes(args, args.rehearse, {"sizes": (["1.5B", "7B", "14B", "32B"], ["tiny"])})
    return args


if __name__ == "__main__":
    main()
