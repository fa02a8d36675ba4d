"""A whole GRPO step on one GPU: G-Core against TRL's GRPOTrainer, both with vLLM of the same version on the same GPU.

    python bench/gpu_step.py --json step.json                      # one H200: about 8 minutes
    python bench/gpu_step.py --only gcore --mix fixed --steps 3
    python bench/gpu_step.py --cpu                                 # a rehearsal with a tiny model and vLLM's CPU build

Work: a Qwen2 shape with random weights and the full vocabulary, 32 prompts of 64 tokens x 8 responses. `fixed`: every
response has 512 tokens. `tailed`: log-normal lengths, cut at 512. The length of every response is drawn in advance and
is its request's limit of tokens; the end-of-sequence token is ignored. So both systems generate and train the same
numbers of tokens for the same prompts in the same order. Rewards depend on prompt and sibling only. G-Core sets the
limits in its workflow (`scripted`). TRL has one limit for all requests of a batch; here the arguments of its call of
`LLM.generate` are changed, and nothing else.

Every system runs in a process of its own and starts once: all steps of one mix follow those of the other. The first
step of each mix is not counted (compilation, allocation). Step: from the end of one step to the end of the next.

Systems:
- gcore: `gcore train` as a user starts it (Ray; checkpointing and off-load are chosen by the memory of the GPU)
- gcore-local: the same in one process
- gcore-checkpointing: the first with activation checkpointing
- trl: GRPOTrainer with its defaults (gradient checkpointing, float32 weights with bfloat16 autocast, importance
  sampling correction, which needs another forward pass), fused AdamW, 32 x 8 sequences per step
- trl-sleep: `trl` with vLLM's sleep mode and its text, as a user would start it
- trl-fast: without checkpointing and without the correction, 16 x 16: less work per step than `trl`, more memory
In `trl` and `trl-fast`, vLLM makes no text (detokenize=False) and does not sleep: its memory fits beside the trainer's.

Columns: seconds; tokens/s of generation; model FLOPs of training per second over the rate of a large matrix product,
measured by the same command, and over the published rate of the GPU (MFU); seconds from the start of the process to the
start of the first step; mean difference of logprobs between engine and trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import choose_sizes, mfu, some_of, step_rows, write_json  # noqa: E402
from bench.trl_steps import TrlSteps, grpo_config  # noqa: E402
from bench.worker import TARGET, add_arguments, finish, run_worker, save, started_at  # noqa: E402

SYSTEMS = {
    "gcore": "Ray, as `gcore train`",
    "gcore-local": "runtime=local",
    "gcore-checkpointing": "Ray, training.activation_checkpointing=true",
    "trl": "TRL's defaults, 32 x 8 sequences",
    "trl-sleep": "TRL's defaults, 32 x 8 sequences, vLLM sleeps and makes text",
    "trl-fast": "TRL without checkpointing and without correction, 16 x 16 sequences",
}
MIXES = ("fixed", "tailed")
STAGES = ("generation", "preparation", "training", "weights")
LR, BETAS = 1e-6, (0.9, 0.95)
ALPHABET = "0123456789"  # of the prompts


# ---- the work: the same for both systems -----------------------------------------------------------------------------


def lengths_of(mix: str, prompt: int, args: argparse.Namespace) -> list[int]:
    """Tokens of each response of a prompt."""
    if mix == "fixed":
        return [args.tokens] * args.siblings
    drawn = np.random.default_rng([7, prompt]).lognormal(np.log(args.tokens / 4), 0.8, args.siblings)
    return [int(n) for n in np.clip(np.round(drawn), 1, args.tokens)]


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All prompts of a run, in order, each with the lengths of its responses."""
    rng, found = np.random.default_rng(3), list[dict[str, Any]]()
    for mix in args.mix:
        for _ in range((args.steps + 1) * args.prompts):
            text = "".join(rng.choice(list(ALPHABET), args.prompt_length - 1))  # and one token <bos>
            found.append({"prompt": text, "answer": "0", "lengths": lengths_of(mix, len(found), args)})
    return found


