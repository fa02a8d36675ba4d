"""Memory on one GPU: what the trainer takes in each phase against what the planner says, and a 7B run beside vLLM.

    python bench/gpu_memory.py --json memory.json              # one H200: about 9 minutes
    python bench/gpu_memory.py --only 7B/optimizer,run
    python bench/gpu_memory.py --cpu                           # a rehearsal with a tiny model and vLLM's CPU build

Parts, each in a process of its own:
- SIZE/OFFLOAD[/plain]: one trainer rank alone, made and called as in a run, with training.offload=OFFLOAD and
  activation checkpointing (without it: /plain). Phases: start and first weight update; backward passes of micro-batches
  of 16,384 tokens; optimizer step; weight update; rollout (what stays on the GPU). GPU: bytes of tensors at the peak of
  the phase, as PyTorch counts them. Host: growth of the used memory of the machine since before the start, without the
  file cache. "plan": gcore/cost/training_memory.py, which counts no CUDA context and no fragmentation.
- run: `gcore train` of a 7B model with vLLM on the same GPU, training.offload=optimizer and checkpointing: seconds of
  two steps, and the peak of the whole GPU, as nvidia-smi reports it, against the plan's.

Weights are random and are made on the spot (bench/random_model.py): 15 GB on disk for 7B.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import random_model  # noqa: E402
from bench.common import choose_sizes, write_json  # noqa: E402
from bench.worker import finish, run_worker, save  # noqa: E402

PARTS = ("1.5B/none/plain", "1.5B/optimizer", "1.5B/all", "7B/optimizer", "7B/all", "run")
PHASES = ("start", "backward", "optimizer step", "weight update", "rollout")
GB = 1e9


class HostMemory:
    """The most memory that the machine had in use, since the last `take`, above that at the start."""

    def __init__(self) -> None:
        self._first = self._used()
        self._most = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def take(self) -> float:
        most, self._most = max(self._most, self._used() - self._first), 0.0
        return most

    def _watch(self) -> None:
        while True:
            self._most = max(self._most, self._used() - self._first)
            time.sleep(0.1)

    @staticmethod
    def _used() -> float:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (1024.0 * int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        return total - available


# ---- the trainer alone -----------------------------------------------------------------------------------------------


def config_of(part: str, args: argparse.Namespace) -> Any:
    from gcore.config.load import load_config

    _, offload, *plain = part.split("/")
    tree = {
        "run": {"name": "memory", "dir": str(args.folder.parent / "runs"), "steps": 10},
        "model": {"path": str(args.folder)},
        "data": {"train": {"task": "arithmetic"}, "max_prompt_length": args.tokens // 8},
        "runtime": "local",
        "generation": {"engine": "vllm", "max_response_length": args.tokens},
        "rewards": {"functions": [{"name": "exact", "path": "gcore.rewarding.rules:exact_answer"}]},
        "training": {
            "device": "cpu" if args.cpu else "cuda",
            "offload": offload,
            "activation_checkpointing": not plain,
            "max_tokens_per_gpu": args.micro_tokens,
        },
    }
    recipe = args.folder.parent / f"{part.replace('/', '-')}.yaml"
    recipe.write_text(json.dumps(tree))  # JSON is YAML
    return load_config(recipe)


def measure_trainer(part: str, args: argparse.Namespace) -> None:
    """Calls the trainer rank of a run as its controller does, twice."""
    host = HostMemory()
    import torch

    from gcore.launch.build import build_trainer
    from gcore.launch.machines import detect_machine
    from gcore.launch.plan import make_plan
    from gcore.protocols import Receivers, Rendezvous
    from gcore.weights import publisher

    config = config_of(part, args)
    plan = make_plan(config, detect_machine())
    found: dict[str, Any] = {"plan": predicted(config, plan), "gpu": {}, "host": {}, "seconds": {}}
    module: Any = publisher
    module.CudaHandle = UnsharedBlock  # no engine opens the blocks

    def done(phase: str, since: float) -> None:
        """Ends a phase. Of several times the same phase, the largest numbers count."""
        if not args.cpu:
            torch.cuda.synchronize()
        peak = 0 if args.cpu else torch.cuda.max_memory_allocated()
        for name, value in (("gpu", peak), ("host", host.take()), ("seconds", time.perf_counter() - since)):
            found[name][phase] = max(found[name].get(phase, 0.0), value)
        if not args.cpu:
            torch.cuda.reset_peak_memory_stats()
        save(found)

    def in_phase(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*values: Any) -> Any:
            since = time.perf_counter()
            try:
                return function(*values)
            finally:
                done(phase, since)

        return wrapped

    async def send() -> None:
        receivers = Receivers(("engine-0",), False)
        for index in range((await rank.weight_plan()).num_buckets):
            await rank.weight_bucket(index, receivers)

    async def steps() -> None:
        await rank.end_warm_start()
        await send()
        done("start", began)
        for step in (1, 2):
            samples, batch = batch_of(args, step)
            await rank.push(0, samples)
            await rank.update(batch)
            since = time.perf_counter()
            await send()
            done("weight update", since)
            found["gpu"]["rollout"] = 0 if args.cpu else torch.cuda.memory_allocated()
            found["gpu reserved"] = 0 if args.cpu else torch.cuda.memory_reserved()
            found["host"]["rollout"] = host.take()
            save(found)

    began = time.perf_counter()
    rank: Any = build_trainer(config, plan, Rendezvous(0, 1, None))
    rank._publisher = publisher.WeightPublisher(0, "cuda_ipc", torch.bfloat16)
    rank.backend.forward_backward = in_phase("backward", rank.backend.forward_backward)
    rank.backend.step = in_phase("optimizer step", rank.backend.step)
    asyncio.run(steps())


class UnsharedBlock:
    """Replaces weights.bucket.CudaHandle: the memory of an exported block that no process opens is never freed."""

    def __init__(self, block: Any) -> None:
        self._block = block


def batch_of(args: argparse.Namespace, step: int) -> tuple[list[Any], Any]:
    """Samples of the whole length, in at least two micro-batches."""
    from bench.gpu_train import samples_of, with_advantages
    from gcore.cost.workload import CostModel
    from gcore.preparation.balance import make_layout
    from gcore.preparation.samples import meta_of

    length = args.tokens + args.tokens // 8
    count = max(4, 3 * args.micro_tokens // length)
    options = argparse.Namespace(model=args.size, sequences=count, prompt=args.tokens // 8, response=args.tokens)
    samples = samples_of(options, "fixed")
    metas, cost = [meta_of(sample) for sample in samples], CostModel(1e4)
    (batch,) = make_layout(metas, step=step, num_ranks=1, mini_batches=1, max_tokens=args.micro_tokens, cost=cost)
    return samples, with_advantages(batch, samples)


def predicted(config: Any, plan: Any) -> dict[str, dict[str, float]]:
    """Bytes by phase: on the GPU and in host memory."""
    from gcore.cost.shapes import model_shape
    from gcore.cost.training_memory import training_memory
    from gcore.launch.gpu_memory import rank_of

    training = config.training
    rank = dataclasses.replace(
        rank_of(config, plan, model_shape(config.model, "model.path")),
        checkpointing=training.activation_checkpointing,
        offload=training.offload,
    )
    memory = training_memory(rank)
    return {
        "gpu": {phase: sum(parts.values()) for phase, parts in memory.gpu.items()},
        "host": {phase: sum(parts.values()) for phase, parts in memory.host.items()},
    }


# ---- a run -----------------------------------------------------------------------------------------------------------


def measure_run(args: argparse.Namespace) -> None:
    """Two steps of `gcore train`, with the workflow and the rewards of gpu_step.py."""
    from bench import gpu_step

    host = HostMemory()
    gpu = {"most": 0.0}
    threading.Thread(target=watch_gpu, args=(gpu,), daemon=True).start()
    sizes = {"prompts": 4, "siblings": 4} if args.cpu else {"prompts": 16, "siblings": 8}
    changes = [f"training.offload={'none' if args.cpu else 'optimizer'}", "training.activation_checkpointing=true"]
    # the host's memory is for the moments: no large object store, no copy for checkpoints
    changes += ["placement.object_store_mb=2048", "checkpoint.asynchronous=false"]
    options = argparse.Namespace(
        **sizes, cpu=args.cpu, mix=["fixed"], steps=1, tokens=args.tokens, prompt_length=args.tokens // 8
    )
    options.micro = max(1, args.micro_tokens // (options.tokens + options.prompt_length))
    options.set, options.folder = [*changes, *args.set], args.folder
    plan, host_peak = plan_of_run(options), 0.0

    def save_with_memory(result: Any) -> None:
        nonlocal host_peak
        host_peak = max(host_peak, host.take())
        save({**result, "gpu": gpu["most"], "host": host_peak, "plan": plan})

    gpu_step.run_gcore("gcore", options, save_with_memory)


def plan_of_run(options: argparse.Namespace) -> float:
    """The plan's peak of the whole GPU."""
    from bench import gpu_step
    from gcore.config.load import load_config
    from gcore.launch.gpu_memory import plan_memory
    from gcore.launch.machines import detect_machine
    from gcore.launch.plan import make_plan

    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "step.yaml"
        recipe.write_text(json.dumps(gpu_step.gcore_tree("gcore", options, Path(folder))))
        config = load_config(recipe, options.set)
        choice = plan_memory(config, make_plan(config, detect_machine())).choice
    return float("nan") if choice is None else choice.peak


