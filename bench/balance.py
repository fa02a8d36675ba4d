"""Idle time of trainer ranks under four layouts: naive order, the paper's sort, Karmarkar-Karp, and G-Core's.

    python bench/balance.py --write docs/balance.md --json balance.json

Simulated: 2 to 64 ranks, five distributions of lengths, several seeds; costs of a 1.5B model, by its FLOPs; samples of
up to 16,384 tokens; one mini-batch; no padding (as on GPUs). The fifth distribution is measured: the lengths of the
responses in a short run of the quickstart's model with random weights, scaled so that the longest has 16,384 tokens.
Measured: 2 and 4 ranks as processes on the CPU, weights sharded over them. Every micro-batch is timed on every rank, in
CPU seconds of its thread: they count computing and not waiting, also if there are fewer cores than ranks. The idle
shares follow from these times. CPU ranks compute padded rows.

`--write FILE` replaces the part between the two marks in FILE by the tables.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import layouts  # noqa: E402
from bench.common import markdown, run_members, write_between, write_json  # noqa: E402
from gcore.cost.shapes import SHAPES, model_shape  # noqa: E402
from gcore.cost.workload import CostModel, shared_prefixes  # noqa: E402
from gcore.preparation.balance import idle_share, make_layout  # noqa: E402
from gcore.preparation.step_times import shared_tokens  # noqa: E402
from gcore.types import SampleMeta, SampleWork, SharedPrefix, TrainBatch  # noqa: E402

LONGEST = 16384
RANKS = (2, 4, 8, 16, 32, 64)
METHODS = {"naive": layouts.naive, "sort": layouts.sort, "kk": layouts.karmarkar_karp, "ours": None}
TITLES = {"naive": "naive", "sort": "sort", "kk": "Karmarkar-Karp", "ours": "ours", "split": "ours, split"}
BEGIN, END = "<!-- bench/balance.py -->", "<!-- end -->"
MODEL = {"hidden_size": 128, "intermediate_size": 512, "layers": 2, "heads": 4, "kv_heads": 4, "max_length": 544}


# ---- simulated ranks ----------------------------------------------------------------------------------------------


def lognormal(sigma: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, number: rng.lognormal(np.log(1200), sigma, number)


def bimodal(rng: np.random.Generator, number: int) -> np.ndarray:
    """Four of five answers are short, one is a long chain of thought."""
    return np.where(rng.random(number) < 0.8, rng.normal(500, 150, number), rng.normal(9000, 1500, number))


def distributions(run: Sequence[int]) -> dict[str, Callable[[np.random.Generator, int], np.ndarray]]:
    return {
        **{f"log-normal, sigma {sigma}": lognormal(sigma) for sigma in (0.5, 1.0, 1.8)},
        "bimodal": bimodal,
        "a run": lambda rng, number: LONGEST / max(run) * rng.choice(run, number),
    }


def lengths_of_a_run(tokens: int) -> list[int]:
    """Responses of two steps of 64 x 8 samples, of at most `tokens`."""
    from gcore.cli import main

    with tempfile.TemporaryDirectory() as folder:
        keys = {
            **{f"model.build.{name}": value for name, value in MODEL.items()},
            **{"generation.max_response_length": tokens, "run.steps": 2, "run.dir": folder, "runtime": "local"},
            **{"controllers": 1, "training.warm_start": "null", "data.eval": "null", "observe.samples_per_step": 64},
            **{"training.device": "cpu", "observe.trackers": "[]", "observe.progress": "none"},
        }
        recipe = str(ROOT / "recipes" / "quickstart.yaml")
        status = main(["train", recipe, *(f"{key}={value}" for key, value in keys.items())])
        assert not status, status
        rows = [json.loads(line) for path in Path(folder).rglob("samples/*.jsonl") for line in path.open()]
    return [sample["length"] for row in rows for sample in row["samples"]]


def simulated(run: Sequence[int], seeds: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
    cost, found = SHAPES["1.5B"].cost, list[dict[str, Any]]()
    for name, draw in distributions(run).items():
        for number in ranks:
            for per_rank in (16, 64):
                for budget in (LONGEST, 2 * LONGEST):
                    case = {"lengths": name, "ranks": number, "per_rank": per_rank, "budget": budget}
                    found += [one(case, draw, cost, seed) for seed in range(seeds)]
        print(f"{name}: done", file=sys.stderr)
    return found


def one(case: dict[str, Any], draw: Callable[..., np.ndarray], cost: CostModel, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    lengths = draw(rng, case["ranks"] * case["per_rank"]).clip(32, LONGEST).astype(int)
    metas = [SampleMeta(i // 8, i % 8, SampleWork(int(n)), 1, steps=int(n) - 24) for i, n in enumerate(lengths)]
    costs = [cost.of_sample(meta) for meta in metas]
    row = {**case, "seed": seed, "largest": max(costs) * case["ranks"] / sum(costs)}
    request = {"num_ranks": case["ranks"], "max_tokens": case["budget"], "cost": cost, "padded": False}
    for name in TITLES:
        degree = min(8, case["ranks"]) if name == "split" else 1
        method = METHODS.get(name)
        for sharded in (True, False) if method is None else (True,):  # the others do not depend on it
            began = time.thread_time()
            batches = make_layout(
                metas, step=1, mini_batches=1, sharded=sharded, method=method, max_context=degree, **request
            )
            seconds = time.thread_time() - began
            idle = idle_share(batches, metas, cost)
            row[f"{name}_mini"] = idle.per_mini_batch
            if sharded:
                row[f"{name}_s"], row[f"{name}_micro"] = seconds, idle.per_micro_batch
                row[f"{name}_micro_batches"] = len(batches[0].mini_batches[0].micro_batches)
    return row


# ---- groups that share prefixes -----------------------------------------------------------------------------------


def group_of(rng: np.random.Generator, number: int, prompt: int) -> list[SampleMeta]:
    """8 siblings. `prompt`: its tokens; 0: a conversation that branches in three levels."""
    found, turns = list[SampleMeta](), [int(rng.lognormal(np.log(600), 0.5)) for _ in range(2)]
    start = prompt or int(rng.integers(256, 1024))
    for i in range(8):
        shared = [SharedPrefix(0, start)]
        if not prompt:
            first = start + turns[i // 4]
            shared += [SharedPrefix(i // 4 * 4, first), SharedPrefix(i // 2 * 2, first + 400)]
        above = shared[-1].tokens
        size = above + int(np.clip(rng.lognormal(np.log(1200), 1.0), 32, LONGEST - above))
        work, steps = SampleWork(size), size - start
        found.append(SampleMeta(number, i, work, 1, steps=steps, shared=tuple(shared)))
    return found


def trees(seeds: int, ranks: int = 64) -> str:
    """Layouts of groups that share prefixes (training.share_prefixes=auto), sharded weights."""
    cost, lines = SHAPES["1.5B"].cost, list[list[Any]]()
    kinds = {"prompts of 512": 512, "prompts of 2,048": 2048, "branches of three levels": 0}
    for (name, prompt), per_rank, budget in itertools.product(kinds.items(), (64, 16), (LONGEST, 2 * LONGEST)):
        rows = []
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            metas = [meta for number in range(ranks * per_rank // 8) for meta in group_of(rng, number, prompt)]
            request: dict[str, Any] = {"step": 1, "mini_batches": 1, "padded": False, "sharded": True, "cost": cost}
            request |= {"num_ranks": ranks, "max_tokens": budget}
            began = time.thread_time()
            batches = make_layout(metas, shares="auto", **request)
            seconds, whole = time.thread_time() - began, make_layout(metas, **request)
            groups = [list(own) for _, own in itertools.groupby(metas, key=lambda meta: meta.prompt_id)]
            most = sum(prefix.tokens for own in groups for prefix in shared_prefixes(own))
            idle, before = (idle_share(each, metas, cost).per_micro_batch for each in (batches, whole))
            saved = shared_tokens(batches, metas)
            rows.append((before, idle, saved, most / sum(meta.length for meta in metas), seconds))
        *means, _ = (percent(statistics.mean(column)) for column in zip(*rows, strict=True))
        lines.append([name, per_rank, budget, *means, f"{max(row[-1] for row in rows):.1f}"])
    head = ["groups of 8", "samples per rank", "budget", "idle, whole samples", "idle", "tokens saved", "at most", "s"]
    return markdown(head, lines)


# ---- ranks on the CPU ---------------------------------------------------------------------------------------------


def samples_of(ranks: int) -> list[Any]:
    from gcore.content.tokens import Tokens
    from gcore.types import Sample

    rng, found = np.random.default_rng(0), []
    for i, length in enumerate(rng.lognormal(4.2, 1.0, 24 * ranks).clip(12, 512).astype(int)):
        steps = int(length) - 8
        tokens = Tokens.split(rng.integers(4, 16, length).astype(np.int32), steps)
        mask, logprobs = np.ones(steps, bool), np.full(steps, -2.7, np.float32)
        found.append(Sample(i // 8, i % 8, tokens, mask, logprobs, reward=float(rng.normal())))
    return found


def layout_for(name: str, samples: Sequence[Any], ranks: int, cost: CostModel) -> list[TrainBatch]:
    from gcore.preparation.samples import meta_of

    metas = [meta_of(sample) for sample in samples]
    given: dict[str, Any] = {"step": 1, "num_ranks": ranks, "mini_batches": 1, "max_tokens": 1024, "cost": cost}
    return make_layout(metas, sharded=True, method=METHODS[name], **given)


def member(rank: int, ranks: int, address: str, rounds: int) -> dict[str, list[list[float]]]:
    """One rank. Returns CPU seconds, method -> round -> position."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    from gcore.config.load import load_config
    from gcore.models.networks import load_model
    from gcore.prompts.tokenizer import load_tokenizer
    from gcore.protocols import Rendezvous
    from gcore.runtime.gloo import join
    from gcore.training import objective
    from gcore.training.backend import NewNetwork
    from gcore.training.fsdp import FsdpBackend
    from gcore.training.objective import StepData

    torch.set_num_threads(1)
    join(Rendezvous(rank, ranks, address), "gloo", timeout_s=600)
    keys = [f"model.build.{name}={value}" for name, value in MODEL.items()]
    config = load_config(ROOT / "recipes" / "quickstart.yaml", keys)
    cpu, tokenizer = torch.device("cpu"), load_tokenizer(config.model)
    make = partial(load_model, config.model, tokenizer, 0, torch.float32, cpu)
    backend = FsdpBackend(config, {"policy": NewNetwork(make)}, cpu, torch.float32, shard=ranks)
    samples, cost = samples_of(ranks), model_shape(config.model, "model").cost
    data = StepData({sample.key: sample for sample in samples})
    data.columns["advantages"] = {s.key: torch.full((s.num_steps,), s.reward) for s in samples}
    found: dict[str, list[list[float]]] = {name: [] for name in METHODS}
    for turn in range(rounds + 1):
        for name in METHODS:
            mini = layout_for(name, samples, ranks, cost)[rank].mini_batches[0]
            loss, seconds = objective.policy(config.algorithm, mini, 512), list[float]()
            for micro in mini.micro_batches:
                began = time.thread_time()
                backend.forward_backward((micro,), data, loss)
                seconds.append(time.thread_time() - began)
            backend.step(0.0)
            if turn:  # the first round warms up
                found[name].append(seconds)
    return found


