"""Decoding on one GPU: tokens/s by number of sequences, and by number of engine processes that share the GPU.

    python bench/gpu_decode.py --json decode.json              # one H200: about 7 minutes
    python bench/gpu_decode.py --only vllm --engines 1,2 --sizes 256
    python bench/gpu_decode.py --cpu                           # a rehearsal with a tiny model and vLLM's CPU build,
                                                               # without what needs a GPU

Work: 32, 128, 256 or 512 requests at once, prompts of 64 tokens, responses of 512 tokens with the logprob of every
sampled token; a Qwen2 shape with random weights in bfloat16. Parts, each in a process of its own:
- vllm: G-Core's pool over its vLLM engines, each in a process under Ray. As many engines as the largest of --engines
  start; the pool then has 1, 2 or 4 of them, and the requests are divided among those. The others are idle.
- vllm-fp8: the same with `generation.precision: fp8`
- vllm-mps: the same under NVIDIA's Multi-Process Service, which this script starts and stops: kernels of several
  processes run at the same time instead of in turns.
- exact: requests with seeds, three times with the same engine: in runs of steps, in runs whose steps vLLM prepares, and
  step by step. Prints how many of 64 requests have the same tokens, and by how much their logprobs differ.
- llm: vLLM's own `LLM.generate`, as vLLM starts it, without G-Core
- sglang, sglang-eager: G-Core's SGLang engine with and without CUDA graphs, and its sleep and wake. Skipped if SGLang
  cannot be imported.

Printed: tokens/s, the best of --rounds; milliseconds per decoding step (whole time / tokens per response, prefill
included); and the floor of a step: the bytes of the weights over the bandwidth of the GPU, measured by a copy.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import random_model  # noqa: E402
from bench.common import choose_sizes, some_of, write_json  # noqa: E402
from bench.gpu_engines import PROMPT, bare_vllm, make_engine, prompts, serve  # noqa: E402
from bench.worker import add_arguments, finish, run_worker, save, started_at  # noqa: E402

PARTS = ("vllm", "vllm-fp8", "vllm-mps", "exact", "llm", "sglang", "sglang-eager")
MPS = "nvidia-cuda-mps-control"
MPS_S = 30  # limit of each command to its daemon


def asked(size: int, salt: int) -> list[list[int]]:
    """Prompts that occur only once: no prefix is in a cache."""
    return prompts(size, salt * 10_000 + size)


# ---- G-Core's engines ------------------------------------------------------------------------------------------------


async def measure_pool(part: str, args: argparse.Namespace) -> None:
    from gcore.clients import EngineClient
    from gcore.runtime.ray import RayRuntime
    from gcore.runtime.ray_cluster import ProcessPlace

    kind, _, how = part.partition("-")
    counts = args.engines if kind == "vllm" and how != "fp8" else [1]
    options = {"max_concurrent": max(args.sizes), "max_length": PROMPT + args.tokens, "eager": how == "eager"}
    options |= {"fp8": how == "fp8"}
    options |= {"memory_fraction": 0.85 / max(counts), "sleep": kind == "sglang"}
    share = round(0.95 / max(counts), 3)
    place = ProcessPlace() if args.cpu else ProcessPlace(bundles=(0,), gpus=share)
    runtime = RayRuntime(1024, () if args.cpu else (1,), lambda kind, rank: place)
    rows: list[dict[str, Any]] = []
    try:
        handles = await runtime.start_group("engine", make_engine, [(kind, str(args.folder), options)] * max(counts))
        engines = [EngineClient(handle) for handle in handles]
        found: dict[str, Any] = {"start_s": time.time() - started_at(), "rows": rows}
        for count in counts:
            await timed(engines[:count], min(args.sizes), args.tokens // 4, salt=999)  # kernels of first use
            for size in args.sizes:
                seconds = [await timed(engines[:count], size, args.tokens, salt=r) for r in range(args.rounds)]
                rows.append({"engines": count, "size": size, "seconds": min(seconds)})
                save(found)
        if kind == "sglang":
            found["sleep"] = await sleep_seconds(engines[0])
            save(found)
    finally:
        runtime.stop()


async def timed(engines: Sequence[Any], size: int, tokens: int, salt: int) -> float:
    """Seconds of `size` requests."""
    made, seconds = await serve(engines, asked(size, salt), [tokens] * size)
    assert made == size * tokens, f"{made} tokens, expected {size * tokens}"
    return seconds


async def sleep_seconds(engine: Any) -> dict[str, float]:
    """Level 1: the weights are kept, so nothing has to be sent."""
    slept = await engine.sleep(1)
    woken = await engine.wake()
    return {"sleep_s": slept.seconds, "freed_gb": slept.gigabytes, "wake_s": woken.seconds}


async def measure_exact(args: argparse.Namespace) -> None:
    """Requests that end at different times, by a stop token or by their limit."""
    from gcore.content.tokens import Tokens
    from gcore.generation import vllm_run
    from gcore.generation.engine_shell import SteppedEngine
    from gcore.generation.spec import LibraryOptions
    from gcore.generation.vllm import VllmBackend
    from gcore.types import Request, SamplingParams

    options = LibraryOptions(64, PROMPT + args.tokens, "bfloat16", memory_fraction=0.4, dummy=True, seeds=True)
    backend = VllmBackend(args.folder, options)
    engine = SteppedEngine(backend)
    assert backend._runs is not None, "vLLM has another model runner here"
    limits = [max(1, args.tokens // 5 + 3 * i) for i in range(64)]
    requests = [
        Request(Tokens(np.array(p, np.int32)), SamplingParams(min(limits[i], args.tokens), stop_tokens=(7, 9, 11)), i)
        for i, p in enumerate(prompts(64, 5))
    ]
    runs = await engine.generate(requests)
    vllm_run.RepeatedStep.of = classmethod(lambda *_: None)  # type: ignore[method-assign,assignment]
    prepared = await engine.generate(requests)
    vllm_run.PLANNED_STEPS = 1
    single = await engine.generate(requests)
    found = {}
    for name, other in (("prepared by vLLM", prepared), ("step by step", single)):
        pairs = [(a, b) for a, b in zip(runs, other, strict=True)]
        same = [(a, b) for a, b in pairs if a.content.digest() == b.content.digest()]
        most = max((float(abs(a.logprobs_S - b.logprobs_S).max()) for a, b in same), default=float("nan"))
        found[name] = f"{len(same)} of {len(pairs)} equal, logprobs differ by at most {most:.1e}"
    save({"start_s": time.time() - started_at(), "exact": found})


# ---- references ------------------------------------------------------------------------------------------------------


def measure_llm(args: argparse.Namespace) -> None:
    """The same requests without G-Core."""
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    generate = bare_vllm(str(args.folder), max(args.sizes), PROMPT + args.tokens, 0.4, eager=args.cpu)

    def seconds(size: int, tokens: int, salt: int) -> float:
        return generate(asked(size, salt), [tokens] * size)[1]

    found: dict[str, Any] = {"start_s": time.time() - started_at(), "rows": []}
    seconds(min(args.sizes), args.tokens // 4, 999)
    for size in args.sizes:
        best = min(seconds(size, args.tokens, r) for r in range(args.rounds))
        found["rows"].append({"engines": 1, "size": size, "seconds": best})
        save(found)


def measure_bandwidth(args: argparse.Namespace) -> None:
    """Bytes per second that a copy reads and writes; bytes of the weights in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.folder))
    weights = 2 * sum(p.numel() for p in network.parameters())
    device = torch.device("cpu" if args.cpu else "cuda")
    source = torch.empty(2**22 if args.cpu else 2**32, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), 1e9
    for _ in range(5):
        _synchronize(args)
        started = time.perf_counter()
        target.copy_(source)
        _synchronize(args)
        best = min(best, time.perf_counter() - started)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    save({"bandwidth": 2 * len(source) / best, "weights": weights, "device": name, "torch": torch.__version__})


