"""Checkpoints of one trainer rank: how long a step waits for them, how fast they are written, what a fault costs.

    python bench/checkpoint.py --json checkpoint.json
    python bench/checkpoint.py --device cuda --model 1.5B --steps 8                    # 19 GB on disk
    python bench/checkpoint.py --device cuda --model 7B --steps 6 --rollout-s 3 --offload optimizer --discard

A step is an emulated rollout (`--rollout-s` of sleep, in which the trainer is idle), the passes before the update and
one update of a model with random weights. Three runs of the same steps, with a save after every `--every` steps:
- `no saves`
- `synchronous`: the step waits until the files are on disk (checkpoint.asynchronous=false)
- `asynchronous`: the next step begins at once; before anything changes the state, it waits for the copy

`stall s`: what a save adds to the step in which it is made and to those until the next, measured as the time in which
the caller waits (for the previous save, for the snapshot, and in the next step for the copy). `% of step`: of a step
without saves. `disk MB/s`: a file of the same size, written and flushed by one thread (`plain`); the checkpoint
(`written`: with checksums and read again, from the copy to the last byte on disk). `host MB`: memory of the copy,
planned (the bytes of the state, pinned memory in powers of two) and held. The gradients of all runs must be equal,
else the bench fails; on a GPU nearly equal, because its attention adds up gradients in any order.

With `--model` there is one run, because a large model takes long to make and to write: half of the steps without a
save, then one save in the background of the others, then a synchronous one. Its weights are made on the device. A save
ends after `--write-limit` seconds. `GB`: written until then; a `~` marks a stall that is computed from it, a `>` one
that has not ended. `host GB`: memory of the copy. `--discard` deletes each file once it is written and read again, for
a disk that is smaller than the checkpoint.

Rollback: the commits of the asynchronous run, at several intervals, and 10,000 faults at random times. A fault loses
the steps since the last commit. `formula`: every / 2 + write s / step s.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import math
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from bench.common import SHAPES, trainer_config, write_json  # noqa: E402
from gcore.checkpoint import writer  # noqa: E402
from gcore.config.tree import Config  # noqa: E402
from gcore.content.tokens import Tokens  # noqa: E402
from gcore.cost.workload import CostModel  # noqa: E402
from gcore.models.networks import make_empty  # noqa: E402
from gcore.observe.trace import Tracer  # noqa: E402
from gcore.preparation.balance import make_layout  # noqa: E402
from gcore.preparation.samples import meta_of  # noqa: E402
from gcore.prompts.tokenizer import load_tokenizer  # noqa: E402
from gcore.protocols import Rendezvous  # noqa: E402
from gcore.runtime.gloo import join  # noqa: E402
from gcore.training.backend import NewNetwork  # noqa: E402
from gcore.training.fsdp import FsdpBackend  # noqa: E402
from gcore.training.rank import TrainerRank  # noqa: E402
from gcore.types import FileEntry, Sample, TrainBatch, Written  # noqa: E402
from gcore.weights.pretrained import open_weights  # noqa: E402

FAULTS = 10_000
GPU_TOLERANCE = 0.02  # of the norms of gradients


def config_of(args: argparse.Namespace, asynchronous: bool) -> Config:
    build = {"hidden_size": args.hidden, "intermediate_size": args.intermediate, "layers": args.layers}
    build |= {"heads": args.heads, "kv_heads": args.heads, "max_length": 2 * args.tokens}
    return Config.model_validate(
        {
            "run": {"steps": args.steps},
            "model": {"build": build},
            "data": {"train": {"task": "arithmetic"}, "max_prompt_length": args.tokens},
            "generation": {"max_response_length": args.tokens},
            "rewards": {"functions": [{"name": "exact", "path": "gcore.rewarding.rules:exact_answer"}]},
            "algorithm": {"kl_coef": 0.05 if args.kl else 0.0},
            "training": {"lr": 1e-4, "offload": args.offload, "device": args.device, "compile": False},
            "checkpoint": {"asynchronous": asynchronous},
        }
    )


def trainer_of(config: Config, device: torch.device, threads: int) -> TrainerRank:
    tokenizer = load_tokenizer(config.model)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = partial(open_weights, model=config.model, seed=0, tokenizer=tokenizer)
    policy = NewNetwork(partial(make_empty, config.model, tokenizer), open=weights)
    backend = partial(FsdpBackend, config, {"policy": policy}, device, dtype)
    return TrainerRank(config, backend, 0, threads, Tracer(None, "trainer-0"))


def samples_of(step: int, args: argparse.Namespace) -> list[Sample]:
    rng = np.random.default_rng(step)
    found = []
    for prompt in range(args.samples):
        tokens = rng.integers(4, 16, args.tokens).astype(np.int32)
        content, n = Tokens.split(tokens, args.tokens // 2), args.tokens // 2
        logprobs = -rng.exponential(1, n).astype(np.float32)
        found.append(Sample(prompt, 0, content, np.ones(n, bool), logprobs, reward=float(rng.normal())))
    return found


class Runner:
    """The steps of one variant."""

    def __init__(self, args: argparse.Namespace, trainer: TrainerRank, folder: Path) -> None:
        self.args, self.trainer, self.folder = args, trainer, folder
        self.writing: asyncio.Task[Written] | None = None
        self.deleting: asyncio.Task[None] | None = None
        self.stalls: list[float] = []
        self.written: list[Written] = []
        self.commits: list[tuple[float, int]] = []  # time, step
        self.ends: list[float] = []  # of each step
        self.norms: list[float] = []
        self.num_parameters = self.host_bytes = 0

    async def step(self, number: int) -> None:
        await asyncio.sleep(self.args.rollout_s)
        samples = samples_of(number, self.args)
        layout = {"num_ranks": 1, "mini_batches": 1, "max_tokens": 16 * self.args.tokens, "cost": CostModel(1e4)}
        (batch,) = make_layout([meta_of(s) for s in samples], step=number, objective="policy", **layout)
        batch = dataclasses.replace(batch, advantages={s.key: s.reward or 0.0 for s in samples})
        await self.trainer.push(0, samples)
        await self.trainer.compute_logprobs(batch)
        self.norms.append((await self.trainer.update(batch)).grad_norm)
        self.ends.append(time.perf_counter())

    async def save(self, step: int, asynchronous: bool) -> None:
        started = time.perf_counter()
        await self.drain()
        await self.trainer.snapshot()
        self.writing = asyncio.create_task(self._write(step))
        if not asynchronous:
            await self.drain()
        self.stalls.append(time.perf_counter() - started)

    async def _write(self, step: int) -> Written:
        folder = self.folder / str(step)
        folder.mkdir(parents=True)
        written = await self.trainer.write(str(folder))
        self.commits.append((time.perf_counter(), step))
        return written

    async def drain(self) -> None:
        if self.writing is not None:
            written, self.writing = await self.writing, None
            assert not written.error, written.error
            for old in sorted(self.folder.iterdir(), key=lambda path: int(path.name))[:-1]:
                self.deleting = asyncio.create_task(asyncio.to_thread(shutil.rmtree, old, ignore_errors=True))
            self.written.append(written)

    async def run(self, every: int, asynchronous: bool) -> None:
        for number in range(1, self.args.steps + 1):
            await self.step(number)
            if every and number % every == 0:
                await self.save(number, asynchronous)
        await self.drain()
        self.num_parameters = (await self.trainer.info()).num_parameters
        self.host_bytes = self.trainer._writer.host_bytes

    @property
    def step_s(self) -> float:
        return statistics.median(np.diff(self.ends).tolist())

    @property
    def stall_s(self) -> float:
        """Of a save, with the waits of computation for its copy."""
        waits = [written.waited_s for written in self.written]
        return statistics.median(a + b for a, b in zip(self.stalls, waits, strict=True)) if self.stalls else 0.0


def disk_speed(folder: Path, num_bytes: int) -> float:
    """Bytes per second of a plain file, on disk; best of two."""
    block, best = os.urandom(2**24), 0.0
    for _ in range(2):
        started = time.perf_counter()
        with open(folder / "plain", "wb", buffering=0) as file:
            for _ in range(max(1, num_bytes // len(block))):
                file.write(block)
            os.fsync(file.fileno())
        best = max(best, max(num_bytes, len(block)) / (time.perf_counter() - started))
        (folder / "plain").unlink()
    return best


def lost_steps(runner: Runner) -> float:
    """Steps since the last commit, over faults at random times between the first commit and the last."""
    dice, (first, last) = random.Random(0), (runner.commits[0][0], runner.commits[-1][0])
    lost = []
    for _ in range(FAULTS):
        at = dice.uniform(first, last)
        saved = max(step for when, step in runner.commits if when <= at)
        done = sum(end <= at for end in runner.ends)
        begun = runner.ends[done - 1]
        current = (at - begun) / (runner.ends[done] - begun) if done < len(runner.ends) else 0.0
        lost.append(done + min(current, 1.0) - saved)
    return statistics.mean(lost)


async def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Prints every row as soon as it is measured."""
    folder = Path(args.folder) / "step"

    async def variant(every: int, asynchronous: bool) -> Runner:
        trainer = trainer_of(config_of(args, asynchronous), device, args.threads)
        await trainer.end_warm_start()
        shutil.rmtree(folder, ignore_errors=True)
        runner = Runner(args, trainer, folder)
        await runner.run(every, asynchronous)
        del trainer, runner.trainer  # two of them may not fit on a GPU
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return runner

    plain = await variant(0, True)
    print(f"{plain.num_parameters / 1e6:.1f}M parameters, step {plain.step_s:.3f} s without saves")
    print(f"\n{'':14}{'stall s':>9}{'% of step':>11}{'copy s':>9}{'write s':>9}{'disk MB/s':>11}", flush=True)
    result: dict[str, Any] = {"parameters": plain.num_parameters, "step_s": plain.step_s, "variants": {}}
    for name, asynchronous in (("synchronous", False), ("asynchronous", True)):
        runner = await variant(args.every, asynchronous)
        check_norms(plain.norms, runner.norms, device)
        num_bytes = sum(entry["bytes"] for entry in runner.written[-1].files.values())
        write_s = statistics.median(written.written_s for written in runner.written)
        row = result["variants"][name] = {
            "stall_s": runner.stall_s,
            "stall_share": runner.stall_s / plain.step_s,
            "copy_s": statistics.median(written.copied_s for written in runner.written),
            "write_s": write_s,
            "mb_s": num_bytes / write_s / 1e6,
        }
        print(
            f"{name:14}{row['stall_s']:9.3f}{100 * row['stall_share']:11.1f}{row['copy_s']:9.3f}{row['write_s']:9.3f}"
            f"{row['mb_s']:11.0f}",
            flush=True,
        )
    result |= {
        "checkpoint_bytes": num_bytes,
        "disk_mb_s": {"plain": disk_speed(Path(args.folder), num_bytes) / 1e6},
        "host_mb": {"held": runner.host_bytes / 1e6, "planned": num_bytes / 1e6},
        "rollback": {},
    }
    print(f"{'plain file':14}{'':38}{result['disk_mb_s']['plain']:11.0f}")
    print(f"\ncheckpoint {num_bytes / 1e6:.0f} MB", end="; ")
    print(f"host MB: planned {result['host_mb']['planned']:.0f}, held {result['host_mb']['held']:.0f}")
    print(f"\n{'save every':12}{'steps lost per fault':>22}{'formula':>9}", flush=True)
    going = runner
    for every in (every for every in args.intervals if args.steps >= 2 * every):
        runner = going if every == args.every else await variant(every, True)
        write_s = statistics.median(written.written_s for written in runner.written)
        lost, formula = lost_steps(runner), every / 2 + write_s / runner.step_s
        result["rollback"][every] = {"measured": lost, "formula": formula}
        print(f"{every:<12}{lost:22.2f}{formula:9.2f}", flush=True)
    return result