def measured(ranks: int, rounds: int) -> list[dict[str, Any]]:
    times, rows = run_members(member, ranks, rounds), []
    for name in METHODS:
        busy = np.array([t[name] for t in times])  # rank x round x position
        total, busiest = busy.sum((0, 2)), busy.sum(2).max(0)
        rows.append(
            {
                "ranks": ranks,
                "method": name,
                "micro_batches": busy.shape[2],
                "cpu_s": statistics.median(total),
                "micro": statistics.median(1 - total / (ranks * busy.max(0).sum(1))),
                "mini": statistics.median(1 - total / (ranks * busiest)),
            }
        )
    return rows


# ---- tables -------------------------------------------------------------------------------------------------------


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.mean(row[key] for row in rows)


def simulated_table(rows: Sequence[dict[str, Any]], ranks: Sequence[int], per_rank: int, sync: str) -> str:
    head = ["lengths", "ranks", "budget", "largest", *TITLES.values(), "worst of ours", "micro-batches"]
    lines = []
    cases = dict.fromkeys((r["lengths"], r["ranks"], r["budget"]) for r in rows if r["ranks"] in ranks)
    for name, number, budget in cases:
        case = {"lengths": name, "ranks": number, "budget": budget, "per_rank": per_rank}
        same = [r for r in rows if all(r[key] == value for key, value in case.items())]
        idle = [percent(mean(same, f"{method}_{sync}")) for method in TITLES]
        worst = percent(max(r[f"ours_{sync}"] for r in same))
        counts = " / ".join(f"{mean(same, f'{m}_micro_batches'):.0f}" for m in ("sort", "kk", "ours"))
        lines.append([name, number, budget, f"{mean(same, 'largest'):.2f}", *idle, worst, counts])
    return markdown(head, lines)