def _synchronize(args: argparse.Namespace) -> None:
    import torch

    if not args.cpu:
        torch.cuda.synchronize()


# ---- MPS -------------------------------------------------------------------------------------------------------------


@contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """A daemon of the Multi-Process Service of our own. Yields the environment of its clients."""
    pipe, logs = folder / "mps-pipe", folder / "mps-log"
    for each in (pipe, logs):
        each.mkdir(parents=True, exist_ok=True)
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    environment = {**os.environ, **variables}
    subprocess.run([MPS, "-d"], env=environment, timeout=MPS_S, check=True)
    try:
        yield variables
    finally:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([MPS], input=b"quit\n", env=environment, timeout=MPS_S)
        with suppress(OSError, ValueError):  # the file is gone if the daemon has ended
            os.kill(int((pipe / f"{MPS}.pid").read_text()), signal.SIGKILL)


# ---- the experiment --------------------------------------------------------------------------------------------------


def main() -> None:
    args = parse()
    if args.worker == "bandwidth":
        return measure_bandwidth(args)
    if args.worker == "model":
        return random_model.write(args.model, args.folder)
    if args.worker == "llm":
        return measure_llm(args)
    if args.worker == "exact":
        return asyncio.run(measure_exact(args))
    if args.worker:
        return asyncio.run(measure_pool(args.worker, args))
    work = args.work or Path(tempfile.mkdtemp(prefix="gpu-decode-"))
    parts = [part for part in args.only if usable(part, args)]
    args.folder = args.folder or make_model(parts, work, args)
    arguments = [f"--folder={args.folder}", f"--tokens={args.tokens}", f"--rounds={args.rounds}"]
    arguments += [f"--sizes={_joined(args.sizes)}", f"--engines={_joined(args.engines)}", f"--model={args.model}"]
    arguments += ["--cpu"] if args.cpu else []
    record: dict[str, Any] = {"settings": vars(args), "parts": {}}
    record |= run_worker(__file__, "bandwidth", arguments, work, 120)
    for part in parts:
        service: AbstractContextManager[dict[str, str]] = mps(work) if part == "vllm-mps" else nullcontext({})
        with service as variables:
            record["parts"][part] = run_worker(__file__, part, arguments, work, args.limit, variables)
        write_json(args.json, record)
        show(record, args)  # of the parts so far: a caller may have a time limit
        sys.stdout.flush()
    finish()


