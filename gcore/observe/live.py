"""The live panel: a pure function from RunView to a rich renderable, designed for 80 columns and usable in 40.

╭─ G-Core · run ───────────────────────────────────────────╮
│ step    63/150  ━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━  42%     │
│ reward  ▁▁▂▂▃▃▄▅▅▆▆▇▇█  0.812                            │
│ ...                                                      │
╰──────────────────────────────────────────────────────────╯
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gcore.observe.progress import RunView, Status
from gcore.observe.values import count, duration, held_out_name, number, small, sparkline, stage_times

COLORS = {
    "generation": "cyan",
    "environment": "bright_cyan",
    "rewarding": "magenta",
    "preparation": "yellow",
    "training": "green",
    "weights": "blue",
    "checkpoint": "bright_black",
    "eval": "bright_blue",
    "other": "white",
}
LABEL = 10  # width of the names at the left
MAX_WIDTH = 100
FIXED_LINES = 14  # height of the panel without its controllers


def panel(view: RunView, now: float, width: int, height: int) -> Panel:
    width = min(width, MAX_WIDTH)
    inner = max(10, width - 4)
    parts: list[RenderableType] = [*_bars(view, now), *_reward(view, inner), *_numbers(view, inner)]
    if times := stage_times(view.latest):
        took = duration(number(view.latest, "timing_s/step") or sum(times.values()))
        parts += [Text(), *_stage_times(times, took, inner)]
    if view.statuses:
        parts += [Text(), _roles(view.statuses, max(1, height - FIXED_LINES))]
    title = Text.assemble(("G-Core", "bold cyan"), (" · ", "dim"), (view.run_name, "bold"))
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        box=box.ROUNDED,
        border_style="cyan",
        width=width,
        padding=(0, 1),
    )


def _stage_times(times: Mapping[str, float], took: str, width: int) -> Iterator[Text]:
    """A bar divided among the stages in proportion, and below it their seconds. An entry never wraps."""
    bar = Text.assemble((f"{'last step':<{LABEL}} ", "dim"), no_wrap=True)
    cells = width - len(bar) - len(took) - 2
    total, seen, filled = sum(times.values()), 0.0, 0
    for stage, seconds in times.items():
        seen += seconds
        end = round(seen / total * cells)  # rounded cumulatively, so that the bar is always full
        bar.append("█" * (end - filled), style=COLORS[stage])
        filled = end
    yield bar.append(f"  {took}", style="bold")
    line = Text(no_wrap=True)
    for stage, seconds in sorted(times.items(), key=lambda item: -item[1]):
        entry = Text.assemble(("■ ", COLORS[stage]), (f"{stage} ", "dim"), duration(seconds))
        if line and len(line) + 2 + len(entry) > width:
            yield line
            line = Text(no_wrap=True)
        line.append("  " if line else "").append_text(entry)
    yield line


def _bars(view: RunView, now: float) -> list[RenderableType]:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True, min_width=LABEL)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    if view.warming:
        loss = "" if view.warm_loss is None else f"loss {small(view.warm_loss)}"
        grid.add_row(*_bar("warm start", view.warm_step, view.warm_steps, "magenta", loss))
    left = view.seconds_left(now)
    done = view.step >= view.total_steps > 0
    soon = left is not None and left < 60
    tail = "done" if done else "" if left is None else f"{round(left)} s left" if soon else f"{duration(left)} left"
    grid.add_row(*_bar("step", view.step, view.total_steps, "cyan", tail))
    return [grid]


def _bar(name: str, step: int, total: int, color: str, tail: str) -> tuple[RenderableType, ...]:
    label = Text.assemble((f"{name} ", "dim"), (f"{step}", "bold"), (f"/{total}" if total else "", "dim"))
    bar = ProgressBar(max(1, total), min(step, total), style="grey30", complete_style=color, finished_style=color)
    return label, bar, Text(tail, style="dim")


def _reward(view: RunView, inner: int) -> list[RenderableType]:
    rewards = list(view.rewards.values())
    if not rewards:
        return []
    value = f"{rewards[-1]:.3f}"
    line = Text.assemble((f"{'reward':<{LABEL}} ", "dim"), no_wrap=True)
    line.append(sparkline(rewards, inner - LABEL - len(value) - 3), style="green")
    line.append(f"  {value}", style="bold green")
    return [Text(), line]


def _numbers(view: RunView, inner: int) -> list[RenderableType]:
    cells: list[tuple[str, str]] = []
    if view.evals:
        accuracies = list(view.evals.values())
        first, last = f"{accuracies[0]:.3f}", f"{accuracies[-1]:.3f}"
        cells.append((held_out_name(accuracies), first if len(accuracies) == 1 else f"{first} → {last}"))
    shown: list[tuple[str, str, Callable[[float], str]]] = [
        ("tokens/s", "perf/tokens_per_s", count),
        ("grad norm", "actor/grad_norm", small),
        ("length", "response_length/mean", "{:.1f}".format),
        ("entropy", "actor/entropy", small),
        ("kl", "actor/kl", small),
    ]
    cells += [(name, show(v)) for name, key, show in shown if (v := number(view.latest, key)) is not None]
    columns = max(1, min(3, inner // 24))
    grid = Table.grid(padding=(0, 1), expand=True)
    for _ in range(columns):
        grid.add_column(no_wrap=True, min_width=LABEL)
        grid.add_column(no_wrap=True, ratio=1)
    for i in range(0, len(cells), columns):
        line: list[RenderableType] = []
        for name, value in cells[i : i + columns]:
            line += [Text(name, style="dim"), Text(value, style="bold")]
        grid.add_row(*line)
    return [grid] if cells else []


def _roles(statuses: Sequence[Status], room: int) -> RenderableType:
    """One line per controller. If they do not fit, the last line counts the others by stage."""
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True, min_width=LABEL)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, ratio=1)
    shown = statuses if len(statuses) <= room else statuses[: room - 1]
    for status in shown:
        stage = Text.assemble(("● ", COLORS.get(status.stage, "white")), status.stage)
        grid.add_row(Text(status.role, style="dim"), stage, Text(status.detail))
    if hidden := statuses[len(shown) :]:
        stages = ", ".join(f"{n} {stage}" for stage, n in Counter(s.stage for s in hidden).most_common())
        grid.add_row(Text(f"+ {len(hidden)} more", style="dim"), Text(""), Text(stages, style="dim"))
    return grid
