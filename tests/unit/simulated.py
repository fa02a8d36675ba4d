"""A made-up simulation for tests of the page, and for looking at it:

    python tests/unit/simulated.py FILE.json --slots 64 --steps 40 --rule dynamic

Answers grow longer and fewer are accepted. Under `dynamic`, slots turn from policy into judge when generation runs dry;
under `static` they never do. The numbers are invented, but the parts agree with each other.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np


def simulation(slots: int = 64, steps: int = 40, rule: str = "dynamic", seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    now, rows, timeline, moves = 0.0, [], [], []
    judges = max(1, slots // 4)
    for step in range(1, steps + 1):
        share = (step - 1) / max(steps - 1, 1)
        tail = 30 + 40 * share
        turn = max(1, slots // 8) if rule == "dynamic" else 0
        if rule == "dynamic" and step % 5 == 0 and judges < slots // 2:
            judges += max(1, slots // 32)
        ends = now + tail * random.beta(6, 2, size=slots - judges)
        turned = set(np.argsort(ends)[:turn].tolist())
        rollout = float(ends.max() - now) + tail * (0.05 if rule == "dynamic" else 0.2)
        early = [float(ends[slot]) for slot in sorted(turned)]
        for slot in range(slots):
            if slot >= slots - judges:
                used = rollout * random.uniform(0.93, 1.0)
                timeline.append(_part(step, slot, "judge", now + rollout - used, now + rollout, random.uniform(0.8, 1)))
            else:
                end = float(ends[slot])
                timeline.append(_part(step, slot, "policy", now, end, random.uniform(0.85, 1)))
                if slot in turned:
                    timeline.append(_part(step, slot, "switch", end, end + 1.0, None))
                    timeline.append(_part(step, slot, "judge", end + 1.0, now + rollout, random.uniform(0.6, 1)))
            timeline.append(_part(step, slot, "trainer", now + rollout, now + rollout + 18, 1.0))
        for slot, at in zip(sorted(turned), early, strict=True):
            behind, gain = random.uniform(8, 20), random.uniform(2, 6)
            moves.append(
                {"step": step, "at_s": round(at, 3), "slots": [slot], "from": "policy", "to": "judge",
                 "reason": f"judge {behind:.1f} s behind, gain {gain:.1f} s > cost 1.0 s"}
            )  # fmt: skip
        parts = [p for p in timeline if p["step"] == step and p["role"] in ("policy", "judge")]
        rows.append(
            {
                "step": step, "at_s": now, "rollout_s": rollout, "update_s": 18.0,
                "idle": 1 - sum(p["end"] - p["start"] for p in parts) / (slots * rollout),
                "busy": {r: float(np.mean([p["busy"] for p in parts if p["role"] == r])) for r in ("policy", "judge")},
                "split": {"policy": slots - judges, "judge": judges}, "moves": len(turned),
                "tokens": round(slots * tail * 900), "length": 512 * 16**share, "acceptance": 0.9 - 0.6 * share,
            }
        )  # fmt: skip
        now += rollout + 18
    moves.sort(key=lambda move: move["at_s"])
    total = sum(row["rollout_s"] for row in rows)
    idle = sum(row["idle"] * row["rollout_s"] for row in rows) / total
    own = {"rollout_s": total, "idle": idle, "moves": len(moves)}
    others = {"static 3:1": (1.16, 0.11), "colocated": (1.31, 0.04), "oracle": (0.98, -0.01)}
    return {
        "kind": "simulation", "name": f"drift-{slots}", "rule": rule, "slots": slots, "roles": ["policy", "judge"],
        "steps": rows, "timeline": timeline, "moves": moves, "summary": {**own, "tokens_per_s": 51234.5, "seed": seed},
        "compare": {rule: own, **{n: {"rollout_s": total * k, "idle": idle + d} for n, (k, d) in others.items()}},
    }  # fmt: skip


def _part(step: int, slot: int, role: str, start: float, end: float, busy: float | None) -> dict[str, Any]:
    part = {"step": step, "slot": slot, "role": role, "start": round(start, 3), "end": round(end, 3)}
    return part if busy is None else {**part, "busy": round(float(busy), 3)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rule", default="dynamic")
    args = parser.parse_args()
    args.file.write_text(json.dumps(simulation(args.slots, args.steps, args.rule)))
