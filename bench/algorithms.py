"""Does every algorithm of the table (gcore/config/presets.py) learn? The task of recipes/quickstart.yaml, on a CPU.

    python bench/algorithms.py [--seeds 0 1 2] [--algorithms grpo ppo] [--folder /tmp/algorithms] [--docs]
    python bench/algorithms.py --rehearse --algorithms grpo ppo --folder /tmp/rehearsal     # two steps of each

For each seed, one warm start lets a model with random weights imitate sloppy demonstrations. All algorithms start from
its weights, with their presets and the sizes, the learning rate and the schedule of the recipe: 150 steps. They are
evaluated on 500 held-out problems, every 8 steps. The steps that GRPO needs for an accuracy of 0.9 are the budget of a
seed; the goal of the others is to need at most twice as many. Finished runs are read from the folder. `--docs` writes
the table and the picture into docs/.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import markdown, merged, write_between  # noqa: E402
from gcore import cli  # noqa: E402
from gcore.config.presets import ALGORITHMS  # noqa: E402
from gcore.observe.metrics import read_rows  # noqa: E402

GOAL = 0.9
START, END = "<!-- bench/algorithms.py --docs -->", "<!-- end -->"  # of the table in docs/benchmarks.md
BASE: dict[str, Any] = {
    "runtime": "local",
    "controllers": 1,
    "placement": {"policy": {"replicas": 1}, "trainer": {"threads": 1}},
    "observe": {"progress": "none", "trackers": [], "trace": False, "samples_per_step": 0, "eval_every": 8},
    "checkpoint": {"every": 0},
}
REHEARSAL: dict[str, Any] = {
    "run": {"steps": 2},
    "data": {"eval": {"args": {"eval_size": 8}}},
    "sampling": {"prompts_per_step": 4, "samples_per_prompt": 4},
}
# With one update per step, most losses would have the same gradient.
SHARED: dict[str, Any] = {"algorithm": {"mini_batches": 2}}
OWN: dict[str, dict[str, Any]] = {
    "ppo": {"critic": {"lr": 1e-3}},
    **{name: {"algorithm": {"mini_batches": 1}} for name in ("opo", "gpg", "remax")},  # REINFORCE: one update per step
}


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


def warm_start(folder: Path, seed: int, rehearses: bool) -> Path:
    """A Hugging Face folder with the weights after the warm start."""
    target = folder / f"warm-{seed}"
    if (target / "config.json").exists():
        return target
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    small = {"model": {"build": {"hidden_size": 64, "intermediate_size": 256}}}
    steps = 2 if rehearses else 400
    warm = {"training": {"warm_start": {"steps": steps, "batch_size": 64, "lr": 3e-3}}}
    tree = merged(recipe, BASE, small, warm, {"run": {"name": f"sft-{seed}", "dir": str(folder), "seed": seed}})
    gcore("sft", write(folder, f"sft-{seed}", tree))
    gcore("export", str(folder / f"sft-{seed}"), str(target))
    return target


def run(folder: Path, name: str, seed: int, start: Path, rehearses: bool) -> dict[str, Any]:
    """{"curve": [[step, accuracy], ...], "reached": step or None, "cpu_s": 41.5}"""
    about = folder / f"{name}-{seed}.json"
    if about.exists():
        found: dict[str, Any] = json.loads(about.read_text())
        return found
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    recipe["training"].pop("warm_start")
    recipe["model"] = {"path": str(start)}
    place = {"run": {"name": f"{name}-{seed}", "dir": str(folder), "seed": seed}}
    tree = merged(recipe, BASE, SHARED, OWN.get(name, {}), {"algorithm": {"preset": name}}, place)
    tree = merged(tree, REHEARSAL) if rehearses else tree
    path, began = write(folder, f"{name}-{seed}", tree), time.process_time()
    gcore("train", path)
    rows = read_rows(folder / f"{name}-{seed}")
    curve = [[row["step"], row["eval/accuracy"]] for row in rows if "eval/accuracy" in row]
    reached = next((step for step, accuracy in curve if accuracy >= GOAL), None)
    found = {"curve": curve, "reached": reached, "cpu_s": time.process_time() - began}
    about.write_text(json.dumps(found))
    return found


# ---- docs ---------------------------------------------------------------------------------------------------------


def table(found: dict[str, dict[int, dict[str, Any]]]) -> str:
    """One row per algorithm, over its seeds."""
    rows = []
    for name, by_seed in found.items():
        first, last = ([each["curve"][at][1] for each in by_seed.values()] for at in (0, -1))
        before, after = (", ".join(f"{value:.3f}" for value in values) for values in (first, last))
        reached = {seed: each["reached"] for seed, each in by_seed.items()}
        budgets = {seed: each["reached"] for seed, each in found.get("grpo", {}).items()}
        both = [(steps, budgets.get(seed)) for seed, steps in reached.items()]
        shares = [f"{steps / budget:.1f}" if steps and budget else "-" for steps, budget in both]
        steps = ", ".join(str(each) if each else "not reached" for each in reached.values())
        rows.append([f"`{name}`", before, after, steps, ", ".join(shares)])
    return markdown(["algorithm", "before", "after 150 steps", "steps to 0.9", "of GRPO's"], rows)


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
        axis.set_title(name, fontsize=9)
        axis.tick_params(labelsize=7)
    for axis in axes[len(found) :]:
        axis.set_axis_off()
    figure.supxlabel("training step", fontsize=8)
    figure.supylabel("held-out accuracy", fontsize=8)
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--folder", default="/tmp/algorithms")
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--rehearse", action="store_true", help="two steps of each, which show nothing")
    args = parser.parse_args()
    if args.docs and args.rehearse:
        parser.error("--docs: not with --rehearse")
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in args.algorithms}
    for seed in args.seeds:
        start = warm_start(folder, seed, args.rehearse)
        for name in args.algorithms:
            each = found[name][seed] = run(folder, name, seed, start, args.rehearse)
            first, last = each["curve"][0][1], each["curve"][-1][1]
            print(f"{name} seed {seed}: {first:.3f} -> {last:.3f}, 0.9 at {each['reached']}", flush=True)
    print(table(found))
    if args.docs:
        write_between(ROOT / "docs" / "benchmarks.md", START, END, table(found))
        draw(found, ROOT / "docs" / "algorithms.png")


if __name__ == "__main__":
    main()
