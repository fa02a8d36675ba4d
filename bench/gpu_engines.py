"""Engines on one GPU: overhead of G-Core's pool over vLLM, and seconds of weight updates, sleep and wake.

    python bench/gpu_engines.py [--sizes 0.5B 1.5B 7B] [--engine sglang] [--json FILE]
    python bench/gpu_engines.py --sizes tiny --count 4 --tokens 8 --bare-size         # a rehearsal on a CPU, with vLLM

All measurements use the real roles under Ray: an engine in its process, and weights in another process on the same GPU,
sent by weights/transfer.py. Models have random weights (Qwen2 shapes, bfloat16). `short`: 16 times the number of
concurrent requests, with responses of 4 to 20 tokens. On a CPU weights go through host memory, and nothing sleeps.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import random_model  # noqa: E402
from bench.common import write_json  # noqa: E402

PROMPT, TOKENS = 64, 512


class WeightHolder:
    """A trainer rank without training: publishes weights from the GPU, and computes reference logprobs."""

    def __init__(self, folder: str, _: Any) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from gcore.weights.publisher import WeightPublisher

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)
        with torch.device(self.device):
            config = AutoConfig.from_pretrained(folder)
            self.network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.publisher = WeightPublisher(0, "cuda_ipc" if self.device.type == "cuda" else "host_memory", torch.bfloat16)

    async def weight_plan(self) -> Any:
        return self.publisher.plan(dict(self.network.named_parameters()))

    async def weight_bucket(self, index: int, receivers: Any) -> Any:
        return self.publisher.bucket(dict(self.network.named_parameters()), index, receivers)

    async def logprobs(self, prompt: list[int], answer: list[int]) -> list[float]:
        import torch

        ids = torch.tensor([prompt + answer], device=self.device)
        with torch.no_grad():
            table = torch.log_softmax(self.network(ids).logits[0, len(prompt) - 1 : -1].float(), -1)
        return table.gather(-1, torch.tensor(answer, device=self.device)[:, None])[:, 0].tolist()

    async def size_gb(self) -> float:
        return sum(p.numel() * p.element_size() for p in self.network.parameters()) / 2**30


def make_engine(name: str, folder: str, options: dict[str, Any], _: Any) -> Any:
    """Runs in the process of the engine. `options`: of LibraryOptions."""
    from gcore.generation.engine_shell import SteppedEngine
    from gcore.generation.spec import LibraryOptions

    options = {"dtype": "bfloat16", "seeds": False, **options}
    if name == "sglang":
        import torch

        from gcore.generation.sglang import SglangBackend

        device = "cuda" if torch.cuda.is_available() else "cpu"
        return SteppedEngine(SglangBackend(Path(folder), LibraryOptions(**options, device=device)))
    from gcore.generation.vllm import VllmBackend

    return SteppedEngine(VllmBackend(Path(folder), LibraryOptions(**options, dummy=True)))


def prompts(count: int, salt: int = 0) -> list[list[int]]:
    """With another salt they are others: no prefix is in a cache."""
    import numpy as np

    return [np.random.default_rng([salt, i]).integers(10, 500, PROMPT).tolist() for i in range(count)]


def short_lengths(count: int) -> list[int]:
    """Maximum numbers of tokens of the workload `short`."""
    import numpy as np

    return np.random.default_rng(0).integers(4, 21, 16 * count).tolist()


async def serve(engines: Sequence[Any], asked: Sequence[list[int]], lengths: Sequence[int]) -> tuple[int, float]:
    """Tokens and seconds of requests with these prompts and lengths, sent as a controller sends groups of 8."""
    import numpy as np

    from gcore.content.tokens import Tokens
    from gcore.generation.pool import EnginePool
    from gcore.types import Request, SamplingParams

    pool = EnginePool(engines)
    requests = [
        Request(Tokens(np.array(prompt, np.int32)), SamplingParams(length), i)
        for i, (prompt, length) in enumerate(zip(asked, lengths, strict=True))
    ]
    started = time.perf_counter()
    found = await asyncio.gather(*(pool.generate(requests[i : i + 8]) for i in range(0, len(requests), 8)))
    seconds = time.perf_counter() - started
    return sum(completion.content.num_steps for group in found for completion in group), seconds


def bare_vllm(
    folder: str, count: int, length: int, fraction: float, eager: bool = False
) -> Callable[[Sequence[list[int]], Sequence[int]], tuple[int, float]]:
    """What `serve` does, by vLLM without G-Core."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=length,
        max_num_seqs=count, gpu_memory_utilization=fraction, max_logprobs=1, disable_log_stats=True, seed=0,
        logprobs_mode="processed_logprobs", enforce_eager=eager,
    )  # fmt: skip

    def generate(asked: Sequence[list[int]], lengths: Sequence[int]) -> tuple[int, float]:
        params = [
            SamplingParams(max_tokens=n, temperature=1.0, logprobs=0, detokenize=False, ignore_eos=True)
            for n in lengths
        ]
        started = time.perf_counter()
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return sum(len(answer.outputs[0].token_ids) for answer in found), seconds

    return generate