def watch_gpu(found: dict[str, float]) -> None:
    """The most memory of the GPU in use. Stops at once where there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    while True:
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return
        found["most"] = max(found["most"], float(text.split()[0]) * 2**20)
        time.sleep(0.3)


# ---- the experiment --------------------------------------------------------------------------------------------------


def main() -> None:
    args = parse()
    if args.worker and args.worker.startswith("model"):
        return random_model.write(args.size, args.folder)
    if args.worker == "run":
        return measure_run(args)
    if args.worker:
        return measure_trainer(args.worker, args)
    work = args.work or Path(tempfile.mkdtemp(prefix="gpu-memory-"))
    record: dict[str, Any] = {"settings": vars(args), "parts": {}}
    for part in args.only:
        size = "tiny" if args.cpu else "7B" if part == "run" else part.split("/")[0]
        folder = work / f"model-{size}"
        arguments = [f"--folder={folder}", f"--size={size}", f"--tokens={args.tokens}"]
        arguments += [f"--micro-tokens={args.micro_tokens}", *(f"--set={change}" for change in args.set)]
        arguments += ["--cpu"] if args.cpu else []
        if not any(folder.glob("*.safetensors")):
            run_worker(__file__, f"model {size}", arguments, work, 300)
        record["parts"][part] = run_worker(__file__, part, arguments, work, args.limit)
        write_json(args.json, record)
        show(record)  # of the parts so far: a caller may have a time limit
        sys.stdout.flush()
    finish()


def show(record: dict[str, Any]) -> None:
    print(f"{'GB, measured / plan':<26}" + "".join(f"{phase:>18}" for phase in PHASES))
    for part, found in record["parts"].items():
        if part == "run":
            continue
        for kind in ("gpu", "host"):
            measured, plan = found.get(kind, {}), found.get("plan", {}).get(kind, {})
            cells = (f"{measured.get(p, float('nan')) / GB:.1f} / {plan.get(p, 0.0) / GB:.1f}" for p in PHASES)
            print(f"{part:<20}{kind:<6}" + "".join(f"{cell:>18}" for cell in cells))
        seconds = ", ".join(f"{phase} {value:.1f} s" for phase, value in found.get("seconds", {}).items())
        print(f"{'':<26}{seconds}" + (f"; {found['error']}" if "error" in found else ""))
    if (run := record["parts"].get("run")) is None:
        return
    for step in run.get("steps", ()):
        stages = ", ".join(f"{k} {step[k]:.1f}" for k in ("generation", "preparation", "training", "weights"))
        print(f"run: step of {step['step']:.1f} s ({stages}), logprobs differ by {step['logprob_diff']}")
    print(
        f"run: GPU {run.get('gpu', float('nan')) / GB:.1f} / {run.get('plan', float('nan')) / GB:.1f} GB, host "
        f"{run.get('host', float('nan')) / GB:.1f} GB, ready after {run.get('start_s', float('nan')):.0f} s"
        + (f"; {run['error']}" if "error" in run else "")
    )


def parse() -> argparse.Namespace:
    def parts(text: str) -> list[str]:
        for part in text.split(","):
            if part != "run" and part.split("/")[1:2] not in (["none"], ["optimizer"], ["all"]):
                raise argparse.ArgumentTypeError(f"{part}: expected run or SIZE/none|optimizer|all[/plain]")
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=parts, default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=None, help="per response; 512; 32 with --cpu")
    parser.add_argument("--micro-tokens", type=int, default=None, help="16384; 128 with --cpu")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for the run, as in `gcore train`")
    parser.add_argument("--limit", type=float, default=240, help="seconds per part")
    parser.add_argument("--work", type=Path, help="folder of logs and models; by default a temporary one")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--size", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    choose_sizes(args, args.cpu, {"tokens": (512, 32), "micro_tokens": (16384, 128)})
    return args


if __name__ == "__main__":
    main()
