"""Bytes of images through controllers: a whole run of two steps, for several numbers of controllers.

    python bench/media_bytes.py                          # 512 samples with 4 images of 1 MB each; N = 1, 2, 4
    python bench/media_bytes.py --samples 32 --controllers 4 --runtime local

The images are files of a dataset (592 x 592 pixels, 1.05 MB each, all different). A small Qwen3-VL answers each prompt
twice, under Ray. A run has `samples` / 2 prompts per step.

Columns, of the second step: pixels that all controllers decoded, and the busiest one; its share times N (goal: at most
1.2); bytes of requests, responses and samples through the busiest controller; bytes that all collectives of the run
carried (pickled), and those of a run with images of 8 x 8 pixels: the difference is what images add to them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import step_rows  # noqa: E402

SIBLINGS, IMAGES, STEPS = 2, 4, 2
COUNTS = "BENCH_COLLECTIVES"  # environment: folder of the counts of each controller
RUNTIME = "BENCH_RUNTIME"  # environment: ray or local


def write_dataset(folder: Path, prompts: int, edge: int) -> Path:
    """Uncompressed files: writing and reading them should not be what takes the time."""
    from PIL import Image

    folder.mkdir(parents=True)
    rows = []
    for i in range(prompts):
        names = []
        for j in range(IMAGES):
            pixels = np.random.default_rng([i, j]).integers(0, 256, (edge, edge, 3), dtype=np.uint8)
            names.append(f"{i}-{j}.bmp")
            Image.fromarray(pixels).save(folder / names[-1])
        rows.append({"prompt": "=", "images": names, "answer": str(i % 10)})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def recipe(folder: Path, data: Path, samples: int, controllers: int, name: str) -> dict[str, Any]:
    build = {"hidden_size": 32, "intermediate_size": 64, "layers": 1, "heads": 2, "kv_heads": 1, "max_length": 64}
    vision = {"hidden_size": 32, "intermediate_size": 32, "layers": 1, "heads": 2}
    return {
        "run": {"name": name, "dir": str(folder), "steps": STEPS},
        "model": {"build": {**build, "alphabet": "0123456789+=", "vision": vision}},
        "data": {"train": {"path": str(data)}, "max_prompt_length": 48},
        "runtime": os.environ[RUNTIME],
        "controllers": controllers,
        "generation": {"max_response_length": 4},
        "rewards": {"functions": [{"name": "count", "path": f"{Path(__file__).resolve()}:count_collectives"}]},
        "sampling": {"prompts_per_step": samples // SIBLINGS, "samples_per_prompt": SIBLINGS},
        "workflow": f"{Path(__file__).resolve()}:counted",
        "placement": {"trainer": {"ranks": 1, "threads": 1}, "policy": {"replicas": 1}},
        "checkpoint": {"every": 0},
        "observe": {"progress": "plain", "trackers": [], "samples_per_step": 0},
    }


# ---- in the controllers ----------------------------------------------------------------------------------------------


def count_collectives(prompts: Any, completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between siblings."""
    return [float(len(text) + i) for i, text in enumerate(completions)]


_counting = False


async def counted(ctx: Any, prompt: Any) -> list[Any]:
    """The default workflow. Its first call starts to count what this controller gives to collectives."""
    global _counting
    if not _counting:
        _counting = True
        _count()
    scored: list[Any] = await ctx.reward(await ctx.generate(prompt))
    return scored


def _count() -> None:
    import pickle

    from gcore.runtime.local import LocalGroup
    from gcore.runtime.tree import TreeGroup

    group: Any = LocalGroup if os.environ[RUNTIME] == "local" else TreeGroup
    original, totals = group.all_gather, dict[Path, int]()  # by run: with runtime=local they share a process

    async def all_gather(self: Any, name: str, value: Any) -> list[Any]:
        target = Path(os.environ[COUNTS]) / str(os.getpid())
        totals[target] = totals.get(target, 0) + len(pickle.dumps(value))
        target.write_text(str(totals[target]))
        found: list[Any] = await original(self, name, value)
        return found

    group.all_gather = all_gather


# ---- the experiment --------------------------------------------------------------------------------------------------


def one_run(folder: Path, data: Path, samples: int, controllers: int, name: str) -> dict[str, float]:
    from gcore.config.load import load_config
    from gcore.driver.supervise import run

    counts = folder / f"counts-{name}"
    counts.mkdir(parents=True)
    os.environ[COUNTS] = str(counts)
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(recipe(folder, data, samples, controllers, name)))
    config = load_config(file, [])
    run(config)
    row = step_rows(config.run.folder)[-1]
    return {
        "samples": row["batch/samples"],
        "all": row["controller/media_bytes_all"],
        "busiest": row["controller/media_bytes"],
        "payloads": row["controller/bytes"],
        "collectives": float(sum(int(each.read_text()) for each in counts.iterdir())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--edge", type=int, default=592)
    parser.add_argument("--controllers", default="1,2,4")
    parser.add_argument("--runtime", choices=("ray", "local"), default="ray")
    parser.add_argument("--work", type=Path, help="folder of the dataset and the runs, about 5 GB; default: temporary")
    args = parser.parse_args()
    os.environ[RUNTIME] = args.runtime
    numbers = [int(n) for n in args.controllers.split(",")]
    with tempfile.TemporaryDirectory(prefix="media-bytes-", dir=args.work) as made:
        folder, prompts = Path(made), args.samples // SIBLINGS
        data = {edge: write_dataset(folder / f"data-{edge}", prompts, edge) for edge in (args.edge, 8)}
        lines = []
        for n in numbers:
            large, small = (one_run(folder, data[edge], args.samples, n, f"n{n}-{edge}") for edge in (args.edge, 8))
            lines.append(
                f"{n:>3}{large['samples']:>9.0f}{large['all'] / 1e6:>12.1f}{large['busiest'] / 1e6:>12.1f}"
                f"{n * large['busiest'] / large['all']:>11.3f}{large['payloads'] / 1e6:>14.3f}"
                f"{large['collectives'] / 1e6:>15.4f}{small['collectives'] / 1e6:>15.4f}"
            )
    print(f"{'N':>3}{'samples':>9}{'images, MB':>12}{'busiest':>12}{'share x N':>11}{'payloads, MB':>14}", end="")
    print(f"{'collectives':>15}{'small images':>15}\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
