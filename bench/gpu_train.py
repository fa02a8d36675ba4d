"""Training alone on one GPU: tokens per second, share of the GPU's matrix rate, peak memory, and agreement of logprobs.

    python bench/gpu_train.py --model 1.5B                      # one H200: about three minutes
    python bench/gpu_train.py --model 7B --sequences 128 --micro-tokens 8192 --lengths fixed --only compiled \\
        --offload optimizer --updates 3 --no-checks
    python bench/gpu_train.py --model tiny --sequences 8        # a rehearsal on a CPU

The policy has random weights, the full vocabulary and the shape of a Qwen2, of a Qwen3, or of a Qwen3.5: of that,
three of four layers are linear attention, with the kernels of flash-linear-attention if they are installed. `fixed`:
all sequences have --prompt and --response tokens. `mix`: response lengths are log-normal, cut at --response. AdamW is
included; `optimizer s` is its part of the update. The first update of an off-loaded optimizer allocates host memory.
MFU: model FLOPs per second over the published dense bfloat16 rate of the GPU. Model FLOPs per token: 6 x parameters
(body and output layer) + 6 x layers with attention x width x length (causal); the recurrence of linear attention is not
counted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import SHAPES, mfu, model_config, trainer_config  # noqa: E402
from gcore.content.tokens import Tokens, tokens_of  # noqa: E402
from gcore.cost.workload import CostModel  # noqa: E402
from gcore.models.decoders import KINDS, traits_of  # noqa: E402
from gcore.observe.trace import Tracer  # noqa: E402
from gcore.preparation.balance import make_layout  # noqa: E402
from gcore.preparation.samples import metas_of  # noqa: E402
from gcore.protocols import Rendezvous  # noqa: E402
from gcore.runtime.gloo import join  # noqa: E402
from gcore.training.backend import NewNetwork  # noqa: E402
from gcore.training.fsdp import FsdpBackend, FsdpNetwork  # noqa: E402
from gcore.training.rank import TrainerRank  # noqa: E402
from gcore.training.state import TrainedName  # noqa: E402
from gcore.types import Sample, Topology, TrainBatch  # noqa: E402
from gcore.weights.pretrained import read_whole  # noqa: E402

VARIANTS = {  # training.compile, training.activation_checkpointing
    "eager, checkpointing": (False, True),
    "compiled, checkpointing": (True, True),
    "eager": (False, False),
    "compiled": (True, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="1.5B")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--micro-tokens", type=int, default=0, help="training.max_tokens_per_gpu; 0: one micro-batch")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--offload", choices=["none", "optimizer"], default="none", help="training.offload")
    parser.add_argument("--keep-gb", type=float, default=0.0, help="training.offload_keep_gb")
    parser.add_argument("--lengths", nargs="+", choices=["fixed", "mix"], default=["fixed", "mix"])
    parser.add_argument("--profile", action="store_true", help="and the kernels that take the most time")
    parser.add_argument("--no-checks", action="store_true", help="without the comparison with the library")
    parser.add_argument("--backend", choices=["fsdp", "megatron"], default="fsdp")
    parser.add_argument("--share", action="store_true", help="siblings share their prompt: training.share_prefixes")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    join(Rendezvous(0, 1, None), "nccl" if device.type == "cuda" else "gloo", device=device)
    rate = matrix_rate(device)
    about = f"{device_name(device) or 'CPU'}, torch {torch.__version__}, matrix rate {rate / 1e12:.0f} TFLOP/s"
    print(f"{args.model}, {args.sequences} sequences, {about}")
    widths = {
        "lengths": 8,
        "tokens/s": 10,
        "of matrix rate": 16,
        "MFU": 8,
        "peak GiB": 10,
        "first s": 9,
        "update s": 10,
        "optimizer s": 13,
    }
    print(f"{'training path':<26}" + "".join(f"{name:>{width}}" for name, width in widths.items()))
    for name, lengths in itertools.product(args.only, args.lengths):
        row = measure(args, name, lengths, device, rate)
        print(f"{name:<26}{lengths:>8}{row}", flush=True)
        gc.collect()  # the trainer of this row
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not args.no_checks and args.backend == "fsdp":
        agreement(args, device)
        skipped(args, device)


def matrix_rate(device: torch.device) -> float:
    """FLOP/s of a large matrix product in bfloat16, the best of a few."""
    n = 8192 if device.type == "cuda" else 256
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    best = 1e9
    for _ in range(10):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(5):
            a @ a
        synchronize(device)
        best = min(best, (time.perf_counter() - started) / 5)
    return 2 * n**3 / best


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def config_of(args: argparse.Namespace) -> Any:
    return model_config(args.model, max_position_embeddings=32_768, tie_word_embeddings=True)


def network_of(args: argparse.Namespace, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config_of(args), dtype=torch.float32, attn_implementation="sdpa").eval()


def flops_per_token(args: argparse.Namespace, length: float) -> float:
    """The embedding is also the output layer."""
    from transformers import AutoModelForCausalLM

    config, shape = config_of(args), SHAPES[args.model]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    attention = sum(bool(KINDS[kind].mask) for kind in traits_of(config).kinds)
    return 6.0 * parameters + 6.0 * attention * shape.heads * shape.head_dim * length


def samples_of(args: argparse.Namespace, lengths: str) -> list[Sample]:
    rng = np.random.default_rng(0)
    vocabulary, found = SHAPES[args.model].vocab, []
    for i in range(args.sequences):
        steps = args.response
        if lengths == "mix":
            steps = int(np.clip(rng.lognormal(np.log(args.response / 4), 0.8), 1, args.response))
        if i % 8 == 0:
            prompt = rng.integers(4, vocabulary, args.prompt).astype(np.int32)
        tokens = np.concatenate([prompt, rng.integers(4, vocabulary, steps).astype(np.int32)])
        numbers = rng.normal(size=steps).astype(np.float32)
        content = Tokens.split(tokens, steps)
        found.append(Sample(i // 8, i % 8, content, numbers < 9, -np.abs(numbers), reward=float(numbers[0])))
    return found


def trainer_of(args: argparse.Namespace, variant: str, device: torch.device) -> TrainerRank:
    compiles, checkpoints = VARIANTS[variant]
    options = {"offload": args.offload, "offload_keep_gb": args.keep_gb, "share_prefixes": args.share}
    config = trainer_config(lr=1e-6, compile=compiles, activation_checkpointing=checkpoints, **options)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    make = partial(network_of, args, device)
    backend: Callable[[], Any] = partial(FsdpBackend, config, {"policy": NewNetwork(make)}, device, dtype)
    if args.backend == "megatron":
        from gcore.training.megatron.backend import MegatronBackend

        networks: dict[TrainedName, NewNetwork] = {"policy": NewNetwork(make, open=lambda empty: read_whole(empty)[0])}
        backend = partial(MegatronBackend, config, networks, device, dtype, Topology(1))
    return TrainerRank(config, backend, rank=0, threads=2, tracer=Tracer(None, "trainer-0"))


def policy_of(trainer: TrainerRank) -> Any:
    policy = trainer.backend.networks["policy"]
    assert isinstance(policy, FsdpNetwork)
    return policy.model


def with_advantages(batch: TrainBatch, samples: list[Sample]) -> TrainBatch:
    return replace(batch, advantages={sample.key: sample.reward or 0.0 for sample in samples})


def measure(args: argparse.Namespace, variant: str, lengths: str, device: torch.device, rate: float) -> str:
    torch._dynamo.reset()
    samples = samples_of(args, lengths)
    total = sum(sample.content.size for sample in samples)
    budget = args.micro_tokens or 2 * args.sequences * (args.prompt + args.response)
    metas = metas_of(samples)
    cost = CostModel(6.0 * SHAPES[args.model].hidden)
    (batch,) = make_layout(metas, step=1, num_ranks=1, mini_batches=1, max_tokens=budget, cost=cost, shares=args.share)
    batch, trainer = with_advantages(batch, samples), trainer_of(args, variant, device)
    backend: Any = trainer.backend
    plain_step, step_s = backend.step, list[float]()

    def timed_step(*given: Any) -> float:
        synchronize(device)
        started = time.perf_counter()
        norm: float = plain_step(*given)
        synchronize(device)
        step_s.append(time.perf_counter() - started)
        return norm

    backend.step = timed_step

    async def update() -> float:
        await trainer.push(0, samples)
        synchronize(device)
        started = time.perf_counter()
        await trainer.update(batch)
        synchronize(device)
        return time.perf_counter() - started

    async def updates() -> list[float]:
        return [await update() for _ in range(args.updates)]

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = asyncio.run(updates())
    if args.profile:
        show_profile(lambda: asyncio.run(update()))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    best = min(seconds[1:])
    mean_length = sum(sample.content.size**2 for sample in samples) / total
    flops = total * flops_per_token(args, mean_length) / best
    shares = f"{flops / rate:>16.1%}{mfu(flops, device_name(device)):>8}"
    return f"{total / best:>10,.0f}{shares}{peak:>10.1f}{seconds[0]:>9.1f}{best:>10.3f}{min(step_s[1:]):>13.3f}"


def show_profile(update: Callable[[], object]) -> None:
    """The kernels that take the most time, and where the GPU waits for the host."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # a rank computes in its own
    with profile(activities=activities, experimental_config=every_thread) as found:
        update()
    by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=70))
    kernels = [e for e in found.events() or () if str(e.device_type).endswith("CUDA")]
    show_gaps([(e.time_range.start, e.time_range.end, e.name) for e in kernels])


