"""The cost model of the control plane (bench/control_costs.py), fitted to bench/controllers.py.

    python bench/control_model.py --rows rows.json --write docs/controllers.md      rows: of bench/controllers.py --json

Prints the costs, and what they predict for up to 4,096 devices: text steps with 16 samples per device, and steps with
20 calls per sample (judges, feedback). The layout is measured here, one part for 64 to 4,096 ranks; the rest is from
the rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import markdown, write_between  # noqa: E402
from bench.control_costs import ControlCosts, Observation, Step, fit, fit_layout, predict  # noqa: E402
from gcore.cost.workload import CostModel  # noqa: E402
from gcore.preparation.balance import make_layout, num_parts  # noqa: E402
from gcore.types import SampleMeta, SampleWork  # noqa: E402

MARK, END = "<!-- control model -->", "<!-- end of control model -->"
DEVICES, SIZES, SIBLINGS, PER_DEVICE = (64, 512, 4096), (1, 8, 64, 512), 8, 16
WORKLOADS = {"text": 1.0, "reward-heavy": 20.0 * SIBLINGS}  # calls per group
LAYOUTS = (64, 256, 1024, 4096)


def observations(rows: Sequence[Mapping[str, Any]]) -> list[Observation]:
    """One per row of parallel controllers: the mean of the controllers."""
    found = []
    for row in rows:
        size, samples = row["controllers"], row["samples"]
        if row["plane"].startswith("parallel") and "inline" not in row["plane"]:
            seconds = row["cpu_ms"] * samples / 1000 / size
            found.append(Observation(row["calls"] / size, samples / size, samples - samples / size, seconds))
    return found


def layout_seconds(ranks: int) -> tuple[int, int, float]:
    """Samples, parts, and CPU seconds of one part of a layout, for ranks that share weights."""
    lengths = 2048 * np.exp(np.random.default_rng(0).normal(0, 0.3, PER_DEVICE * ranks))
    metas = [
        SampleMeta(i // SIBLINGS, i % SIBLINGS, SampleWork(int(length)), int(length), steps=int(length))
        for i, length in enumerate(lengths)
    ]
    began = time.process_time()
    cost = CostModel(crossover=9000.0)
    kind: dict[str, Any] = {"padded": False, "sharded": True, "parts": [0]}
    make_layout(metas, step=1, num_ranks=ranks, mini_batches=1, max_tokens=32768, cost=cost, **kind)
    return len(metas), num_parts(ranks), time.process_time() - began


def table(costs: ControlCosts, error: float, count: int) -> str:
    text = (
        f"Fitted to {count} rows, median error {error:.0%}: {1e3 * costs.call_s:.2f} ms per call, "
        f"{1e3 * costs.own_s:.2f} ms per own sample, {1e6 * costs.known_s:.0f} us per sample of others, "
        f"{1e3 * costs.step_s:.0f} ms per step. Layout: {1e6 * costs.layout_s:.0f} us per sample of a part, and "
        f"{1e6 * costs.deal_s:.0f} us per sample of the step if there are several parts."
    )
    head = ["devices", "samples", "workload", "controllers", "CPU s of each, per step", "with the layout", "most of it"]
    lines = []
    for devices in DEVICES:
        for name, calls in WORKLOADS.items():
            for size in (n for n in SIZES if n <= devices):
                step = Step(PER_DEVICE * devices, devices, size, SIBLINGS, calls, num_parts(devices))
                found = predict(step, costs)
                seconds = [f"{found.each_s:.2f}", f"{found.busiest_s:.2f}"]
                lines.append([f"{devices:,}", f"{step.samples:,}", name, size, *seconds, found.largest])
    return f"{text}\n\n{markdown(head, lines, ['---:', '---:', '---', '---:', '---:', '---:', '---'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="from bench/controllers.py --json")
    parser.add_argument("--write", type=Path, help="a page with the markers of this table")
    args = parser.parse_args()
    seen = observations(json.loads(args.rows.read_text())["rows"])
    costs, error = fit(seen)
    text = table(fit_layout(costs, [layout_seconds(ranks) for ranks in LAYOUTS]), error, len(seen))
    print(text)
    if args.write:
        write_between(args.write, MARK, END, text)


if __name__ == "__main__":
    main()
