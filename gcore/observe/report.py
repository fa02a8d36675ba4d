"""After a run: the reward curve and the summary table, both computed only from metrics.jsonl."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gcore.observe.files import replacing
from gcore.observe.metrics import read_rows
from gcore.observe.values import Row, count, duration, held_out_name, kind, number, numbers, stage_times, step_of

FILES = {
    "report": "report.html",
    "samples": "samples.html",
    "reward curve": "reward.png",
    "timeline": "trace.json",
    "TensorBoard": "tensorboard",
}
Ends = tuple[float, ...]  # first and last value; one entry if there is only one value


@dataclass(frozen=True, slots=True)
class Failures:
    """Of the episodes of an environment, for one cause. Failures("game.py:Game", "hung", attempts=3, dropped=1)"""

    environment: str
    cause: str
    attempts: int  # that failed; most begin again
    dropped: int  # samples that were dropped


@dataclass(frozen=True)
class Summary:
    """Summary(steps=150, samples=9600, accuracy=(0.12, 0.81), reward=(0.1, 0.9), total_s=171.0, ...)"""

    steps: int
    samples: int | None
    accuracy: Ends | None
    accuracy_name: str  # "reward" if it is no share
    reward: Ends | None
    total_s: float
    stages: dict[str, float]  # seconds by stage, over the run
    tokens_per_s: float | None
    mfu: float | None  # of training, mean over the steps
    peak_memory_gb: float | None
    peak_rss_mb: float | None
    episodes: int  # in environments
    turns: float | None  # of the policy, per episode
    failures: list[Failures]


def summarize(folder: Path) -> Summary:
    rows = read_rows(folder)
    rl = [row for row in rows if kind(row) != "warm_start"]
    stages: dict[str, float] = {}
    for row in rows:
        times = {"warm start": _seconds(row)} if kind(row) == "warm_start" else stage_times(row)
        for stage, seconds in times.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    samples = numbers(rl, "batch/samples")
    return Summary(
        steps=max((step_of(row) for row in rl), default=0),
        samples=round(sum(samples)) if samples else None,
        accuracy=_first_last(rl, "eval/accuracy"),
        accuracy_name=held_out_name(numbers(rl, "eval/accuracy")),
        reward=_first_last(rl, "reward/mean"),
        total_s=sum(_seconds(row) for row in rows),
        stages={stage: seconds for stage, seconds in stages.items() if seconds > 0},
        tokens_per_s=_tokens_per_s(rl),
        mfu=float(np.mean(shares)) if (shares := numbers(rl, "perf/mfu")) else None,
        peak_memory_gb=max(numbers(rl, "perf/peak_memory_gb"), default=None),
        peak_rss_mb=max(numbers(rl, "controller/peak_rss_mb"), default=None),
        episodes=round(sum(episodes := numbers(rl, "environment/episodes"))),
        turns=float(np.average(turns, weights=episodes))
        if sum(episodes) and len(turns := numbers(rl, "environment/turns")) == len(episodes)
        else None,
        failures=failures_of(rl),
    )


def failures_of(rows: Sequence[Row]) -> list[Failures]:
    """The most frequent first."""
    attempts, dropped = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for row in rows:
        for key in row:
            for counts, start in ((attempts, "environment/cause_"), (dropped, "environment/failed_")):
                if key.startswith(start):
                    name = str(row.get("environment/source", "")), key.removeprefix(start)
                    counts[name] += round(number(row, key) or 0)
    return [Failures(*name, count, dropped[name]) for name, count in attempts.most_common()]


def summary_text(folder: Path) -> str:
    """The summary as plain text, for logs and pipes."""
    facts = summarize(folder)
    lines = _lines(facts)
    if facts.stages:
        by_length = sorted(facts.stages.items(), key=lambda item: -item[1])
        lines.append(("time by stage", ", ".join(f"{stage} {duration(s)}" for stage, s in by_length)))
    files = [(name, folder / file) for name, file in FILES.items()]
    lines += [("run", str(folder)), *((name, str(path)) for name, path in files if path.exists())]
    wide = max(len(name) for name, _ in lines)
    return "\n".join([f"G-Core: {folder.resolve().name}", *(f"  {name:<{wide}}  {value}" for name, value in lines)])


def plot_reward(folder: Path) -> Path | None:
    """reward.png: each step's mean reward, the smoothed curve, and held-out accuracy as dots. None without data."""
    rewards: dict[int, float] = {}
    evals: dict[int, float] = {}
    for row in read_rows(folder):
        for series, key in ((rewards, "reward/mean"), (evals, "eval/accuracy")):
            if kind(row) != "warm_start" and (value := number(row, key)) is not None:
                series[step_of(row)] = value
    if not rewards and not evals:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, and does not touch the user's pyplot state
    axes: Any = figure.subplots()
    if rewards:
        steps, values = list(rewards), list(rewards.values())
        axes.plot(steps, values, color="#7fb3d5", linewidth=0.9, alpha=0.8)
        axes.plot(steps, smooth(values), color="#1f6f8b", linewidth=2.4, label="reward (training)")
    if evals:
        style = {"color": "#e07a3f", "markersize": 7, "markeredgecolor": "white", "markeredgewidth": 1.2}
        axes.plot(
            list(evals),
            list(evals.values()),
            "o",
            label=f"{held_out_name(evals.values())} (held out)",
            zorder=5,
            **style,
        )
        for step in (min(evals), max(evals)):
            axes.annotate(
                f"{evals[step]:.2f}", (step, evals[step]), xytext=(0, 9), textcoords="offset points", ha="center",
                fontsize=9, color="#b4531f", zorder=6,
                bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            )  # fmt: skip
    axes.set_title(folder.resolve().name, loc="left", fontsize=13, fontweight="bold", color="#222222")
    axes.set_xlabel("step", color="#555555")
    axes.tick_params(colors="#555555", length=0)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#cccccc")
    axes.margins(x=0.03, y=0.1)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=9, labelcolor="#333333")
    path = folder / "reward.png"
    with replacing(path) as file:
        figure.savefig(file, format="png")
    return path


