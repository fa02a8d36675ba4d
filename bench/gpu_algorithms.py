"""PPO with a critic and GRPO side by side: SmolLM2 on two tasks of reasoning-gym that no recipe was tuned on.

    python bench/gpu_algorithms.py --model models/smollm2 --folder runs/gpu_algorithms        # one H200
    python bench/gpu_algorithms.py --model tiny --steps 2 --folder /tmp/gpu_algorithms         # a rehearsal on a CPU

--model: a Hugging Face folder (recipes/smollm2.yaml says how to get one; nothing is downloaded), or `tiny`: random
weights. Both algorithms have the same tasks, seeds, learning rate, prompts and samples per step; everything else is
their preset. Each run is a process of its own. Finished runs are read from the folder. Writes curves.json, and
curves.png: held-out accuracy over training steps, and over the seconds of the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
TASKS: dict[str, dict[str, Any]] = {
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 60},
    "letter_counting": {"min_words": 3, "max_words": 6},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"preset": "grpo", "mini_batches": 2}},
    "ppo": {"algorithm": {"preset": "ppo", "mini_batches": 2}, "critic": {"lr": 4e-5, "warmup_steps": 5}},
}
COLORS = {"grpo": "tab:blue", "ppo": "tab:orange"}


def recipe(args: argparse.Namespace, task: str, algorithm: str, seed: int) -> dict[str, Any]:
    tiny, every = args.model == "tiny", max(1, args.steps // 10)
    build = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "max_length": 512}
    model = {"build": {**build, "alphabet": string.printable}} if tiny else {"path": args.model}
    data = {"task": f"reasoning_gym/{task}", "size": 64 if tiny else 20_000, "args": TASKS[task]}
    held_out = {**data, "size": 16 if tiny else 500, "args": {**TASKS[task], "split": "eval"}}
    engine = {"engine": "embedded"} if tiny else {"engine": args.engine, "gpu_memory_utilization": 0.3}
    tree: dict[str, Any] = {
        "run": {"name": f"{task}-{algorithm}-{seed}", "dir": args.folder, "seed": seed, "steps": args.steps},
        "model": model,
        "data": {"train": data, "eval": held_out, "max_prompt_length": 400 if tiny else 256},
        "generation": {**engine, "max_response_length": 8 if tiny else 48, "max_concurrent": 512},
        "rewards": {"functions": [{"name": "correct", "path": "gcore.rewarding.rules:last_number"}]},
        "sampling": {"prompts_per_step": 4 if tiny else 128, "samples_per_prompt": 2 if tiny else 8},
        "training": {"lr": 2e-5, "warmup_steps": 5, "max_tokens_per_gpu": 65_536},
        "checkpoint": {"every": 0},
        "observe": {"eval_every": every, "progress": "plain"},
    }
    if tiny:
        tree |= {"runtime": "local", "controllers": 1, "placement": {"trainer": {"threads": 1}}}
        tree["data"]["system_prompt"] = None
    return {**tree, **ALGORITHMS[algorithm]}


def run(args: argparse.Namespace, task: str, algorithm: str, seed: int) -> dict[str, Any]:
    """{"curve": [[step, accuracy, seconds of steps so far], ...], "preparation": share of a step}"""
    tree = recipe(args, task, algorithm, seed)
    name, folder = tree["run"]["name"], Path(args.folder)
    about = folder / f"{name}.json"
    if about.exists():
        found: dict[str, Any] = json.loads(about.read_text())
        return found
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    subprocess.run([sys.executable, "-m", "gcore.cli", "train", str(path), "run.resume=auto"], check=True, cwd=ROOT)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    found = {"curve": curve_of(rows), "preparation": preparation_of(rows)}
    about.write_text(json.dumps(found))
    return found


def curve_of(rows: list[dict[str, Any]]) -> list[list[float]]:
    seconds, found = 0.0, dict[int, list[float]]()
    for row in rows:
        seconds += row.get("timing_s/step", 0.0)
        if "eval/accuracy" in row:
            found[row["step"]] = [row["step"], row["eval/accuracy"], seconds]
    return [found[step] for step in sorted(found)]


def preparation_of(rows: list[dict[str, Any]]) -> float:
    """Its share of a step, in the median of the steps after the first two, which also compile."""
    shares = [row["timing_s/preparation"] / row["timing_s/step"] for row in rows if "timing_s/preparation" in row]
    return statistics.median(shares[2:] or shares)


def draw(found: dict[str, dict[str, dict[int, Any]]], target: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(found), 2, sharey="row", squeeze=False)
    for (task, by_algorithm), row in zip(found.items(), axes, strict=True):
        for algorithm, by_seed in by_algorithm.items():
            for number, each in enumerate(by_seed.values()):
                steps, accuracies, seconds = zip(*each["curve"], strict=True)
                label = algorithm.upper() if not number else None
                for axis, over in zip(row, (steps, seconds), strict=True):
                    axis.plot(over, accuracies, color=COLORS[algorithm], linewidth=1.4, label=label)
        row[0].set(title=task, xlabel="training step", ylabel="held-out accuracy")
        row[1].set(title=task, xlabel="seconds of training steps")
        row[0].legend(fontsize=8)
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder, or `tiny`")
    parser.add_argument("--engine", choices=["vllm", "embedded"], default="vllm")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", default="runs/gpu_algorithms")
    args = parser.parse_args()
    args.folder = str(Path(args.folder).resolve())
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    if args.model != "tiny":
        args.model = str(Path(args.model).resolve())
        if not (Path(args.model) / "config.json").is_file():
            sys.exit(f"--model {args.model}: has no config.json; expected a Hugging Face folder, or `tiny`")
    found: dict[str, dict[str, dict[int, Any]]] = {}
    head = ("task", "algorithm", "seed", "before", "after", "best", "seconds per step", "preparation")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for task in args.tasks:
        for algorithm in args.algorithms:
            for seed in args.seeds:
                try:
                    each = run(args, task, algorithm, seed)
                except subprocess.CalledProcessError as error:  # the other runs are worth having
                    print(f"| {task} | {algorithm} | {seed} | exit code {error.returncode} | | | | |", flush=True)
                    continue
                found.setdefault(task, {}).setdefault(algorithm, {})[seed] = each
                steps, accuracies, seconds = zip(*each["curve"], strict=True)
                values = (accuracies[0], accuracies[-1], max(accuracies))
                shown = " | ".join(f"{value:.3f}" for value in values)
                took = f"{seconds[-1] / steps[-1]:.2f} | {each.get('preparation', float('nan')):.0%}"
                print(f"| {task} | {algorithm} | {seed} | {shown} | {took} |", flush=True)
    (Path(args.folder) / "curves.json").write_text(json.dumps(found))
    if found:
        draw(found, Path(args.folder) / "curves.png")


if __name__ == "__main__":
    main()