def measured_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["ranks", "layout", "idle, per micro-batch", "idle, per mini-batch", "CPU s of all ranks", "micro-batches"]
    lines = [
        [r["ranks"], TITLES[r["method"]], *(percent(r[name]) for name in ("micro", "mini")), f"{r['cpu_s']:.2f}"]
        for r in rows
    ]
    return markdown(head, [[*line, row["micro_batches"]] for line, row in zip(lines, rows, strict=True)])


def report(rows: Sequence[dict[str, Any]], cpu: Sequence[dict[str, Any]], seeds: int) -> str:
    ranks = sorted({r["ranks"] for r in rows})
    shown, most = [n for n in (2, 8, 64) if n in ranks], ranks[-1]
    last = [r for r in rows if r["ranks"] == most and r["per_rank"] == 64]
    slowest = {name: max(r[f"{name}_s"] for r in last) for name in ("kk", "ours", "split")}
    parts = [
        f"Idle share in %, mean of {seeds} seeds, 64 samples per rank. Ranks meet in every micro-batch (sharded "
        "weights):",
        simulated_table(rows, shown, 64, "micro"),
        f"The same with 16 samples per rank, {most} ranks:",
        simulated_table(rows, [most], 16, "micro"),
        f"Ranks meet once per mini-batch (weights not sharded), 64 samples per rank, {most} ranks:",
        simulated_table(rows, [most], 64, "mini"),
        f"Longest time to compute a layout of {64 * most} samples on {most} ranks: ours {slowest['ours']:.2f} s, ours "
        f"with split samples {slowest['split']:.2f} s, Karmarkar-Karp {slowest['kk']:.2f} s (CPU seconds of one "
        f"thread, {platform.machine()}).",
    ]
    if cpu:
        parts += ["Measured on CPU ranks, idle share in %, median of the rounds:", measured_table(cpu)]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5, help="of the measured ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="simulated")
    parser.add_argument("--cpu-ranks", type=int, nargs="*", default=(2, 4), help="real processes")
    parser.add_argument("--run-tokens", type=int, default=512, help="longest response of the run")
    parser.add_argument("--write", type=Path, help="a page with the two marks")
    parser.add_argument("--trees", action="store_true", help="only groups that share prefixes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.trees:
        print(trees(args.seeds))
        return
    run = lengths_of_a_run(args.run_tokens)
    cpu = [row for ranks in args.cpu_ranks for row in measured(ranks, args.rounds)]
    rows = simulated(run, args.seeds, args.ranks)
    text = report(rows, cpu, args.seeds)
    print(text)
    if args.write:
        write_between(args.write, BEGIN, END, f"\n{text}\n")
    write_json(args.json, {"simulated": rows, "measured": cpu, "run": run})


if __name__ == "__main__":
    main()
