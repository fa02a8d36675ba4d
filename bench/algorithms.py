"""Does every algorithm of the table (gcore/config/presets.py) learn? The task of recipes/quickstart.yaml, on a CPU.

    python bench/algorithms.py [--seeds 0 1 2] [--algorithms grpo ppo] [--folder /tmp/algorithms] [--docs]

For each seed, one warm start lets a model with random weights imitate sloppy demonstrations. All algorithms start from
its weights, with their presets and the same numbers of prompts and samples per step. They are evaluated on 500 held-out
problems, every 8 steps. GRPO comes first: the steps that it needs for an accuracy of 0.9 are the budget of a seed. All
others have that budget; one that has not reached the goal then goes on from its checkpoint to twice as many steps.
Finished runs are read from the folder. `--docs` writes the table and the picture into docs/.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from gcore import cli
from gcore.config.presets import ALGORITHMS

ROOT = Path(__file__).parents[1]
GOAL = 0.9
START, END = "<!-- bench/algorithms.py --docs -->", "<!-- end -->"  # of the table in docs/algorithms.md
BASE: dict[str, Any] = {
    "runtime": "local",
    "controllers": 1,
    "placement": {"policy": {"replicas": 1}, "trainer": {"threads": 1}},
    "observe": {"progress": "none", "tensorboard": False, "trace": False, "samples_per_step": 0, "eval_every": 8},
    "checkpoint": {"every": 0},
}
# What is not in a preset: one learning rate for all, sizes of a step, and what an algorithm cannot do without.
SHARED: dict[str, Any] = {
    "training": {"lr": 5e-4, "schedule": "constant"},
    "algorithm": {"mini_batches": 2},
    "sampling": {"prompts_per_step": 64, "samples_per_prompt": 8},
}
OWN: dict[str, dict[str, Any]] = {
    "ppo": {"critic": {"lr": 1e-3}},
    **{name: {"algorithm": {"mini_batches": 1}} for name in ("opo", "gpg", "remax")},  # REINFORCE: one update per step
}


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            found[key] = merged(found.get(key, {}), value) if isinstance(value, dict) else value
    return found


def gcore(*args: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(args)
    if code:
        sys.exit(f"gcore {' '.join(args)} failed:\n{out.getvalue()}")
    return out.getvalue()


def write(folder: Path, name: str, tree: dict[str, Any]) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def warm_start(folder: Path, seed: int) -> Path:
    """A Hugging Face folder with the weights after the warm start."""
    target = folder / f"warm-{seed}"
    if (target / "config.json").exists():
        return target
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    small = {"model": {"build": {"hidden_size": 64, "intermediate_size": 256}}}
    warm = {"training": {"warm_start": {"steps": 400, "batch_size": 64, "lr": 3e-3}}}
    tree = merged(recipe, BASE, small, warm, {"run": {"name": f"sft-{seed}", "dir": str(folder), "seed": seed}})
    gcore("sft", write(folder, f"sft-{seed}", tree))
    gcore("export", str(folder / f"sft-{seed}"), str(target))
    return target


def run(folder: Path, name: str, seed: int, steps: int, start: Path) -> dict[str, Any]:
    """{"curve": [[step, accuracy], ...], "reached": step or None, "cpu_s": 21.5}"""
    about = folder / f"{name}-{seed}.json"
    if about.exists():
        found: dict[str, Any] = json.loads(about.read_text())
        if found["reached"] is not None or found["curve"][-1][0] >= 2 * steps:
            return found
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    recipe["training"].pop("warm_start")
    recipe["model"] = {"path": str(start)}
    place = {"run": {"name": f"{name}-{seed}", "dir": str(folder), "seed": seed}}
    tree = merged(recipe, BASE, SHARED, OWN.get(name, {}), {"algorithm": {"preset": name}}, place)
    path, began = write(folder, f"{name}-{seed}", tree), time.process_time()
    for limit in (steps, 2 * steps):
        curve = train(folder, path, name, seed, limit, "run.resume=auto")
        if _reached(curve) is not None:
            break
    found = {"curve": curve, "reached": _reached(curve), "cpu_s": time.process_time() - began}
    about.write_text(json.dumps(found))
    return found


def train(folder: Path, path: str, name: str, seed: int, steps: int, *overrides: str) -> list[list[float]]:
    gcore("train", path, f"run.steps={steps}", *overrides)
    rows = [json.loads(line) for line in (folder / f"{name}-{seed}" / "metrics.jsonl").read_text().splitlines()]
    return sorted({row["step"]: [row["step"], row["eval/accuracy"]] for row in rows if "eval/accuracy" in row}.values())


def _reached(curve: list[list[float]]) -> float | None:
    return next((step for step, accuracy in curve if accuracy >= GOAL), None)


# ---- docs ---------------------------------------------------------------------------------------------------------


def table(found: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """Markdown: one row per algorithm, over its seeds."""
    rows = ["| algorithm | before | after | steps to 0.9 |", "|---|---|---|---|"]
    for name, by_seed in found.items():
        first, last = ([each["curve"][at][1] for each in by_seed.values()] for at in (0, -1))
        reached = [_steps(each) for each in by_seed.values()]
        before, after = (", ".join(f"{value:.3f}" for value in values) for values in (first, last))
        rows.append(f"| {ALGORITHMS[name].title} | {before} | {after} | {', '.join(reached)} |")
    return rows


def _steps(each: dict[str, Any]) -> str:
    """To the goal: "24", or "not in 112 (best 0.882)"."""
    if each["reached"] is not None:
        return str(each["reached"])
    return f"not in {each['curve'][-1][0]} (best {max(value for _, value in each['curve']):.3f})"


def draw(found: dict[str, dict[int, dict[str, Any]]], target: Path) -> None:
    """One panel per algorithm: held-out accuracy over steps, a line per seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 5
    num_rows = -(-len(found) // columns)
    figure = Figure(figsize=(2.2 * columns, 1.7 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(num_rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axis, (name, by_seed) in zip(axes, found.items(), strict=False):
        for each in by_seed.values():
            axis.plot(*zip(*each["curve"], strict=True), linewidth=1.2)
        axis.axhline(GOAL, color="0.7", linewidth=0.8, linestyle=":")
        axis.set_title(ALGORITHMS[name].title, fontsize=9)
        axis.tick_params(labelsize=7)
    for axis in axes[len(found) :]:
        axis.set_axis_off()
    figure.supxlabel("training step", fontsize=8)
    figure.supylabel("held-out accuracy", fontsize=8)
    figure.savefig(target, dpi=110)


def write_docs(found: dict[str, dict[int, dict[str, Any]]]) -> None:
    page = ROOT / "docs" / "algorithms.md"
    text = page.read_text()
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    page.write_text("\n".join([before + START, *table(found), END + after]))
    draw(found, ROOT / "docs" / "algorithms.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--steps", type=int, default=32, help="of GRPO, and at most twice as many")
    parser.add_argument("--folder", default="/tmp/algorithms")
    parser.add_argument("--docs", action="store_true")
    args = parser.parse_args()
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in args.algorithms}
    for seed in args.seeds:
        start = warm_start(folder, seed)
        budget = run(folder, "grpo", seed, args.steps, start)["reached"] or 2 * args.steps
        for name in args.algorithms:
            each = found[name][seed] = run(folder, name, seed, args.steps if name == "grpo" else budget, start)
            first, last = each["curve"][0][1], each["curve"][-1][1]
            print(f"{name} seed {seed}: {first:.3f} -> {last:.3f}, steps {_steps(each)}", flush=True)
    print("\n".join(table(found)))
    if args.docs:
        write_docs(found)


if __name__ == "__main__":
    main()