def smooth(values: Sequence[float]) -> list[float]:
    """Gaussian smoothing; sigma is 1/30 of the series. Near the ends the weights are renormalised.

    >>> smooth([0.5, 0.5, 0.5])
    [0.5, 0.5, 0.5]
    """
    points, at = np.asarray(values, dtype=float), np.arange(len(values))
    sigma = max(0.5, len(values) / 30)
    weights = (np.exp(-0.5 * ((at - i) / sigma) ** 2) for i in at)  # one row at a time, since runs can be long
    return [float(w @ points / w.sum()) for w in weights]


def _lines(facts: Summary) -> list[tuple[str, str]]:
    changes = ((f"held-out {facts.accuracy_name}", facts.accuracy), ("reward", facts.reward))
    lines = [(name, " -> ".join(f"{value:.3f}" for value in ends)) for name, ends in changes if ends is not None]
    trained = f", {facts.samples:,} samples trained" if facts.samples is not None else ""
    lines.append(("steps", f"{facts.steps}{trained}"))
    lines.append(("total time", f"{duration(facts.total_s)}, without the start of processes"))
    if facts.tokens_per_s is not None:
        lines.append(("tokens/s", count(facts.tokens_per_s)))
    if facts.mfu is not None:
        lines.append(("training MFU", f"{facts.mfu:.1%} of the published dense bfloat16 rate"))
    if facts.episodes:
        per_episode = f", {facts.turns:.1f} turns each" if facts.turns is not None else ""
        lines.append(("episodes", f"{facts.episodes:,}{per_episode}"))
    for failed in facts.failures:
        what = f"{failed.cause} {failed.attempts} times, {failed.dropped} sample(s) dropped"
        lines.append(("failed episodes", f"{failed.environment}: {what}"))
    if facts.peak_memory_gb is not None:
        lines.append(("peak memory", f"{facts.peak_memory_gb:.2f} GB"))
    if facts.peak_rss_mb is not None:
        lines.append(("controller memory", f"{facts.peak_rss_mb:.0f} MB"))
    return lines


def _first_last(rows: Sequence[Row], key: str) -> Ends | None:
    values = numbers(rows, key)
    return (values[0], *values[1:][-1:]) if values else None


def _seconds(row: Row) -> float:
    """Seconds of a row: its step, or its stages if it has no step time (a separate evaluation)."""
    return max(number(row, "timing_s/step") or 0.0, sum(stage_times(row).values()))


def _tokens_per_s(rows: Sequence[Row]) -> float | None:
    """Mean over the whole run, weighted by time, not by step."""
    pairs = [(rate, _seconds(row) or 1.0) for row in rows if (rate := number(row, "perf/tokens_per_s")) is not None]
    return sum(rate * s for rate, s in pairs) / sum(s for _, s in pairs) if pairs else None
