"""Seconds per GRPO step: G-Core against TRL's GRPOTrainer, on CPU.

    python bench/step.py --json step.json

Both train the same model (the quickstart's, or `--model 0.9M`) on the same kind of prompts, 8 prompts x 8 responses of
up to 64 tokens, in float32, with the same reward function, AdamW, learning rate and clipping. A step is generation,
reward, advantages, one optimizer step, and (G-Core, whose engines are other processes) the transfer of the new weights
to the engines. It is timed from the end of one step to the end of the next, including the work between steps. The first
steps are not counted. Runs alternate (A B C, A B C, ...), each in its own process.

Differences:
- TRL runs in one process with all cores and no RPC. G-Core runs as users run it: driver, controllers, engines and
  trainer in separate processes under Ray.
- G-Core's engine also returns the logprob of every sampled token and uses separate noise per sample; its trainer
  reports trainer/engine logprob differences. TRL with `generate` does neither.
- G-Core writes one row of metrics per step (JSON lines; TensorBoard is off here). TRL logs nothing here.
- `--ends model`: responses end by the end-of-sequence token, as in training: a random model over 16 tokens samples it
  after 16 tokens on average, and the longest of 64 responses is close to the limit. `--ends never`: all run to the
  limit. TRL: its end-of-sequence token is then one that the model cannot produce. G-Core: the workflow below passes no
  stop tokens. The number of generated tokens is shown.
- Variants of G-Core: `gcore ray`, the default; `gcore local`, all in one process.
- Variants of TRL: `trl`, one process with all cores, the default; `trl passive`, the same with OMP_WAIT_POLICY=passive
  (threads that spin while they wait are faster on an idle machine and much slower on a shared one; `gcore train`
  sets it for its processes); `trl ranks`, data-parallel with one process of one thread per core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import free_address, some_of, step_rows, write_json  # noqa: E402
from bench.trl_steps import grpo_config  # noqa: E402
from gcore.launch.machines import detect_machine  # noqa: E402

MODELS = {
    "quickstart": {"hidden_size": 128, "intermediate_size": 512, "layers": 2, "heads": 4, "kv_heads": 4},
    "0.9M": {"hidden_size": 128, "intermediate_size": 384, "layers": 4, "heads": 4, "kv_heads": 4},
}
SUMS = {"operations": ["+"], "min": 10, "max": 99, "eval_size": 0}  # all prompts are <bos>dd+dd=
PROMPT_LENGTH = 7
LR, BETAS = 1e-4, (0.9, 0.95)
SKIP = 3
CORES = detect_machine().cores
CONTENDERS = ("gcore ray", "gcore local", "trl", "trl passive", "trl ranks")


def build_of(args: argparse.Namespace) -> dict[str, Any]:
    return {**MODELS[args.model], "alphabet": "0123456789+=", "max_length": PROMPT_LENGTH + args.tokens}


async def full_length(ctx: Any, prompt: Any) -> list[Any]:
    """The default workflow, except that responses end only at the length limit."""
    scored: list[Any] = await ctx.reward(await ctx.generate(prompt, stop_tokens=()))
    return scored


def even_digits(prompts: Any, completions: Sequence[str], **_: Any) -> list[float]:
    """Fraction of even digits: a reward that differs within every group."""
    return [sum(c in "02468" for c in text) / max(len(text), 1) for text in completions]


# ---- one run, in this process: seconds of each stage and tokens generated, by step -----------------------------------


def run_gcore(runtime: str, args: argparse.Namespace) -> dict[str, Any]:
    from gcore.config.load import validate
    from gcore.config.tree import Config
    from gcore.driver.supervise import run

    here = str(Path(__file__).resolve())
    with tempfile.TemporaryDirectory() as folder:
        tree = {
            "run": {"name": "step", "dir": folder, "steps": args.steps},
            "model": {"build": build_of(args)},
            "data": {"train": {"task": "arithmetic", "args": SUMS}, "max_prompt_length": PROMPT_LENGTH},
            "runtime": "local" if runtime == "local" else "ray",
            "controllers": args.controllers,
            **({"workflow": f"{here}:full_length"} if args.ends == "never" else {}),
            "generation": {"max_response_length": args.tokens},
            "rewards": {"functions": [{"name": "even", "path": f"{here}:even_digits"}]},
            "sampling": {"prompts_per_step": args.prompts, "samples_per_prompt": args.siblings},
            "training": {"lr": LR, "betas": list(BETAS), "device": "cpu", "dtype": "float32"},
            "observe": {"progress": "none", "trackers": []},
        }
        run(validate(tree, "bench/step.py", Config))
        config_folder = Path(folder) / "step"
        rows = step_rows(config_folder)
        trace = json.loads((config_folder / "trace.json").read_text())["traceEvents"]
    first = next(e["pid"] for e in trace if e["name"] == "process_name" and e["args"]["name"] == "controller-0")
    spans = [e for e in trace if e["pid"] == first and e["name"] == "step" and e["ph"] == "X"]
    ends = sorted((e["ts"] + e["dur"]) / 1e6 for e in spans)
    stages = ("generation", "rewarding", "preparation", "training", "weights")
    steps = [
        {"step": end - start, "inside": row["timing_s/step"], **{s: row.get(f"timing_s/{s}", 0.0) for s in stages}}
        for start, end, row in zip(ends[:-1], ends[1:], rows[1:], strict=True)
    ]
    tokens = [round(row["response_length/mean"] * row["batch/samples"]) for row in rows[1:]]
    return {"steps": steps[SKIP - 1 :], "tokens": tokens[SKIP - 1 :]}


def run_trl(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    from gcore.config.base import BuildModel, Model
    from gcore.launch.build import quiet
    from gcore.models.networks import load_model
    from gcore.prompts.tasks import make_task
    from gcore.prompts.tokenizer import load_tokenizer

    quiet()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(CORES // world)
    model = Model(build=BuildModel(**build_of(args)))
    tokenizer = load_tokenizer(model)
    network = load_model(model, tokenizer, 0, torch.float32, torch.device("cpu"))
    if args.ends == "never":
        tokenizer.add_special_tokens({"eos_token": "<never>"})  # its id is outside the model's vocabulary
    network.config.eos_token_id = network.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.padding_side = "left"
    num_prompts = args.steps * args.prompts
    rows = make_task("arithmetic", SUMS)
    prompts = Dataset.from_list([{"prompt": f"<bos>{rows[i]['prompt']}"} for i in range(num_prompts)])
    clock: dict[str, float] = {}
    steps: list[dict[str, float]] = []
    counts: list[int] = []
    generated = 0

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                clock[name] = clock.get(name, 0.0) + time.perf_counter() - started

        return wrapped

    def reward(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        nonlocal generated
        generated = sum(map(len, completion_ids))
        return even_digits(None, completions)

    class Ends(TrainerCallback):
        last = 0.0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            if self.last:
                scoring = clock.get("scoring", 0.0)
                generation, rewarding = clock.get("generation", 0.0), clock.get("rewarding", 0.0)
                steps.append(
                    {
                        "step": now - self.last,
                        "generation": generation,
                        "rewarding": rewarding,
                        "preparation": scoring - generation - rewarding,
                        "training": now - self.last - scoring,
                    }
                )
                counts.append(generated)
            self.last = now
            clock.clear()

    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = GRPOTrainer(
            model=network,
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=prompts,
            args=grpo_config(
                folder,
                True,
                LR,
                BETAS,
                gradient_checkpointing=False,
                per_device_train_batch_size=args.prompts * args.siblings // world,
                num_generations=args.siblings,
                max_completion_length=args.tokens,
                max_steps=args.steps,
            ),
            callbacks=[Ends()],
        )
        trainer._generate = timed("generation", trainer._generate)
        trainer._calculate_rewards = timed("rewarding", trainer._calculate_rewards)
        trainer._generate_and_score_completions = timed("scoring", trainer._generate_and_score_completions)
        trainer.train()
    return {"steps": steps[SKIP - 1 :], "tokens": [count * world for count in counts[SKIP - 1 :]]}


# ---- the experiment --------------------------------------------------------------------------------------------------


def main() -> None:
    args = parse()
    if args.worker:
        kind, _, detail = args.worker.partition(" ")
        result = run_gcore(detail, args) if kind == "gcore" else run_trl(args)
        if os.environ.get("RANK", "0") == "0":
            write_json(args.json, result)
        return
    contenders = args.only
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for number in range(args.rounds):
        for name in contenders:
            print(f"round {number + 1}/{args.rounds}: {name}", file=sys.stderr, flush=True)
            runs[name].append(one_run(name, args))
    summary = {name: summarise(found) for name, found in runs.items()}
    show(summary, args)
    write_json(args.json, {"cores": CORES, "settings": vars(args), "summary": summary, "runs": runs})


def one_run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "OMP_WAIT_POLICY")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if name in ("trl passive", "gcore local"):  # `gcore train` sets it too, also for one process
        environment["OMP_WAIT_POLICY"] = "passive"
    environments = [environment]
    if name == "trl ranks":
        host, _, port = free_address().rpartition(":")
        environment |= {"WORLD_SIZE": str(CORES), "MASTER_ADDR": host, "MASTER_PORT": port}
        environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        environments = [{**environment, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(CORES)]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--worker", name, "--json", str(target)]
        for key in ("steps", "prompts", "siblings", "tokens", "controllers", "model", "ends"):
            command += [f"--{key}", str(getattr(args, key))]
        logs = [Path(folder) / f"{rank}.log" for rank in range(len(environments))]
        processes = []
        for variables, log in zip(environments, logs, strict=True):
            with log.open("w") as out:
                processes.append(subprocess.Popen(command, env=variables, stdout=out, stderr=subprocess.STDOUT))
        try:
            codes = [process.wait(timeout=1800) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit(f"{name} failed:\n" + "\n".join(log.read_text() for log in logs))
        result: dict[str, Any] = json.loads(target.read_text())
    return result


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [step for run in runs for step in run["steps"]]
    stages = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    return {
        "steps": len(steps),
        "tokens": statistics.mean(count for run in runs for count in run["tokens"]),
        "median_s": stages.pop("step"),
        "best_run_s": min(statistics.median(step["step"] for step in run["steps"]) for run in runs),
        "best_step_s": min(step["step"] for step in steps),
        "stages": stages,
    }


def show(summary: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    ends = "all of" if args.ends == "never" else "ending by eos, at most"
    print(f"{args.model} model, {args.prompts} prompts x {args.siblings} {ends} {args.tokens} tokens, {CORES} cores")
    stages = ("generation", "rewarding", "preparation", "training", "weights")
    head = f"{'':13}{'tokens':>7}{'median s':>9}{'best run':>9}{'best step':>10}  "
    head += "".join(f"{stage:>12}" for stage in stages)
    print(head + "\n" + "-" * len(head))
    for name, row in summary.items():
        print(
            f"{name:13}{row['tokens']:7.0f}{row['median_s']:9.3f}{row['best_run_s']:9.3f}{row['best_step_s']:10.3f}  "
            + "".join(f"{row['stages'].get(stage, 0.0):12.3f}" for stage in stages)
        )
    for ours in (name for name in summary if name.startswith("gcore")):
        ratios = (
            f"{n}: {row['median_s'] / summary[ours]['median_s']:.2f}" for n, row in summary.items() if n[:3] == "trl"
        )
        print(f"steps/s of {ours} over {', '.join(ratios)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15, help=f"steps per run; the first {SKIP} are not counted")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", choices=MODELS, default="quickstart")
    parser.add_argument("--ends", choices=("model", "never"), default="model")
    parser.add_argument("--controllers", type=int, default=2)
    parser.add_argument(
        "--only", type=some_of(CONTENDERS), default=list(CONTENDERS), help=f"some of: {','.join(CONTENDERS)}"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