def usable(part: str, args: argparse.Namespace) -> bool:
    if part == "vllm-mps" and (args.cpu or shutil.which(MPS) is None):
        print(f"{part}: skipped, {MPS} is not here", file=sys.stderr)
        return False
    if part in ("exact", "vllm-fp8") and args.cpu:
        print(f"{part}: skipped, it needs a GPU", file=sys.stderr)
        return False
    library = part.split("-")[0] if part not in ("llm", "exact") else "vllm"
    if importlib.util.find_spec(library) is None:
        print(f"{part}: skipped, {library} cannot be imported", file=sys.stderr)
        return False
    return True


def make_model(parts: Sequence[str], work: Path, args: argparse.Namespace) -> Path:
    """SGLang reads weights; the others make random ones themselves."""
    folder = work / f"model-{args.model}"
    if any(folder.glob("*.safetensors")):  # of another script
        return folder
    if any(part.startswith("sglang") for part in parts):
        run_worker(__file__, "model", [f"--folder={folder}", f"--model={args.model}"], work, 300)
        return folder
    return random_model.write_config(args.model, folder)


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def show(record: dict[str, Any], args: argparse.Namespace) -> None:
    floor = 1e3 * record.get("weights", float("nan")) / record.get("bandwidth", float("nan"))
    weights, bandwidth = record.get("weights", 0) / 1e9, record.get("bandwidth", 0) / 1e12
    print(
        f"{args.model}, responses of {args.tokens} tokens, {record.get('device')}, torch {record.get('torch')}; "
        f"weights of {weights:.1f} GB at {bandwidth:.2f} TB/s: {floor:.2f} ms per step"
    )
    head = f"{'':<24}" + "".join(f"{size:>10}" for size in args.sizes)
    for title, value in (
        ("tokens/s", lambda row: f"{row['size'] * args.tokens / row['seconds']:>10,.0f}"),
        ("ms per step", lambda row: f"{1e3 * row['seconds'] / args.tokens:>10.2f}"),
    ):
        print(f"\n{title + ', sequences:':<24}{head[24:]}")
        for part, found in record["parts"].items():
            rows = {(row["engines"], row["size"]): row for row in found.get("rows", ())}
            for count in dict.fromkeys(engines for engines, _ in rows):
                cells = (value(rows[count, s]) if (count, s) in rows else f"{'-':>10}" for s in args.sizes)
                print(f"{part + f', {count} process' + 'es' * (count > 1):<24}" + "".join(cells))
            if not rows and part != "exact":
                print(f"{part:<24}  {found.get('error', 'no result')}")
    print()
    for part, found in record["parts"].items():
        notes = [f"{key} {number:.2f}" for key, number in found.get("sleep", {}).items()]
        notes += [f"{key}: {text}" for key, text in found.get("exact", {}).items()]
        notes += [found["error"]] if "error" in found else []
        print(
            f"{part}: ready after {found.get('start_s', float('nan')):.0f} s" + "".join(f", {note}" for note in notes)
        )


def parse() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=some_of(PARTS), default=list(PARTS))
    parser.add_argument("--sizes", type=numbers, default=None, help="32,128,256,512; 4,8 with --cpu")
    parser.add_argument("--engines", type=numbers, default=None, help="1,2,4; 1,2 with --cpu")
    parser.add_argument("--tokens", type=int, default=None, help="512; 16 with --cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", default=None, help="0.5B, 1.5B (default), 7B or tiny")
    add_arguments(parser)
    args = parser.parse_args()
    sizes = {"sizes": ([32, 128, 256, 512], [4, 8]), "engines": ([1, 2, 4], [1, 2]), "tokens": (512, 16)}
    choose_sizes(args, args.cpu, {**sizes, "model": ("1.5B", "tiny")})
    return args


if __name__ == "__main__":
    main()