def show_gaps(kernels: Sequence[tuple[float, float, str]], shown: int = 12) -> None:
    """`kernels`: start and end in microseconds, and name."""
    if not kernels:
        return
    gaps, ordered = list[tuple[float, str, str]](), sorted(kernels)
    first, (_, until, last) = ordered[0][0], ordered[0]
    for start, end, name in ordered[1:]:
        if start > until:
            gaps.append((start - until, last, name))
        if end > until:
            until, last = end, name
    total, waited = until - first, sum(gap for gap, *_ in gaps)
    print(
        f"{len(ordered)} kernels in {total / 1e3:.1f} ms; without a kernel {waited / 1e3:.1f} ms ({waited / total:.1%})"
    )
    for gap, before, after in sorted(gaps, reverse=True)[:shown]:
        print(f"{gap / 1e3:>9.2f} ms between {before[:48]} and {after[:48]}")


def agreement(args: argparse.Namespace, device: torch.device) -> None:
    """Logprobs and gradients of the trainer, and logprobs of the library in the same precision, against the library in
    float32, one sequence at a time."""
    from gcore.training.logprob_model import to_tensors

    samples = samples_of(args, "mix")[:8]
    by_key = {sample.key: sample for sample in samples}
    (batch,) = make_layout(
        metas_of(samples), step=1, num_ranks=1, mini_batches=1, max_tokens=1 << 20, cost=CostModel(1e4)
    )
    policy = policy_of(trainer_of(args, "compiled" if device.type == "cuda" else "eager", device))
    exact = network_of(args, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plain, ours, theirs = network_of(args, device).to(dtype), [], []
    for micro in batch.mini_batches[0].micro_batches:
        packed = to_tensors(micro, by_key, device, policy.varlen)
        found, _ = policy(packed)
        for i, key in enumerate(packed.keys):
            content = by_key[key].content
            tokens = torch.from_numpy(tokens_of(content).tokens_T.astype(np.int64)).to(device)
            first = len(tokens) - content.num_steps

            def logprobs(network: Any, tokens: Any = tokens, first: int = first) -> Any:
                logits = network(tokens[None]).logits[0, first - 1 : -1].float()
                return torch.log_softmax(logits, -1).gather(-1, tokens[first:, None])[:, 0]

            expected = logprobs(exact)
            (-expected.sum()).backward()
            ours.append((found[packed.sample_S == i] - expected).detach().abs())
            with torch.no_grad():
                theirs.append((logprobs(plain) - expected).abs())
        (-found.sum()).backward()
    pairs = zip(policy.network.parameters(), exact.parameters(), strict=True)
    products = torch.zeros(3, device=device, dtype=torch.float64)
    for mine, reference in pairs:
        a, b = (gradient.double().flatten() for gradient in (mine.grad.full_tensor(), reference.grad))
        products += torch.stack([a @ b, a @ a, b @ b])
    print(f"cosine of the gradients: {float(products[0] / (products[1] * products[2]).sqrt()):.5f}")
    for who, parts in (("packed, compiled", ours), ("one by one, eager", theirs)):
        every = torch.cat(parts)
        print(f"logprobs in {dtype}, {who}: off by {every.mean():.2e} in the mean, {every.max():.2e} at most")


def skipped(args: argparse.Namespace, device: torch.device) -> None:
    """An update with NaN gradients must change no weight, and the next one must train."""
    good = samples_of(args, "mix")[:8]
    (batch,) = make_layout(metas_of(good), step=1, num_ranks=1, mini_batches=1, max_tokens=1 << 20, cost=CostModel(1e4))
    trainer = trainer_of(args, "compiled" if device.type == "cuda" else "eager", device)

    def weights() -> list[Any]:
        return [parameter.full_tensor().detach().clone() for parameter in policy_of(trainer).network.parameters()]

    async def update(samples: list[Sample]) -> int:
        await trainer.push(0, samples)
        return (await trainer.update(with_advantages(batch, samples))).skipped

    before = weights()
    bad = asyncio.run(update([replace(s, reward=float("nan")) for s in good]))
    same = all(map(torch.equal, before, weights()))
    trained = asyncio.run(update(good)) == 0 and not all(map(torch.equal, before, weights()))
    print(f"NaN gradients: skipped {bad}, weights unchanged {same}; the next update trains {trained}")


if __name__ == "__main__":
    main()
