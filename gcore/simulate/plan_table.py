"""The planner's answer for people: verdict first, then memory, time, what dynamic placement wins, and assumptions.

Answer ──> rich renderables; `show` prints them, in colour on a terminal and as plain text into a pipe
"""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gcore.observe.values import count, duration
from gcore.simulate.costs import ENGINE, REACH
from gcore.simulate.estimate import Estimate
from gcore.simulate.planner import Answer

STAGES = {
    "generation": ("generate", "cyan"),
    "rewarding": ("+ judge", "magenta"),
    "swaps": ("swap", "red"),
    "preparation": ("prepare", "yellow"),
    "training": ("train", "green"),
    "weights": ("weights", "blue"),
}  # as the columns say it, and its colour
PARTS = ("weights", "gradients", "optimizer", "activations", "kv_cache", "asleep", "free")
PLAIN_WIDTH = 118
NO_BAR, NO_TOTALS = 116, 94  # terminals narrower than that
BAR = 24


def show(answer: Answer, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    if not console.is_terminal:  # a pipe has no width of its own
        console = Console(file=console.file, width=PLAIN_WIDTH, highlight=False)
    console.print(render(answer, console.width))


def render(answer: Answer, width: int = PLAIN_WIDTH) -> Group:
    parts: list[Any] = [_verdict(answer), _memory(answer)]
    if answer.best is not None:
        parts += [_times(answer, answer.best, width), _wins(answer)]
    return Group(*parts, _assumptions(answer))


def _verdict(answer: Answer) -> Panel:
    best, lines = answer.best, Text()
    if best is None:
        lines.append("does not fit: ", "bold red")
        lines.append("; ".join(answer.problems))
        helps = "; or ".join(answer.changes) or "no single change; try a smaller model, more and larger GPUs"
        lines.append("\nwhat would do: ", "bold")
        lines.append(helps)
    else:
        lines.append("fits", "bold green")
        lines.append(f" · fastest: {best.mode}", "bold")
        lines.append(f" · {duration(best.step_s)} a step · {count(answer.tokens_per_s(best))} tokens/s")
        lines.append(f" · {_money(answer.dollars(best))} a step, {_money(answer.dollars(best, 1000))} per 1000 steps")
        lines.append(f"\n{_split(best)}", "dim")
        for note in best.notes:
            lines.append(f"\n{note}", "dim")
    judges = "".join(f" · judge {shape.name}" for shape in answer.judges)
    title = f"gcore plan · policy {answer.model.name}{judges} · {answer.gpus} x {answer.gpu.title}"
    return Panel(lines, title=title, title_align="left", border_style="green" if best else "red", expand=True)


def _memory(answer: Answer) -> Table:
    table = _table(f"Memory of one GPU, GB of {answer.gpu.memory_gb:.0f}")
    for name in ("phase", "role"):
        table.add_column(name)
    for name in ("tp", "weights", "gradients", "optimizer", "activations", "KV cache", "asleep", "free", "sequences"):
        table.add_column(name, justify="right")
    for fit in answer.memory:
        style = "red" if fit.problem else None
        amounts = [f"{value:.1f}" if (value := getattr(fit, part)) else "·" for part in PARTS]
        width = str(fit.tp) if fit.phase == "rollout" and fit.tp else "·"
        table.add_row(fit.phase, fit.role, width, *amounts, str(fit.sequences) if fit.sequences else "·", style=style)
    return table


def _times(answer: Answer, best: Estimate, width: int) -> Table:
    table = _table("Seconds of a step")
    table.add_column("placement", no_wrap=True)
    totals = ("step", "tokens/s", "$/1000") if width >= NO_TOTALS else ("step",)
    for name in (*(column for column, _ in STAGES.values()), *totals):
        table.add_column(name, justify="right", no_wrap=True)
    slowest = max(found.step_s for found in answer.estimates)
    if width >= NO_BAR:
        table.add_column("", no_wrap=True)
    for found in answer.estimates:
        cells: list[str | Text] = [_seconds(found.stages.get(stage, 0.0)) for stage in STAGES]
        cells.append(_seconds(found.step_s))
        if width >= NO_TOTALS:
            cells += [count(answer.tokens_per_s(found)), _money(answer.dollars(found, 1000))]
        if width >= NO_BAR:
            cells.append(_bar(found, slowest))
        table.add_row(found.mode, *cells, style="bold" if found is best else None)
    return table


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )


def _bar(found: Estimate, slowest: float) -> Text:
    """The step as a bar, by stage; where training runs beside the rollout, only as long as the step."""
    bar, whole = Text(), sum(found.stages.values())
    width, drawn, passed = round(BAR * found.step_s / slowest), 0, 0.0
    for stage, (_, colour) in STAGES.items():
        passed += found.stages.get(stage, 0.0)
        upto = round(width * passed / whole)
        bar.append("█" * (upto - drawn), colour)
        drawn = upto
    return bar


def _wins(answer: Answer) -> Text:
    lines, dynamic = Text(), answer.of("dynamic")
    splits = "\n".join(f"  {found.mode:13} {_split(found)}" for found in answer.estimates)
    lines.append(f"GPUs\n{splits}\n")
    won = {"the best static split": answer.won("static"), "co-location": answer.won("colocated")}
    texts = [f"{share:+.0%} of a step against {name}" for name, share in won.items() if share is not None]
    if dynamic is not None and answer.judges:
        lines.append("dynamic wins, at best: ", "bold")
        lines.append(", ".join(texts) + "\n")
    if answer.drift:
        kept = " and the static split kept" if "static" in answer.drift else ""
        lines.append(f"with responses twice as long{kept}: ", "bold")
        later = sorted(answer.drift.items(), key=lambda item: item[1])
        lines.append(", ".join(f"{mode} {duration(seconds)}" for mode, seconds in later) + "\n")
    return lines


def _assumptions(answer: Answer) -> Text:
    work, gpu = answer.workload, answer.gpu
    judged = f"; verdicts of {work.verdict_length} tokens x {work.repeats}" if answer.judges else ""
    lines = [
        f"step: {work.prompts} prompts x {work.samples}, {work.prompt_length} + {work.response_length} tokens (cut at "
        f"{work.max_response_length}, sigma {work.sigma:g}), acceptance {work.acceptance:g}{judged}",
        f"policy: {answer.model.source}, {answer.model.parameters / 1e9:.1f}B parameters",
        *(f"judge: {shape.source}, {shape.parameters / 1e9:.1f}B parameters" for shape in answer.judges),
        f"GPU: {gpu.bandwidth_gb_s:.0f} GB/s, {gpu.tflops:.0f} TFLOP/s dense; {answer.price:g} $ an hour is a round "
        "assumption (--price)",
        f"reached of that: training {REACH.training:.0%} (measured on an H200 with 1.5B); assumed: decoding "
        f"{REACH.decode_bandwidth:.0%} of bandwidth, prefill {REACH.prefill:.0%}",
        f"engines: bfloat16, at most {ENGINE.max_sequences} sequences a replica; siblings share a prefill",
        f"trainer: FSDP over all GPUs, float32 master weights and Adam, recomputation, {answer.micro_tokens} tokens",
    ]
    if answer.best is not None:
        state = "stays on the GPUs" if answer.resident else "goes to host memory"
        lines.append(f"while engines work, the trainer's state {state}; host memory: {answer.host_gb:.0f} GB a machine")
        bound = "dynamic is a bound: nobody waits while there is work; " if answer.of("dynamic") else ""
        lines.append(f"{bound}nothing here was checked on more than one GPU")
    return Text("assumptions\n" + "\n".join(f"  {line}" for line in lines), "dim")


def _split(found: Estimate) -> str:
    def name(role: str, gpus: int) -> str:
        width = found.tp.get(role)
        return f"{role} {gpus}" + (f" ({gpus // width} x tp {width})" if width else "")

    return (" / " if found.mode == "colocated" else " + ").join(name(*item) for item in found.split.items())


def _seconds(value: float) -> str:
    return "·" if value < 0.005 else f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def _money(dollars: float) -> str:
    return f"${dollars:,.2f}" if dollars < 100 else f"${dollars:,.0f}"