# ---- one run of a large model ----------------------------------------------------------------------------------------


class CountedWrites:
    """Counts the bytes of all files of checkpoints. `discard`: deletes each when it is complete."""

    def __init__(self, discard: bool) -> None:
        module: Any = writer
        self.num_bytes, self._real, self._discard = 0, module.write_file, discard
        module.write_file = self._write

    def _write(self, path: Path, contents: Iterable[Any]) -> FileEntry:
        entry: FileEntry = self._real(path, self._counted(contents))
        if self._discard:
            path.unlink()
        return entry

    def _counted(self, contents: Iterable[Any]) -> Iterator[Any]:
        for content in contents:
            yield content
            self.num_bytes += memoryview(content).nbytes


async def measure_large(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Prints every row as soon as it is measured."""
    folder, counted, began = Path(args.folder) / "large", CountedWrites(args.discard), time.perf_counter()
    trainer = large_trainer(args, device)
    await trainer.end_warm_start()
    num_parameters = (await trainer.info()).num_parameters
    made_s = time.perf_counter() - began
    print(f"{args.model}: {num_parameters / 1e6:.1f}M parameters, made in {made_s:.1f} s, offload={args.offload}")
    ends, plain = [time.perf_counter()], args.steps // 2

    async def steps(numbers: Iterable[int]) -> None:
        for number in numbers:
            await asyncio.sleep(args.rollout_s)
            samples, batch = large_batch(args, number)
            await trainer.push(0, samples)
            await trainer.update(batch)
            ends.append(time.perf_counter())

    await steps(range(1, plain + 1))
    step_s = statistics.median(np.diff(ends)[1:].tolist())
    result: dict[str, Any] = {"parameters": num_parameters, "step_s": step_s, "variants": {}}
    print(f"step {step_s:.3f} s without saves, of which rollout {args.rollout_s:.1f} s")
    started = time.perf_counter()
    await trainer.snapshot()
    await trainer.compute(lambda: None)  # waits for the copy
    result["first_copy_s"] = time.perf_counter() - started
    await trainer.abandon()
    print(f"first copy {result['first_copy_s']:.2f} s: it allocates the host memory, which later saves use again")
    widths = {"": -14, "stall s": 9, "% of step": 11, "copy s": 9, "write s": 9, "GB": 8, "of GB": 8, "GB/s": 7}
    head = "".join(f"{name:<14}" if width < 0 else f"{name:>{width}}" for name, width in widths.items())
    print(f"\n{head}{'host GB':>9}", flush=True)

    async def save(name: str, meanwhile: Iterable[int]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        counted.num_bytes, started = 0, time.perf_counter()
        total = await trainer.snapshot()
        called_s, own = time.perf_counter() - started, trainer._writer
        copied = own._copied
        assert copied is not None
        writing = asyncio.create_task(trainer.write(str(folder)))
        training = asyncio.create_task(steps(meanwhile))
        await asyncio.wait([writing], timeout=args.write_limit)
        seconds, num_bytes, complete = time.perf_counter() - started, counted.num_bytes, writing.done()
        if not complete:
            await trainer.abandon()
        await training
        written = await writing
        assert complete == (not written.error), written.error
        waited_s, copied_s = own._waited_s if name == "asynchronous" else 0.0, copied.result()
        stall_s = called_s + waited_s
        if name == "synchronous":
            stall_s = seconds if complete else seconds * total / max(num_bytes, 1)
        rate, mark = num_bytes / seconds / 1e9, "" if complete else "~" if name == "synchronous" else ">"
        result["variants"][name] = {
            "stall_s": stall_s,
            "stall_share": stall_s / step_s,
            "copy_s": copied_s,
            "write_s": seconds,
            "complete": complete,
            "gb": num_bytes / 1e9,
            "of_gb": total / 1e9,
            "gb_s": rate,
            "host_gb": own.host_bytes / 1e9,
        }
        print(
            f"{name:14}{mark + format(stall_s, '.3f'):>9}{100 * stall_s / step_s:11.1f}{copied_s:9.3f}{seconds:9.2f}"
            f"{num_bytes / 1e9:8.2f}{total / 1e9:8.2f}{rate:7.2f}{own.host_bytes / 1e9:9.1f}",
            flush=True,
        )
        shutil.rmtree(folder, ignore_errors=True)

    await save("asynchronous", range(plain + 1, args.steps + 1))
    trainer._writer = writer.BackgroundWriter(0, device, copies=False)
    await save("synchronous", ())
    plain_speed = disk_speed(Path(args.folder), min(2 * 10**9, 12 * num_parameters))
    print(f"a plain file of one thread: {plain_speed / 1e9:.2f} GB/s. All: {time.perf_counter() - began:.0f} s")
    return result | {"disk_gb_s": plain_speed / 1e9}


def large_trainer(args: argparse.Namespace, device: torch.device) -> TrainerRank:
    from bench import gpu_train

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = trainer_config(lr=1e-6, compile=False, activation_checkpointing=True, offload=args.offload)
    policy = NewNetwork(lambda: gpu_train.network_of(args, device))
    backend = partial(FsdpBackend, config, {"policy": policy}, device, dtype)
    return TrainerRank(config, backend, 0, args.threads, Tracer(None, "trainer-0"))


def large_batch(args: argparse.Namespace, step: int) -> tuple[list[Sample], TrainBatch]:
    from bench import gpu_train

    options = argparse.Namespace(model=args.model, sequences=args.samples, prompt=64, response=8 * args.tokens)
    samples = gpu_train.samples_of(options, "fixed")
    metas, cost = [meta_of(s) for s in samples], CostModel(1e4)
    (batch,) = make_layout(metas, step=step, num_ranks=1, mini_batches=1, max_tokens=16_384, cost=cost)
    return samples, gpu_train.with_advantages(batch, samples)


def check_norms(expected: list[float], found: list[float], device: torch.device) -> None:
    tolerance = GPU_TOLERANCE if device.type == "cuda" else 0.0
    same = all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(expected, found, strict=True))
    assert same, f"saves changed the gradients: {found}, without saves {expected}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=SHAPES, help="one run of a model of this size")
    parser.add_argument("--write-limit", type=float, default=30.0, help="with --model: seconds of a save")
    parser.add_argument("--discard", action="store_true", help="with --model: delete each file once it is written")
    for name, default in (("hidden", 512), ("intermediate", 2048), ("layers", 8), ("heads", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="per sample, half of them the prompt")
    parser.add_argument("--rollout-s", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--intervals", type=int, nargs="*", default=[1, 2, 4], help="of the rollback table")
    parser.add_argument("--kl", action="store_true", help="with a reference model")
    parser.add_argument("--offload", choices=("none", "optimizer", "all"), default="none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", default="runs/bench-checkpoint")
    parser.add_argument("--json")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(args.threads)
    join(Rendezvous(0, 1, None), "nccl" if device.type == "cuda" else "gloo", device=device)
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    try:
        found = asyncio.run((measure_large if args.model else measure)(args, device))
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)
    write_json(args.json, found)


if __name__ == "__main__":
    main()
