"""Placement in the simulator: the tables of docs/placement.md.

    python bench/placement.py drift --slots 64            # minutes per judge; --judge 32B: only this one
    python bench/placement.py stationary                  # about three minutes
    python bench/placement.py variable                    # about three minutes
    python bench/placement.py where-not                   # about two minutes
    python bench/placement.py robust --seeds 5            # about half an hour; --only NAME: one scenario
    python bench/placement.py unseen --seeds 5            # the same on held-out scenarios
    python bench/placement.py uneven --seeds 3            # devices and requests that differ; unseen-uneven: held out
    python bench/placement.py splits --seeds 3            # both against static splits only: about 20 minutes
    python bench/placement.py guarded --seeds 3           # about four minutes
    python bench/placement.py staleness --seeds 5         # hours; --only NAME: one scenario; --staleness K: one limit
    python bench/placement.py speed                       # about three minutes: drift-512, 1,000 steps of 256 prompts

`drift`: each placement rule runs at its own best oversampling of 1.0, 1.1, 1.25 and 1.5, chosen in hindsight for every
seed; `best static` is the best split at the best oversampling. `--oracle` (slow) adds the fastest of many rules, chosen
per step. `stationary`: nothing drifts; dynamic against the best static split, and the number of moves per step.
`variable`: the load jumps from step to step, several seeds. `where-not`: cases that are hard for dynamic placement.
`robust`: small scenarios that are hard for it, against co-location, early swap, every static split and the oracle.
`unseen`: the same table for scenarios on which the rule was not tuned. `uneven`: the same for mixtures of lengths, a
slow device, judges of some prompts, alternating acceptance. `splits`: these scenarios, dynamic and unguarded against
the static split that is best over all seeds. `guarded`: the larger scenarios with and without the guard. `staleness`:
asynchronous rollout, where dynamic lends the trainer's blocks to engines, against co-location and the best split
without staleness, and against the best split that has blocks of its own for the trainer; both splits of each seed in
hindsight.

Placement and routing are the code of gcore/placement and gcore/generation/routing.py. Times are those of the simulated
cluster, except for `speed`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import write_json  # noqa: E402
from gcore.placement.grid import all_splits  # noqa: E402
from gcore.simulate.run import SimulatedRun, simulate, static_name  # noqa: E402
from gcore.simulate.scenario import Scenario, load_scenario  # noqa: E402
from gcore.simulate.table import best_static  # noqa: E402

JUDGES = {"14B": 1, "32B": 4, "72B": 8}  # size -> tensor parallel, for a policy of 7B
OVERSAMPLING = (1.0, 1.1, 1.25, 1.5)
BASELINES = ("colocated", "colocated-early", "proportional", "paper")
LOADS = {
    "as shipped": (),
    "short responses": ("lengths.start=512",),
    "long responses": ("lengths.start=8192", "acceptance.start=0.4"),
    "judge 14B": ("judges.0.model=14B", "judges.0.tensor_parallel=1"),
    "judge 72B": ("judges.0.model=72B", "judges.0.tensor_parallel=8"),
}
HARD = {
    "robust": ("equal-lengths", "heavy-tail", "few-prompts", "large-judge", "constant", "three-judges"),
    "unseen": tuple(
        f"unseen-{name}" for name in ("prefill-judge", "shrinking", "jumps", "nearly-equal", "wide-policy")
    ),
    "uneven": ("slow-device", "half-judged", "bimodal", "alternating", "wide-narrow", "long-verdicts"),
    "unseen-uneven": ("unseen-slow-judges", "unseen-two-kinds", "unseen-slow-first"),
}

MOVING = ("dynamic", "unguarded")
Row = dict[str, Any]


def scenario(name: str, *overrides: str) -> Scenario:
    return load_scenario(ROOT / "scenarios" / f"{name}.yaml", list(overrides))


def judged_by(judge: str) -> tuple[str, str]:
    return f"judges.0.model={judge}", f"judges.0.tensor_parallel={JUDGES[judge]}"


def facts(run: SimulatedRun) -> Row:
    return {"rollout_s": run.rollout_s, **{key: run.summary()[key] for key in ("idle", "moves", "wasted")}}


def print_row(cells: list[str], widths: list[int]) -> None:
    first, *rest = zip(cells, widths, strict=True)
    print(f"{first[0]:{first[1]}}" + "".join(f"{cell:>{width}}" for cell, width in rest), flush=True)


# ---- drift ------------------------------------------------------------------------------------------------------


def drift(args: argparse.Namespace) -> list[Row]:
    rows = []
    widths = [24, 11, 16, 8, 8, 9]
    for judge in args.judge or JUDGES:
        print(f"\n{args.slots} slots, {args.steps} steps, policy 7B, judge {judge} x tp {JUDGES[judge]}")
        if args.seeds > 1:
            print(f"mean of {args.seeds} seeds; `dynamic wins` with the deviation over them")
        print_row(["rule", "rollout s", "dynamic wins", "idle", "moves", "wasted"], widths)
        seeds = [_drifting(args, judge, seed) for seed in range(args.seeds)]
        for name in seeds[0]:
            runs = [runs[name] for runs in seeds]
            wins = [1 - runs["dynamic"].rollout_s / runs[name].rollout_s for runs in seeds]
            found = {key: statistics.mean(facts(run)[key] for run in runs) for key in facts(runs[0])}
            splits = ", ".join(run.rule.partition(":")[2] for run in runs)
            label = f"{name} ({splits})" if name == "best static" else name
            spread = f" ± {statistics.stdev(wins):.1%}" if args.seeds > 1 else ""
            won = "" if name == "dynamic" else f"{statistics.mean(wins):.1%}{spread}"
            print_row(
                [label, f"{found['rollout_s']:.0f}", won,
                 f"{found['idle']:.1%}", f"{found['moves']:.0f}", f"{found['wasted']:.0%}"],
                widths,
            )  # fmt: skip
            rows.append({"slots": args.slots, "judge": judge, "rule": label, "wins": wins, **found})
    return rows


def _drifting(args: argparse.Namespace, judge: str, seed: int) -> dict[str, SimulatedRun]:
    def at(over: float) -> Scenario:
        keys = f"seed={seed}", f"steps={args.steps}", f"oversampling={over}"
        return scenario(f"drift-{args.slots}", *keys, *judged_by(judge), *args.overrides)

    runs = {name: _best_oversampling(at, name) for name in ("dynamic", *BASELINES)}
    runs["best static"] = _best_split(at)
    if args.oracle:
        runs["oracle"] = simulate(runs["dynamic"].scenario, "oracle")
    return runs


def _best_oversampling(at: Callable[[float], Scenario], name: str) -> SimulatedRun:
    return min((simulate(at(over), name) for over in OVERSAMPLING), key=lambda run: run.rollout_s)


def _best_split(at: Callable[[float], Scenario]) -> SimulatedRun:
    found: list[SimulatedRun] = []
    for over in OVERSAMPLING:
        near = found[-1].rule if found else None
        found.append(best_static(at(over), near))
    return min(found, key=lambda run: run.rollout_s)


# ---- stationary, variable ---------------------------------------------------------------------------------------


def stationary(args: argparse.Namespace) -> list[Row]:
    rows = []
    widths = [18, 6, 11, 20, 9, 8, 36]
    print("nothing drifts: `worse` is dynamic against the best static split; moves of each step at the right")
    print_row(["load", "seed", "dynamic s", "best static s", "worse", "idle", "moves by step"], widths)
    for load, overrides in LOADS.items():
        near = None
        for seed in range(args.seeds):
            case = scenario("stationary-64", f"seed={seed}", f"steps={args.steps}", *overrides, *args.overrides)
            dynamic, fixed = simulate(case, "dynamic"), best_static(case, near)
            near = fixed.rule
            moves = [step["moves"] for step in dynamic.steps]
            worse = dynamic.rollout_s / fixed.rollout_s - 1
            print_row(
                [load, str(seed), f"{dynamic.rollout_s:.0f}", f"{fixed.rollout_s:.0f} ({fixed.rule})", f"{worse:+.1%}",
                 f"{dynamic.idle:.1%}", " ".join(str(m) for m in moves[:: max(1, len(moves) // 8)])],
                widths,
            )  # fmt: skip
            rows.append({"load": load, "seed": seed, "worse": worse, "moves_by_step": moves, **facts(dynamic)})
    return rows


def variable(args: argparse.Namespace) -> list[Row]:
    rows = []
    widths = [6, 11, 20, 12, 16, 16, 8]
    print(f"{args.steps} steps whose load jumps; how much less time dynamic takes")
    print_row(["seed", "dynamic s", "best static s", "colocated s", "below static", "below colocated", "idle"], widths)
    near = None
    for seed in range(args.seeds):
        case = scenario("variable-64", f"seed={seed}", f"steps={args.steps}", *args.overrides)
        dynamic, fixed, colocated = simulate(case, "dynamic"), best_static(case, near), simulate(case, "colocated")
        near = fixed.rule
        wins = [1 - dynamic.rollout_s / other.rollout_s for other in (fixed, colocated)]
        print_row(
            [str(seed), f"{dynamic.rollout_s:.0f}", f"{fixed.rollout_s:.0f} ({fixed.rule})",
             f"{colocated.rollout_s:.0f}", *(f"{win:+.1%}" for win in wins), f"{dynamic.idle:.1%}"],
            widths,
        )  # fmt: skip
        rows.append({"seed": seed, "below_static": wins[0], "below_colocated": wins[1], **facts(dynamic)})
    for key in ("below_static", "below_colocated"):
        values = [row[key] for row in rows]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{key.replace('_', ' ')}: mean {statistics.mean(values):.1%}, deviation {spread:.1%} over the seeds")
    return rows


# ---- where it does not pay, and speed -------------------------------------------------------------------------------


def where_not(args: argparse.Namespace) -> list[Row]:
    cases = {
        "no tail, cheap judge": scenario("no-tail", *args.overrides),
        "swaps of 45 s, short rollouts": scenario("slow-swap-64", "steps=12", "lengths.end=1024", *args.overrides),
        "swaps of 45 s, drift-64": scenario("slow-swap-64", "steps=24", *args.overrides),
        "swaps of 1 s, drift-64": scenario("slow-swap-64", "steps=24", "swap_s=1", *args.overrides),
        "few slots, large judge": scenario(
            "stationary-64", "slots=16", "prompts=64", *judged_by("72B"), *args.overrides
        ),
    }
    rows = []
    widths = [32, 11, 20, 12, 16, 17, 8]
    print_row(["case", "dynamic s", "best static s", "colocated s", "below static", "below colocated", "moves"], widths)
    for name, case in cases.items():
        dynamic, fixed, colocated = simulate(case, "dynamic"), best_static(case), simulate(case, "colocated")
        wins = [1 - dynamic.rollout_s / other.rollout_s for other in (fixed, colocated)]
        print_row(
            [name, f"{dynamic.rollout_s:.0f}", f"{fixed.rollout_s:.0f} ({fixed.rule})", f"{colocated.rollout_s:.0f}",
             *(f"{win:+.1%}" for win in wins), f"{facts(dynamic)['moves']:.0f}"],
            widths,
        )  # fmt: skip
        rows.append({"case": name, "below_static": wins[0], "below_colocated": wins[1], **facts(dynamic)})
    return rows


def robust(args: argparse.Namespace) -> list[Row]:
    rows = []
    widths = [21, 11, 9, 12, 17, 12, 12, 12, 9, 14]
    print(f"rollout seconds, mean of {args.seeds} seeds; then how much more time dynamic takes than ...")
    print("`best split`: the one static split that is best over all seeds; `of each seed`: the best of each seed in")
    print("hindsight, mean and worst seed. Moves per step: in the first and in the last quarter of the run")
    heads = ["scenario", "dynamic s", "(of it)", "best split", "of each seed", "co-located", "early swap", "unguarded"]
    print_row([*heads, "oracle", "moves"], widths)
    for name in [name for name in HARD[args.table] if args.only in (None, name)]:
        seeds = [_all_rules(scenario(name, f"seed={seed}", *args.overrides)) for seed in range(args.seeds)]
        mean = {rule: statistics.mean(runs[rule].rollout_s for runs in seeds) for rule in seeds[0]}
        splits = [rule for rule in mean if rule.startswith("static:")]
        split = min(splits, key=lambda rule: mean[rule])
        each = [runs["dynamic"].rollout_s / min(runs[rule].rollout_s for rule in splits) - 1 for runs in seeds]
        against = {rule: mean["dynamic"] / mean[rule] - 1 for rule in mean}
        early, late = zip(*(_moves(runs["dynamic"]) for runs in seeds), strict=True)
        deviation = statistics.stdev(each) if len(each) > 1 else 0.0
        print_row(
            [name, f"{mean['dynamic']:.0f}", split.partition(":")[2], f"{against[split]:+.1%}",
             f"{statistics.mean(each):+.1%} ({max(each):+.1%})",
             *(f"{against[rule]:+.1%}" for rule in ("colocated", "early-swap", "unguarded", "oracle")),
             f"{statistics.mean(early):.1f}, {statistics.mean(late):.1f}"],
            widths,
        )  # fmt: skip
        rows.append({"scenario": name, "seconds": mean, "against": against, "each": each, "deviation": deviation})
    return rows


def splits(args: argparse.Namespace) -> list[Row]:
    rows, widths = list[Row](), [21, 11, 12, 18, 18]
    print(
        f"rollout seconds of the static split that is best over {args.seeds} seeds; then how much more time the rules"
    )
    print("take than this split: mean, and worst seed")
    print_row(["scenario", "best split", "its seconds", "dynamic", "unguarded"], widths)
    for name in [name for name in (*HARD["uneven"], *HARD["unseen-uneven"]) if args.only in (None, name)]:
        cases = [scenario(name, f"seed={seed}", *args.overrides) for seed in range(args.seeds)]
        runs = {rule: [simulate(case, rule).rollout_s for case in cases] for rule in (*MOVING, *_statics(cases[0]))}
        best = min(_statics(cases[0]), key=lambda rule: sum(runs[rule]))
        worse = {rule: [s / fixed - 1 for s, fixed in zip(runs[rule], runs[best], strict=True)] for rule in MOVING}
        mean = {rule: sum(runs[rule]) / sum(runs[best]) - 1 for rule in MOVING}
        print_row(
            [name, best.partition(":")[2], f"{statistics.mean(runs[best]):.0f}",
             *(f"{mean[rule]:+.1%} ({max(worse[rule]):+.1%})" for rule in MOVING)],
            widths,
        )  # fmt: skip
        rows.append({"scenario": name, "best": best, "seconds": runs, "worse": worse})
    return rows


def guarded(args: argparse.Namespace) -> list[Row]:
    """Cost or gain of the guard on the larger scenarios, and the gain over co-location."""
    rows = []
    widths = [26, 11, 13, 13, 16, 17, 8, 8]
    print(f"{args.steps} steps, mean of {args.seeds} seeds; oversampling as in the scenario")
    heads = [
        "scenario",
        "dynamic s",
        "unguarded s",
        "colocated s",
        "over unguarded",
        "below colocated",
        "idle",
        "moves",
    ]
    print_row(heads, widths)
    cases: dict[str, tuple[str, ...]] = {
        f"drift-64, judge {judge}": ("drift-64", *judged_by(judge)) for judge in JUDGES
    }
    cases |= {name: (name,) for name in ("variable-64", "stationary-64", "two-judges", "no-tail")}
    for label, (name, *keys) in cases.items():
        seeds = [scenario(name, f"seed={n}", f"steps={args.steps}", *keys) for n in range(args.seeds)]
        runs = {rule: [simulate(case, rule) for case in seeds] for rule in ("dynamic", "unguarded", "colocated")}
        mean = {rule: statistics.mean(run.rollout_s for run in found) for rule, found in runs.items()}
        found = {key: statistics.mean(facts(run)[key] for run in runs["dynamic"]) for key in ("idle", "moves")}
        over, below = mean["dynamic"] / mean["unguarded"] - 1, 1 - mean["dynamic"] / mean["colocated"]
        print_row(
            [label, *(f"{mean[rule]:.0f}" for rule in mean), f"{over:+.1%}", f"{below:+.1%}", f"{found['idle']:.1%}",
             f"{found['moves']:.0f}"],
            widths,
        )  # fmt: skip
        rows.append({"scenario": label, "seconds": mean, "over_unguarded": over, "below_colocated": below, **found})
    return rows


ASYNC = {
    "drift": ("drift-64", "slots=32", "prompts=128"),
    "drift, no judge": ("drift-64", "slots=16", "prompts=64", "judges=[]"),
    "drift, 72B judge": ("drift-64", "slots=64", "prompts=256", *judged_by("72B")),
    "drift, 512 slots": ("drift-512",),
    "stationary": ("stationary-64", "slots=32", "prompts=128"),
    "constant, 8 slots": ("constant",),
    "heavy tail, 8 slots": ("heavy-tail",),
    "two modes, 8 slots": ("bimodal",),
    "long verdicts": ("long-verdicts",),
    "three judges": ("three-judges",),
}


def staleness(args: argparse.Namespace) -> list[Row]:
    rows, limits = list[Row](), args.staleness or (1, 2, 4)
    widths = [21, 4, 10, 13, 14, 28, 11, 9, 9, 8, 8, 10]
    print(
        f"seconds of {args.steps} steps, updates included, mean of {args.seeds} seeds; `gain`: of dynamic over the best"
    )
    print("of the three before it, mean and worst seed. `oracle`: the fastest of dynamic, elastic, two other homes")
    print("and the baselines, of each seed. `length`: trained / drawn")
    heads = ["scenario", "K", "dynamic", "co-located", "best static", "best disaggregated", "gain", "worst", "elastic"]
    print_row([*heads, "oracle", "length", "moves"], widths)
    for label, keys in {label: keys for label, keys in ASYNC.items() if args.only in (None, label)}.items():
        found: dict[int, list[dict[str, Any]]] = {limit: [] for limit in limits}
        near: dict[int, str] = {}
        for seed in range(args.seeds):
            case = scenario(keys[0], *keys[1:], f"steps={args.steps}", f"seed={seed}", *args.overrides)
            fixed = best_static(case, near.get(0)) if case.judges else simulate(case, "colocated")
            near[0] = fixed.rule
            baselines = {"colocated": simulate(case, "colocated").total_s, "static": fixed.total_s}
            for limit in limits:
                late = case.model_copy(update={"staleness": limit})
                apart = best_static(late, near.get(limit), disaggregated=True)
                near[limit] = apart.rule
                num = late.grid.num_blocks
                others = ["elastic", f"lent:{num}", f"lent:{max(1, 3 * num // 8)}"]
                runs = {name: simulate(late, name) for name in ("dynamic", *others)}
                seconds = baselines | {name: run.total_s for name, run in runs.items()} | {"apart": apart.total_s}
                seconds["oracle"] = min(seconds.values())
                found[limit].append({"seconds": seconds, "split": apart.rule, **_async_facts(runs["dynamic"])})
        for limit, seeds in found.items():
            rows.append(_async_row(label, limit, seeds, widths))
            if args.json:
                write_json(args.json, rows)  # it takes hours
    return rows


def _async_facts(run: SimulatedRun) -> Row:
    return {key: run.summary()[key] for key in ("idle", "moves", "wasted", "length_bias")}


def _async_row(label: str, limit: int, seeds: list[Row], widths: list[int]) -> Row:
    mean = {name: statistics.mean(seed["seconds"][name] for seed in seeds) for name in seeds[0]["seconds"]}
    best = [min(seed["seconds"][name] for name in ("colocated", "static", "apart")) for seed in seeds]
    gains = [1 - seed["seconds"]["dynamic"] / other for seed, other in zip(seeds, best, strict=True)]
    facts = {key: statistics.mean(seed[key] for seed in seeds) for key in ("idle", "moves", "wasted", "length_bias")}
    print_row(
        [label, str(limit), *(f"{mean[name]:.0f}" for name in ("dynamic", "colocated", "static")),
         f"{mean['apart']:.0f} ({seeds[0]['split'].partition(':')[2]})", f"{statistics.mean(gains):+.1%}",
         f"{min(gains):+.1%}", f"{mean['elastic']:.0f}", f"{mean['oracle']:.0f}", f"{facts['length_bias']:.3f}",
         f"{facts['moves']:.0f}"],
        widths,
    )  # fmt: skip
    return {"scenario": label, "staleness": limit, "seconds": mean, "gains": gains, "seeds": seeds, **facts}


def _all_rules(case: Scenario) -> dict[str, SimulatedRun]:
    names = (*MOVING, "colocated", "early-swap", "oracle", *_statics(case))
    return {name: simulate(case, name) for name in names}


def _statics(case: Scenario) -> list[str]:
    return [static_name(split, case.grid) for split in all_splits(case.grid)]


def _moves(run: SimulatedRun) -> tuple[float, float]:
    moves = [step["moves"] for step in run.steps]
    quarter = max(1, len(moves) // 4)
    return statistics.mean(moves[:quarter]), statistics.mean(moves[-quarter:])


def speed(args: argparse.Namespace) -> list[Row]:
    case = scenario("drift-512", f"steps={args.steps}", "prompts=256", *args.overrides)
    began, wall = time.process_time(), time.perf_counter()
    run = simulate(case, "dynamic")
    seconds, wall = time.process_time() - began, time.perf_counter() - wall
    groups = sum(step["drawn"] for step in run.steps)
    print(f"{case.steps} steps of {case.slots} slots, {groups} groups of {case.samples}: {seconds:.0f} s of one core")
    print(f"({wall:.0f} s of wall time; {seconds / case.steps * 1e3:.0f} ms per step)")
    return [{"steps": case.steps, "slots": case.slots, "groups": groups, "cpu_s": seconds, "wall_s": wall}]


TABLES: dict[str, tuple[Callable[[argparse.Namespace], list[Row]], int]] = {
    "drift": (drift, 24),
    "stationary": (stationary, 16),
    "variable": (variable, 40),
    "where-not": (where_not, 0),
    "robust": (robust, 0),
    "unseen": (robust, 0),
    "uneven": (robust, 0),
    "unseen-uneven": (robust, 0),
    "splits": (splits, 0),
    "guarded": (guarded, 16),
    "staleness": (staleness, 24),
    "speed": (speed, 1000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the scenario")
    parser.add_argument("--slots", type=int, choices=(64, 512), default=64, help="for drift")
    parser.add_argument("--judge", action="append", choices=JUDGES, help="for drift; default: all three")
    parser.add_argument("--oracle", action="store_true", help="for drift, at dynamic's oversampling; slow")
    parser.add_argument(
        "--steps", type=int, help="default: drift 24, stationary and guarded 16, variable 40, speed 1000"
    )
    parser.add_argument("--seeds", type=int, help="default: variable, robust and unseen 5, others 3")
    parser.add_argument("--only", help="for robust, unseen and staleness: one scenario; default: all")
    parser.add_argument(
        "--staleness", type=int, action="append", metavar="K", help="for staleness; default: 1, 2 and 4"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file too")
    args = parser.parse_intermixed_args()
    table, steps = TABLES[args.table]
    args.steps = args.steps or steps
    args.seeds = args.seeds or (5 if args.table in ("variable", *HARD) else 3)
    rows = table(args)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