def mix_of(step: int, args: argparse.Namespace) -> tuple[str, bool]:
    """Of step 0, 1, ...: the mix, and whether it counts."""
    return args.mix[step // (args.steps + 1)], step % (args.steps + 1) > 0


def total_steps(args: argparse.Namespace) -> int:
    return len(args.mix) * (args.steps + 1)


async def scripted(ctx: Any, prompt: Any) -> list[Any]:
    """G-Core's workflow: responses with the lengths in the row of the dataset."""
    lengths = prompt.columns["lengths"]
    if len(set(lengths)) == 1:
        group = await ctx.generate(prompt, len(lengths), max_tokens=lengths[0], stop_tokens=())
    else:
        parts = await asyncio.gather(*(ctx.generate(prompt, 1, max_tokens=n, stop_tokens=()) for n in lengths))
        group = [rollout for part in parts for rollout in part]
    scored: list[Any] = await ctx.reward(group)
    return scored


def numbered(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Rewards that differ between siblings. The text of a random model has no meaning."""
    seen: Counter[str] = Counter()
    found = []
    for prompt in map(str, prompts):
        found.append(zlib.crc32(f"{prompt}/{seen[prompt]}".encode()) / 2**32)
        seen[prompt] += 1
    return found


# ---- G-Core ----------------------------------------------------------------------------------------------------------


Save = Callable[[dict[str, Any]], None]


def run_gcore(system: str, args: argparse.Namespace, save_step: Save = save) -> None:
    folder = Path(tempfile.mkdtemp(prefix=f"run-{system}-", dir=Path(os.environ[TARGET]).parent))  # its logs stay
    run_recipe(gcore_tree(system, args, folder), folder, args, save_step)


def run_recipe(tree: dict[str, Any], folder: Path, args: argparse.Namespace, save_step: Save) -> None:
    """`gcore train` until all steps are made."""
    from gcore.config.load import load_config
    from gcore.driver.supervise import run

    recipe = folder / "step.yaml"
    recipe.write_text(json.dumps(tree))  # JSON is YAML
    config = load_config(recipe, args.set)
    threading.Thread(target=watch_run, args=(config.run.folder, args, save_step), daemon=True).start()
    try:
        run(config)
    except KeyboardInterrupt:  # by watch_run: all steps are made
        if len(gcore_steps(config.run.folder, args)[1]) < total_steps(args):
            raise


def gcore_tree(system: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    here, data = Path(__file__).resolve(), folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(args)))
    longest = args.prompt_length + args.tokens
    training: dict[str, Any] = {"device": "cpu" if args.cpu else "cuda", "lr": LR, "betas": list(BETAS)}
    training["max_tokens_per_gpu"] = args.micro * longest
    if system == "gcore-checkpointing":
        training["activation_checkpointing"] = True
    return {
        # One step more than is made: a run that ends writes a checkpoint, which is not measured here.
        "run": {"name": "step", "dir": str(folder), "steps": total_steps(args) + 1},
        "model": {"path": str(args.folder)},
        "data": {"train": {"path": str(data)}, "shuffle": False, "max_prompt_length": args.prompt_length},
        "runtime": "local" if system == "gcore-local" else "ray",
        "controllers": 1,
        "workflow": f"{here}:scripted",
        "generation": {
            "engine": "vllm",
            "max_response_length": args.tokens,
            "max_concurrent": args.prompts * args.siblings,
        },
        "rewards": {"functions": [{"name": "numbered", "path": f"{here}:numbered"}]},
        "sampling": {"prompts_per_step": args.prompts, "samples_per_prompt": args.siblings},
        "training": training,
        "checkpoint": {"every": 0},
        "observe": {"progress": "plain", "trackers": [], "samples_per_step": 0},
        **({"placement": {"trainer": {"ranks": 1}, "policy": {"replicas": 1}}} if args.cpu else {}),
    }


def watch_run(folder: Path, args: argparse.Namespace, save_step: Save) -> None:
    """Saves every step as soon as it is made; then ends the run, also if something here fails."""
    known = 0
    try:
        while known < total_steps(args):
            time.sleep(0.2)
            start_s, steps = gcore_steps(folder, args)
            if len(steps) > known:
                known = len(steps)
                save_step({"start_s": start_s, "steps": steps})
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def gcore_steps(folder: Path, args: argparse.Namespace) -> tuple[float, list[dict[str, Any]]]:
    """Seconds until the first step, and the steps that are complete, from the files of the run."""
    from gcore.observe.files import whole_lines

    rows = step_rows(folder)
    events: list[Any] = [event for _, event in whole_lines(folder / "trace" / "controller-0.jsonl")]
    spans = sorted((e["start"] / 1e6, e["end"] / 1e6) for e in events if e.get("name") == "step" and "end" in e)
    steps = []
    for number, ((start, end), row) in enumerate(zip(spans, rows, strict=False)):
        mix, counted = mix_of(number, args) if number < total_steps(args) else (args.mix[-1], False)
        steps.append(
            {
                "mix": mix,
                "counted": counted,
                "step": end - (spans[number - 1][1] if number else start),
                **{stage: row.get(f"timing_s/{stage}", 0.0) for stage in STAGES},
                "rollout": row.get("timing_s/rollout", 0.0),
                "tokens": round(row["response_length/mean"] * row["batch/samples"]),
                "logprob_diff": row.get("rollout/logprob_diff_mean"),
            }
        )
    return (spans[0][0] - started_at() if spans else float("nan")), steps[: total_steps(args)]


# ---- TRL -------------------------------------------------------------------------------------------------------------


def run_trl(system: str, args: argparse.Namespace) -> None:
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    without_fingerprints()
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    rows, fast, sleeps = rows_of(args), system == "trl-fast", system == "trl-sleep"
    micro = args.micro // 2 if fast else args.micro  # without checkpointing, 32 sequences would fill the GPU
    tokenizer = AutoTokenizer.from_pretrained(str(args.folder), padding_side="left")
    tokens = 0

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        nonlocal tokens
        tokens = sum(map(len, completion_ids))
        return numbered(prompts, completions)

    def about(number: int) -> dict[str, Any]:
        mix, counted = mix_of(number, args)
        differences = trainer._metrics["train"].get("sampling/sampling_logp_difference/mean")
        difference = differences[-1] if differences else None
        return {"mix": mix, "counted": counted, "tokens": tokens, "logprob_diff": difference}

    steps = TrlSteps(args.cpu, about)
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = GRPOTrainer(
            model=str(args.folder),
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=Dataset.from_list([{"prompt": f"<bos>{row['prompt']}"} for row in rows]),
            args=grpo_config(
                folder,
                args.cpu,
                LR,
                BETAS,
                gradient_checkpointing=not fast,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=args.prompts * args.siblings // micro,
                num_generations=args.siblings,
                max_completion_length=args.tokens,
                shuffle_dataset=False,
                use_vllm=True,
                vllm_mode="colocate",
                vllm_gpu_memory_utilization=0.2,
                vllm_max_model_length=args.prompt_length + args.tokens,
                vllm_enable_sleep_mode=sleeps,
                vllm_importance_sampling_correction=not fast,
                generation_kwargs={"ignore_eos": True, "detokenize": sleeps},
                max_steps=total_steps(args),
            ),
            callbacks=[steps.callback()],
        )
        vllm: Any = trainer.vllm_generation
        by_prompt = {tuple(tokenizer(f"<bos>{row['prompt']}")["input_ids"]): row["lengths"] for row in rows}
        vllm.llm.generate = with_lengths(vllm.llm.generate, by_prompt)
        if args.cpu:  # vLLM's CPU build packs weights: they cannot be written in place
            vllm.sync_weights = lambda: None
        steps.watch(trainer)
        trainer.train()


def with_lengths(generate: Callable[..., Any], by_prompt: dict[tuple[int, ...], list[int]]) -> Callable[..., Any]:
    """vLLM's `LLM.generate` with one limit of tokens per request: that of its prompt and sibling."""

    def scripted_generate(prompts: list[dict[str, Any]], sampling_params: Any, **rest: Any) -> Any:
        seen: Counter[tuple[int, ...]] = Counter()
        found = []
        for prompt in prompts:
            key = tuple(prompt["prompt_token_ids"])
            params = sampling_params.clone()
            params.max_tokens = by_prompt[key][seen[key]]
            seen[key] += 1
            found.append(params)
        return generate(prompts, sampling_params=found, **rest)

    return scripted_generate


def without_fingerprints() -> None:
    """Some versions of `datasets` and dill cannot hash a dataset. Nothing here uses the cache that the hash is for."""
    import secrets

    import datasets.arrow_dataset
    import datasets.fingerprint

    def random_name(*_: Any, **__: Any) -> str:
        return secrets.token_hex(8)

    datasets.fingerprint.Hasher.hash = random_name
    datasets.fingerprint.generate_fingerprint = random_name
    datasets.arrow_dataset.generate_fingerprint = random_name


# ---- the experiment --------------------------------------------------------------------------------------------------


def measure_rate() -> None:
    import torch

    from bench.gpu_train import matrix_rate

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    save({"rate": matrix_rate(device), "device": name, "torch": torch.__version__})


def main() -> None:
    args = parse()
    if args.worker == "rate":
        return measure_rate()
    if args.worker == "model":
        from bench import random_model

        return random_model.write(args.model, args.folder)
    if args.worker:
        return run_gcore(args.worker, args) if args.worker.startswith("gcore") else run_trl(args.worker, args)
    work = args.work or Path(tempfile.mkdtemp(prefix="gpu-step-"))
    args.folder = args.folder or work / f"model-{args.model}"
    arguments = worker_arguments(args)
    if not (args.folder / "model.safetensors").exists() and not (args.folder / "model.safetensors.index.json").exists():
        run_worker(__file__, "model", arguments, work, 300)
    record: dict[str, Any] = {"settings": vars(args), "systems": {}}
    record |= run_worker(__file__, "rate", arguments, work, 120)
    warm = (Path.home() / ".cache" / "vllm" / "torch_compile_cache").exists()
    for system in args.only:
        found = run_worker(__file__, system, arguments, work, args.limit)
        record["systems"][system] = {"about": SYSTEMS[system], "warm_caches": warm, **found}
        warm = True
        write_json(args.json, record)
        show(record, args)  # of the systems so far: a caller may have a time limit
        sys.stdout.flush()
    finish()


def worker_arguments(args: argparse.Namespace) -> list[str]:
    found = [f"--{name}={getattr(args, name)}" for name in ("model", "steps", "prompts", "siblings", "tokens", "micro")]
    found += [f"--prompt-length={args.prompt_length}", f"--mix={','.join(args.mix)}", f"--folder={args.folder}"]
    return [*found, *(["--cpu"] if args.cpu else []), *(f"--set={override}" for override in args.set)]


def training_flops(mix: str, step: int, args: argparse.Namespace) -> float:
    """Model FLOPs of training on the samples of a step."""
    from bench.gpu_train import flops_per_token

    first = step * args.prompts
    sizes = [
        args.prompt_length + n for prompt in range(first, first + args.prompts) for n in lengths_of(mix, prompt, args)
    ]
    mean = sum(size * size for size in sizes) / sum(sizes)
    return sum(sizes) * flops_per_token(args, mean)


def show(record: dict[str, Any], args: argparse.Namespace) -> None:
    rate = record.get("rate", float("nan"))
    print(
        f"{args.model}, {args.prompts} prompts x {args.siblings} x {args.tokens} tokens, {record.get('device')}, torch "
        f"{record.get('torch')}, matrix rate {rate / 1e12:.0f} TFLOP/s"
    )
    head = f"{'':<22}{'mix':<8}{'s/step':>8}{'best':>7}" + "".join(f"{stage:>12}" for stage in STAGES)
    head += f"{'tokens':>9}{'decode/s':>10}{'of rate':>9}{'MFU':>8}{'start s':>9}{'logprobs':>10}"
    print(head + "\n" + "-" * len(head))
    medians: dict[tuple[str, str], float] = {}
    for system, found in record["systems"].items():
        for mix in args.mix:
            numbered_steps = [(i, s) for i, s in enumerate(found.get("steps", ())) if s["counted"] and s["mix"] == mix]
            if not numbered_steps:
                print(f"{system:<22}{mix:<8}  no step: {found.get('error', 'unknown')}")
                continue
            steps = [step for _, step in numbered_steps]

            def middle(name: str, steps: list[dict[str, Any]] = steps) -> float:
                return statistics.median(step[name] for step in steps)

            flops = statistics.median(training_flops(mix, i, args) / step["training"] for i, step in numbered_steps)
            differences = [step["logprob_diff"] for step in steps if step["logprob_diff"] is not None]
            medians[system, mix] = middle("step")
            decode = statistics.median(step["tokens"] / step["generation"] for step in steps)
            print(
                f"{system:<22}{mix:<8}{middle('step'):>8.2f}{min(step['step'] for step in steps):>7.2f}"
                + "".join(f"{middle(stage):>12.2f}" for stage in STAGES)
                + f"{middle('tokens'):>9.0f}{decode:>10,.0f}{flops / rate:>9.1%}"
                + f"{mfu(flops, str(record.get('device'))):>8}{found['start_s']:>9.0f}"
                + (f"{statistics.fmean(differences):>10.4f}" if differences else f"{'-':>10}")
                + (f"  {found['error']}" if "error" in found else "")
            )
    for (ours, mix), seconds in medians.items():
        ratios = [f"{name} {m / seconds:.2f}" for (name, x), m in medians.items() if x == mix and name[:3] == "trl"]
        if ours.startswith("gcore") and ratios:
            print(f"steps/s of {ours} over {', '.join(ratios)} ({mix})")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=some_of(SYSTEMS), default=["gcore", "trl", "trl-fast"])
    parser.add_argument("--mix", type=some_of(MIXES), default=list(MIXES))
    parser.add_argument("--steps", type=int, default=3, help="counted steps per mix")
    parser.add_argument("--model", default=None, help="0.5B, 1.5B (default), 7B or tiny")
    parser.add_argument("--prompts", type=int, default=None, help="32; 4 with --cpu")
    parser.add_argument("--siblings", type=int, default=None, help="8; 4 with --cpu")
    parser.add_argument("--tokens", type=int, default=None, help="512; 24 with --cpu")
    parser.add_argument("--prompt-length", type=int, default=None, help="64; 16 with --cpu")
    parser.add_argument("--micro", type=int, default=None, help="sequences per micro-batch; 32; 8 with --cpu")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for gcore, as in `gcore train`")
    add_arguments(parser)
    args = parser.parse_args()
    sizes = {"model": ("1.5B", "tiny"), "prompts": (32, 4), "siblings": (8, 4), "tokens": (512, 24)}
    sizes |= {"prompt_length": (64, 16), "micro": (32, 8)}
    choose_sizes(args, args.cpu, sizes)
    return args


if __name__ == "__main__":
    main()
