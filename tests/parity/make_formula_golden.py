"""Writes formula_golden.json: losses with importance weights and KL, worked out step by step in plain Python.

    python tests/parity/make_formula_golden.py

Nothing of gcore or torch is used: each number comes from the formula in docs/algorithms.md, one token at a time, and
gradients from derivatives taken by hand. tests/unit/test_objective.py compares. What verl has too is in
make_verl_golden.py.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

LOW, HIGH, CAP, FLOOR, KL_COEF, MAX_LENGTH = 0.2, 0.28, 1.6, 0.7, 0.3, 9


def batch(seed: int, samples: int) -> dict[str, Any]:
    """Ratios on both sides of every bound; one token far outside, one that is no action of the policy."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, MAX_LENGTH) for _ in range(samples)]
    rows: dict[str, list[list[float]]] = {name: [] for name in ("log", "old", "ref", "rollout", "mask")}
    for n in lengths:
        log = [-rng.expovariate(0.7) for _ in range(n)]
        old = [x + rng.gauss(0, 0.3) for x in log]
        rows["log"].append(log)
        rows["old"].append(old)
        rows["ref"].append([x + rng.gauss(0, 0.8) for x in log])
        rows["rollout"].append([x + rng.gauss(0, 0.2) for x in old])
        rows["mask"].append([float(rng.random() > 0.2 or i == 0) for i in range(n)])
    rows["rollout"][0][0] -= 30.0
    rows["ref"][0][-1] += 4.0  # beyond the bound of k3
    given = {name: [[round(x, 4) for x in row] for row in found] for name, found in rows.items()}
    return {**given, "advantages": [round(rng.gauss(0, 1), 3) for _ in lengths]}


def bounded(x: float) -> float:
    return max(-20.0, min(20.0, x))


def importance(old: list[float], rollout: list[float], mask: list[float], level: str, mode: str) -> list[float]:
    logs = [o - r for o, r in zip(old, rollout, strict=True)]
    if level == "sequence":
        logs = [sum(x for x, m in zip(logs, mask, strict=True) if m)] * len(logs)
    elif level == "geometric":
        logs = [sum(bounded(x) for x, m in zip(logs, mask, strict=True) if m) / sum(mask)] * len(logs)
    ratios = [math.exp(bounded(x)) for x in logs]
    if level == "none":
        return [1.0] * len(ratios)
    if mode == "truncate":
        return [max(FLOOR, min(CAP, r)) for r in ratios]
    return [r if FLOOR <= r <= CAP else 0.0 for r in ratios]


def ppo(log: float, old: float, advantage: float) -> tuple[float, float]:
    """The loss of one token and its derivative by `log`."""
    ratio = math.exp(bounded(log - old))
    plain, clipped = -ratio * advantage, -max(1 - LOW, min(1 + HIGH, ratio)) * advantage
    return (clipped, 0.0) if clipped > plain else (plain, plain)


def kl(log: float, ref: float, estimator: str) -> tuple[float, float]:
    d = log - ref
    k3 = math.exp(bounded(-d)) - bounded(-d) - 1
    value = {"k1": d, "k2": d * d / 2, "k3": min(k3, 10.0)}[estimator[:2]]
    if estimator.endswith("+") or estimator == "k2":
        return value, d
    return value, 1.0 if estimator == "k1" else (1 - math.exp(-d) if k3 < 10 else 0.0)


def answer(b: dict[str, Any], level: str, mode: str, estimator: str, aggregation: str) -> dict[str, Any]:
    actions, samples = sum(map(sum, b["mask"])), len(b["log"])
    loss, gradient = 0.0, []
    for log, old, ref, rollout, mask, advantage in zip(
        *(b[name] for name in ("log", "old", "ref", "rollout", "mask", "advantages")), strict=True
    ):
        weights = importance(old, rollout, mask, level, mode)
        for i in range(len(log)):
            share = (
                mask[i]
                / {
                    "token_mean": actions,
                    "sequence_mean": samples * sum(mask),
                    "fixed_length": samples * MAX_LENGTH,
                }[aggregation]
            )
            (pg, pg_slope), (penalty, kl_slope) = ppo(log[i], old[i], advantage), kl(log[i], ref[i], estimator)
            loss += share * weights[i] * (pg + KL_COEF * penalty)
            gradient.append(share * weights[i] * (pg_slope + KL_COEF * kl_slope))
    return {"loss": round(loss, 10), "gradient": [round(g, 10) for g in gradient]}


def main() -> None:
    kinds = list(itertools.product(("token", "sequence", "geometric", "none"), ("truncate", "mask")))
    cases = []
    for seed in range(3):
        b = batch(seed, 5)
        found = {f"{level}/{mode}/k3/token_mean": answer(b, level, mode, "k3", "token_mean") for level, mode in kinds}
        for estimator, aggregation in zip(
            ("k1", "k2", "k3", "k1+", "k3+"), itertools.cycle(("sequence_mean", "fixed_length")), strict=False
        ):
            found[f"token/mask/{estimator}/{aggregation}"] = answer(b, "token", "mask", estimator, aggregation)
        cases.append({"batch": b, "answers": found})
    keys = {"low": LOW, "high": HIGH, "cap": CAP, "floor": FLOOR, "kl_coef": KL_COEF, "max_length": MAX_LENGTH}
    path = Path(__file__).with_name("formula_golden.json")
    path.write_text(json.dumps({"keys": keys, "cases": cases}) + "\n")
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
