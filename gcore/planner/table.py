"""Prints the result of the planner: summary, memory, time, savings of dynamic placement, assumptions.

PlanResult ──> rich renderables; `show` prints them, in colour on a terminal and as plain text into a pipe
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gcore.cost.backends import PARTS as BACKEND_PARTS
from gcore.cost.backends import Layout
from gcore.cost.costs import ENGINE, GB, REACH, Gpu, Shape
from gcore.cost.training_memory import COMFORTABLE, PART_TITLES, Choice
from gcore.cost.training_memory import PARTS as PARTS_OF_RANK
from gcore.observe.tables import PLAIN_WIDTH, console, table
from gcore.observe.values import count, duration
from gcore.planner.plan import PlanResult
from gcore.planner.steps import Estimate

STAGES = {
    "generation": ("generate", "cyan"),
    "rewarding": ("+ judge", "magenta"),
    "swaps": ("swap", "red"),
    "preparation": ("prepare", "yellow"),
    "training": ("train", "green"),
    "weights": ("weights", "blue"),
}  # stage -> column title, colour
PARTS = ("weights", "gradients", "optimizer", "activations", "kv_cache", "asleep", "free")
NO_BAR, NO_TOTALS = 116, 94  # narrower terminals omit the bar, the totals
BAR = 24


def show(result: PlanResult) -> None:
    out = console()
    out.print(render(result, out.width))


def show_memory(results: Sequence[PlanResult]) -> None:
    """Memory of a trainer rank: by phase for the first result, and one line for each. The highest phase is one of the
    update: in the others, engines use what is left."""
    first = results[0]
    text = ("checkpointing", "off-load", "highest phase")
    columns = ("tp", "shard", "tokens", *text, "GB", f"of {first.gpu.memory_gb:.0f}", "host GB", "KV cache GB", "fits")
    title = f"{first.model.name} on {first.gpus} x {first.gpu.title}: GPU of a trainer rank"
    ranks = table(title, columns, (*text, "fits"))
    for result in results:
        choice, rank, policy = result.trainer, result.trainer.rank, result.memory[0]
        update = {
            phase: sum(parts.values()) for phase, parts in choice.gpu.items() if phase not in ("start", "rollout")
        }
        worst = max(update, key=lambda phase: update[phase])
        peak = update[worst] / GB
        ranks.add_row(
            *(str(rank.tensor_parallel), str(rank.shard), str(rank.max_tokens)),
            *("on" if rank.checkpointing else "off", rank.offload, worst),
            *(f"{peak:.1f}", f"{peak / first.gpu.memory_gb:.0%}"),
            *(f"{choice.host_peak / GB:.1f}", f"{policy.kv_cache:.1f}", "no" if result.problems else "yes"),
            style="red" if result.problems else None,
        )
    console().print(_rank_memory(first.trainer), ranks, *first.problems)


def show_backends(shape: Shape, gpu: Gpu, fastest: Sequence[Sequence[Layout]]) -> None:
    """The fastest layout of each backend, one line each, by number of GPUs."""
    shorter = {
        "gradients": "grads",
        "optimizer": "optim.",
        "reference": "ref.",
        "activations": "activ.",
        "temporary": "temp.",
    }
    parts = (shorter.get(name, name) for name in BACKEND_PARTS)
    layouts = table(
        f"{shape.name} on {gpu.title}: GB of the fullest rank, of {gpu.memory_gb:.0f}; seconds of an update",
        ("GPUs", "backend", "tp", "pp", "ep", "data", "redo", *parts, "sum", "fits", "bubble", "seconds"),
        text=("GPUs", "backend"),
    )
    for layout in (layout for ways in fastest for layout in ways):
        ways, fits = layout.topology, layout.total <= COMFORTABLE * gpu.memory_gb * GB
        layouts.add_row(
            *(str(ways.ranks), layout.backend, str(ways.tensor), str(ways.pipeline), str(ways.expert)),
            *(str(ways.data_parallel), "yes" if layout.checkpointing else "no"),
            *(_gb(layout.parts[name]) for name in BACKEND_PARTS),
            *(f"{layout.total / GB:.1f}", "yes" if fits else "no"),
            f"{layout.bubble:.0%}" if layout.bubble else "·",
            _seconds(layout.update_s),
            style=None if fits else "red",
        )
    console().print(
        layouts,
        "redo: layers are computed again in the backward pass. The trainer alone, without engines or off-load. Times "
        "are estimates: both backends at the efficiency that was measured for FSDP2, 1.5B, on one H200.",
    )


def render(result: PlanResult, width: int = PLAIN_WIDTH) -> Group:
    parts: list[Any] = [_summary(result), _memory(result), _rank_memory(result.trainer)]
    if result.best is not None:
        parts += [_times(result, result.best, width), _savings(result)]
    return Group(*parts, _assumptions(result))


def _summary(result: PlanResult) -> Panel:
    best, lines = result.best, Text()
    if best is None:
        lines.append("does not fit: ", "bold red")
        lines.append("; ".join(result.problems))
        helps = "; or ".join(result.changes) or "no single change; try a smaller model, more and larger GPUs"
        lines.append("\nwhat would fit: ", "bold")
        lines.append(helps)
    else:
        lines.append("fits", "bold green")
        lines.append(f" · fastest: {best.mode}", "bold")
        lines.append(f" · {duration(best.step_s)} per step · {count(result.tokens_per_s(best))} tokens/s")
        lines.append(f" · {_money(result.dollars(best))} per step, {_money(result.dollars(best, 1000))} per 1000 steps")
        lines.append(f"\n{_split(best)}", "dim")
        for note in best.notes:
            lines.append(f"\n{note}", "dim")
    judges = "".join(f" · judge {shape.name}" for shape in result.judges)
    title = f"gcore plan · policy {result.model.name}{judges} · {result.gpus} x {result.gpu.title}"
    return Panel(lines, title=title, title_align="left", border_style="green" if best else "red", expand=True)


def _memory(result: PlanResult) -> Table:
    numbers = (*("tp", "weights", "gradients", "optimizer", "activations", "KV cache", "asleep", "free", "sequences"),)
    roles = table(
        f"Memory of one GPU, GB of {result.gpu.memory_gb:.0f}", ("phase", "role", *numbers), text=("phase", "role")
    )
    for memory in result.memory:
        amounts = [_amount(getattr(memory, part)) for part in PARTS]
        tp, sequences = (str(value or "·") for value in (memory.tp, memory.sequences))
        style = "red" if memory.problem else None
        roles.add_row(memory.phase, memory.role, tp, *amounts, sequences, style=style)
    return roles


def _amount(gigabytes: float) -> str:
    """Only what is free may be negative."""
    return f"{-gigabytes:.1f} missing" if gigabytes < 0 else f"{gigabytes:.1f}" if gigabytes else "·"


def _rank_memory(choice: Choice) -> Table:
    """Every phase of a trainer rank, by part."""
    rank = choice.rank
    text = f"shard {rank.shard}, tp {rank.tensor_parallel}, {rank.max_tokens} tokens, {_decided(choice)}"
    names = [name for name in PARTS_OF_RANK if any(parts.get(name) for parts in choice.gpu.values())]
    columns = ("phase", *(PART_TITLES.get(name, name) for name in names), "sum")
    phases = table(f"GPU of a trainer rank, GB ({text})", columns, text=("phase",))
    for phase, parts in choice.gpu.items():
        amounts = [_gb(parts.get(name, 0.0)) for name in names]
        style = "bold" if phase == choice.worst else None
        phases.add_row(phase, *amounts, f"{sum(parts.values()) / GB:.1f}", style=style)
    return phases


def _decided(choice: Choice) -> str:
    return f"checkpointing {'on' if choice.rank.checkpointing else 'off'}, off-load {choice.rank.offload}"


def _times(result: PlanResult, best: Estimate, width: int) -> Table:
    totals = ("step", "tokens/s", "$/1000") if width >= NO_TOTALS else ("step",)
    stages = (column for column, _ in STAGES.values())
    times = table("Seconds per step", ("placement", *stages, *totals), text=("placement",))
    slowest = max(estimate.step_s for estimate in result.estimates)
    if width >= NO_BAR:
        times.add_column("", no_wrap=True)
    for estimate in result.estimates:
        cells: list[str | Text] = [_seconds(estimate.stages.get(stage, 0.0)) for stage in STAGES]
        cells.append(_seconds(estimate.step_s))
        if width >= NO_TOTALS:
            cells += [count(result.tokens_per_s(estimate)), _money(result.dollars(estimate, 1000))]
        if width >= NO_BAR:
            cells.append(_bar(estimate, slowest))
        times.add_row(estimate.mode, *cells, style="bold" if estimate is best else None)
    return times


def _bar(estimate: Estimate, slowest: float) -> Text:
    """The step as a bar, by stage. The whole bar has the length of the step, also if training runs in parallel."""
    bar, whole = Text(), sum(estimate.stages.values())
    width, drawn, passed = round(BAR * estimate.step_s / slowest), 0, 0.0
    for stage, (_, colour) in STAGES.items():
        passed += estimate.stages.get(stage, 0.0)
        upto = round(width * passed / whole)
        bar.append("█" * (upto - drawn), colour)
        drawn = upto
    return bar


def _savings(result: PlanResult) -> Text:
    lines, dynamic = Text(), result.of("dynamic")
    splits = "\n".join(f"  {estimate.mode:13} {_split(estimate)}" for estimate in result.estimates)
    lines.append(f"GPUs\n{splits}\n")
    saved = {"the best static split": result.saved_over("static"), "co-location": result.saved_over("colocated")}
    texts = [f"{share:+.0%} of the step over {name}" for name, share in saved.items() if share is not None]
    if dynamic is not None and result.judges:
        lines.append("dynamic saves: ", "bold")
        lines.append(", ".join(texts) + "\n")
    if result.drift:
        kept = " and the same static split" if "static" in result.drift else ""
        lines.append(f"with responses twice as long{kept}: ", "bold")
        later = sorted(result.drift.items(), key=lambda item: item[1])
        lines.append(", ".join(f"{mode} {duration(seconds)}" for mode, seconds in later) + "\n")
    return lines


def _assumptions(result: PlanResult) -> Text:
    work, gpu, rank = result.workload, result.gpu, result.trainer.rank
    judged = f"; verdicts of {work.verdict_length} tokens x {work.repeats}" if result.judges else ""
    lines = [
        f"step: {work.prompts} prompts x {work.samples}, {work.prompt_length} + {work.response_length} tokens (cut at "
        f"{work.max_response_length}, sigma {work.sigma:g}), acceptance {work.acceptance:g}{judged}",
        f"policy: {result.model.source}, {result.model.parameters / 1e9:.1f}B parameters",
        *(f"judge: {shape.source}, {shape.parameters / 1e9:.1f}B parameters" for shape in result.judges),
        f"GPU: {gpu.bandwidth_gb_s:.0f} GB/s, {gpu.tflops:.0f} TFLOP/s dense; price: {result.price:g} $ per hour, a "
        "rough assumption (--price)",
        f"efficiency: training {REACH.training:.0%} of FLOP/s, {REACH.training_recomputed:.0%} with checkpointing "
        f"(1.5B on an H200); assumed: decoding {REACH.decode_bandwidth:.0%}, prefill {REACH.prefill:.0%}",
        f"engines: bfloat16, at most {ENGINE.max_sequences} sequences per replica; siblings share a prefill",
        f"training: {_sharing(result)}",
        f"trainer: FSDP over {rank.shard} ranks x tp {rank.tensor_parallel}, float32 weights and AdamW, "
        + _decided(result.trainer),
    ]
    if result.best is not None:
        where = {
            "none": "the trainer's state stays on the GPUs",
            "optimizer": "the moments are in host memory",
            "all": "the trainer's state is in host memory",
        }
        lines.append(f"during the rollout, {where[rank.offload]}; host memory: {result.host_gb:.0f} GB per machine")
        lines.append("rollouts are forecasts, as those of runs; no number was checked on more than one GPU")
    return Text("assumptions\n" + "\n".join(f"  {line}" for line in lines), "dim")


def _sharing(result: PlanResult) -> str:
    work, shared = result.workload, result.shared_prompts
    saved = shared * work.prompt_length
    if not saved:
        return f"{count(work.trained_tokens)} tokens; siblings do not share their prompt (training.share_prefixes)"
    return (
        f"{count(work.trained_tokens - saved)} of {count(work.trained_tokens)} tokens are computed, {count(saved)} "
        "are those of siblings (training.share_prefixes)"
    )


def _split(estimate: Estimate) -> str:
    def name(role: str, gpus: int) -> str:
        width = estimate.tp.get(role)
        return f"{role} {gpus}" + (f" ({gpus // width} x tp {width})" if width else "")

    return (" / " if estimate.mode == "colocated" else " + ").join(name(*item) for item in estimate.split.items())


def _gb(size: float) -> str:
    return f"{size / GB:.1f}" if size else "·"


def _seconds(value: float) -> str:
    return "·" if value < 0.005 else f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def _money(dollars: float) -> str:
    return f"${dollars:,.2f}" if dollars < 100 else f"${dollars:,.0f}"