def bare_rates(folder: str, count: int, tokens: int, fraction: float) -> list[float]:
    """The same workloads with vLLM only, in a separate process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    generate = bare_vllm(folder, count, PROMPT + TOKENS, fraction)
    rates = []
    for lengths in ([tokens] * count, short_lengths(count)):
        runs = [generate(prompts(len(lengths), turn), lengths) for turn in range(3)]
        rates.append(max(made / seconds for made, seconds in runs))
    return rates


async def measure(name: str, folder: Path, count: int, tokens: int, fraction: float, gpu: bool) -> dict[str, float]:
    from gcore.clients import EngineClient, TrainerClient
    from gcore.content.tokens import Tokens, tokens_of
    from gcore.generation.pool import EnginePool
    from gcore.runtime.ray import RayRuntime
    from gcore.runtime.ray_cluster import ProcessPlace
    from gcore.types import Request, SamplingParams
    from gcore.weights.transfer import WeightTransfer

    runtime = RayRuntime(1024, (1,) * int(gpu), lambda kind, rank: ProcessPlace(bundles=(0,), gpus=0.45))
    try:
        started = time.perf_counter()
        options = {"max_concurrent": count, "max_length": PROMPT + TOKENS, "memory_fraction": fraction, "sleep": True}
        handles = await runtime.start_group("engine", make_engine, [(name, str(folder), options)])
        engines = [EngineClient(handle) for handle in handles]
        row: dict[str, float] = {"start_s": time.perf_counter() - started}
        holders = await runtime.start_group("holder", WeightHolder, [(str(folder),)])
        transfer = WeightTransfer([TrainerClient(holder) for holder in holders])
        row["weights_gb"] = await holders[0].call("size_gb")
        times = []
        for version in range(1, 5):
            started = time.perf_counter()
            await transfer.send({0: engines[0]}, version)
            times.append(time.perf_counter() - started)
        row["update_s"] = min(times[1:])
        for load, lengths in (("pool", [tokens] * count), ("pool_short", short_lengths(count))):
            rates = []
            for _ in range(3):
                version += 1
                await transfer.send({0: engines[0]}, version)  # clears the prefix cache
                made, seconds = await serve(engines, prompts(len(lengths)), lengths)
                rates.append(made / seconds)
            row[f"{load}_tok_s"] = max(rates)
        import numpy as np

        pool = EnginePool(engines)
        asked = [np.array(prompt, np.int32) for prompt in prompts(8)]
        requests = [Request(Tokens(prompt), SamplingParams(64), i) for i, prompt in enumerate(asked)]
        differences = []
        for prompt, completion in zip(asked, await pool.generate(requests), strict=True):
            reference = await holders[0].call(
                "logprobs", prompt.tolist(), tokens_of(completion.content).tokens_S.tolist()
            )
            differences.append(np.abs(np.array(reference) - completion.logprobs_S).mean())
        row["logprob_diff"] = float(np.mean(differences))
        for level in (1, 2):
            slept, woken = [], []
            for turn in range(3):
                slept.append(await engines[0].sleep(level))
                started = time.perf_counter()
                taken = [await engines[0].wake("weights")]
                await transfer.send({0: engines[0]}, 10 * level + turn)
                taken.append(await engines[0].wake("kv_cache"))
                woken.append((time.perf_counter() - started, *(answer.seconds for answer in taken)))
            row[f"sleep{level}_s"] = min(change.seconds for change in slept)
            row[f"sleep{level}_freed_gb"] = slept[-1].gigabytes
            row[f"wake{level}_and_update_first_s"] = woken[0][0]
            best = min(woken)
            names = (f"wake{level}_and_update_s", f"  wake{level}_weights_s", f"  wake{level}_cache_s")
            row |= dict(zip(names, best, strict=True))
        after = await pool.generate(requests)
        reference = await holders[0].call("logprobs", asked[0].tolist(), tokens_of(after[0].content).tokens_S.tolist())
        row["logprob_diff_after_sleep"] = float(np.abs(np.array(reference) - after[0].logprobs_S).mean())
        return row
    finally:
        runtime.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--sizes", nargs="+", default=["0.5B", "1.5B", "7B"])
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--fraction", type=float, default=0.45)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    parser.add_argument("--bare-size", nargs="*", default=["1.5B"], help="sizes to compare with vLLM alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.bare:
        print("RATES", *bare_rates(args.bare, args.count, args.tokens, args.fraction))
        return
    import torch

    gpu = torch.cuda.device_count() > 0
    rows: dict[str, dict[str, float]] = {}
    for size in args.sizes:
        folder = random_model.write_config(size, Path(tempfile.mkdtemp()))
        if args.engine == "sglang":
            random_model.write(size, folder)  # SGLang needs weights to load; they are replaced before the measurement
        rows[size] = asyncio.run(measure(args.engine, folder, args.count, args.tokens, args.fraction, gpu))
        if size in args.bare_size and args.engine == "vllm":
            command = [sys.executable, __file__, "--bare", str(folder), "--count", str(args.count)]
            command += ["--tokens", str(args.tokens), "--fraction", str(args.fraction)]
            done = subprocess.run(command, capture_output=True, text=True)
            found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RATES")]
            if found:
                rows[size] |= dict(zip(("bare_tok_s", "bare_short_tok_s"), map(float, found[0]), strict=True))
            else:
                print(done.stderr[-2000:])
        print(size, {k: round(v, 3) for k, v in rows[size].items()}, flush=True)
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    print(f"\n{'':26}" + "".join(f"{size:>12}" for size in rows))
    for name in names:
        print(f"{name:26}" + "".join(f"{row[name]:12.3f}" if name in row else " " * 12 for row in rows.values()))
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
