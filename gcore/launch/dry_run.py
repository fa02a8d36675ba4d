"""`gcore train --dry-run`: runs all checks, starts no process of the run, and prints what the run would do.

    preflight ──> sizes ──> datasets, one prompt as the model reads it ──> rewards of two answers ──> judges' prompts

The two answers are a made-up one and the reference answer of the row, if it has one. Reward functions and reward
servers are called; functions run in a worker, with their timeout. Reward models and judges are not called: only a run
serves them, and a judge behind a URL may cost money.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gcore.config.judges import RemoteJudge, Teacher
from gcore.config.secrets import hide, learn
from gcore.config.tree import Config
from gcore.content.tokens import Tokens
from gcore.cost.workload import LEAST_SAVED
from gcore.launch.build import Roles
from gcore.launch.build_rewarder import build_rewarder
from gcore.launch.epochs import with_steps
from gcore.launch.footprint import memory_line, node_parts
from gcore.launch.gpu_memory import memory_lines
from gcore.launch.machines import see_cluster
from gcore.launch.pins import pin
from gcore.launch.plan import Plan
from gcore.launch.preflight import DatasetCheck, ReadyRun, answers_per_prompt, make_ready
from gcore.launch.user_code import load_on_step
from gcore.modalities.table import kind_of
from gcore.rewarding.judge import JudgeSource
from gcore.rewarding.rewarder import WeightedRewarder
from gcore.rewarding.source import BadAnswer, Source, TimedOut
from gcore.types import Prompt, RewardError, Rollout, UserError

MADE_UP = ("This is a made-up answer: 42.", "42", "7")  # the first one that the policy could generate is used
LABEL = 13  # width of the names at the left
HEAD_LINES, TAIL_LINES = 14, 6  # shown of a long prompt: its end shows where the model continues
HEAD_CHARS, TAIL_CHARS = 900, 400
TRACE_LINES = 6  # shown of the traceback of a reward that failed


@dataclass(frozen=True, slots=True)
class Score:
    """Values of one reward for the answers. Score("exact", 1.0, values=[0.0, 1.0], failure="", trace="")"""

    name: str
    weight: float
    values: list[float | None]
    failure: str = ""
    trace: str = ""


def dry_run(config: Config) -> None:
    """Prints what a run would do. Raises UserError if a check fails; the results before it are already printed."""
    learn(config.model_dump(mode="json"))
    ready = make_ready(pin(config), see_cluster(config))
    config, plan = ready.config, ready.plan
    if config.run.on_step is not None:
        load_on_step(config.run.on_step)
    counted, about_steps = with_steps(config)
    config = config.model_copy(update={"run": counted})
    *lines, files = plan.lines(config)
    print(*lines, sep="\n")
    _show("memory", _memory(config, plan))
    print(files)
    _show("epochs", *about_steps)
    _show("prefixes", _sharing(config, ready))
    _show("GPU memory", *memory_lines(ready.memory))
    _show("", *filter(None, (ready.mode_note, _decoding(config, plan))))
    print()
    for data in ready.datasets:
        _show(data.key, _dataset(data, config.data.max_prompt_length))
    prompt = next((data.prompt for data in ready.datasets if data.prompt is not None), None)
    failed: list[Score] = []
    if prompt is not None and (why := kind_of(config).unscored):
        print()
        _show("prompt", f"row {prompt.row}: {_one_line(prompt.text)}")
        _show("rewards", why)
    elif prompt is not None:
        failed = _show_prompt(config, plan, ready.tokenizer, prompt)
    for warning in ready.warnings:
        print(f"\nwarning: {hide(warning)}")
    sys.stdout.flush()  # before the error, which goes to stderr
    if failed:
        first, *others = failed
        more = f" ({len(others)} more failed)" if others else ""
        raise UserError(f"reward {first.name!r} fails on row {prompt.row if prompt else 0}: {first.failure}{more}")


def _decoding(config: Config, plan: Plan) -> str:
    """How often the scheduler of an engine is called on a GPU."""
    generation = config.generation
    if not generation.traits.decode_steps or not plan.gpus or config.training.device == "cpu":
        return ""
    library = generation.traits.library
    if generation.tensor_parallel > 1:
        return f"{library}'s scheduler is called for every decoding step: tensor_parallel={generation.tensor_parallel}"
    return f"{library} launches up to {generation.decode_steps} decoding steps at once (generation.decode_steps)"


def _show_prompt(config: Config, plan: Plan, tokenizer: Any, prompt: Prompt) -> list[Score]:
    """Prints the prompt, the two answers and their rewards. Returns the rewards that failed."""
    print()
    where = f"row {prompt.row} as the model reads it, {prompt.content.size:,} tokens"
    _show("prompt", where, *_quoted(prompt.text))
    group = answers(prompt, tokenizer, config.generation.max_response_length)
    titles = ["made-up", "reference"][: len(group)]
    print()
    _show("answers", *(f"{title:<10} {_one_line(rollout.text)}" for title, rollout in zip(titles, group, strict=True)))
    # functions always run in a worker, which enforces the timeout; a local run would call them in threads
    workers = max(1, plan.reward_workers) if config.rewards.functions else 0
    unlogged = config.changed("observe", logs=False)  # do not create the run's folder
    rewarder = build_rewarder(unlogged, replace(plan, reward_workers=workers), Roles())
    try:
        called = [*(spec.name for spec in config.rewards.functions), *(spec.name for spec in config.rewards.http)]
        scores = asyncio.run(_score_all([rewarder.sources[name] for name in called], group))
        print()
        _show("rewards", *_table(config, scores, titles))
        _show("", *_verdict(config, scores, len(group)))
        for score in scores:
            if score.trace:
                print()
                _show(score.name, "the end of its traceback", *_quoted(score.trace))
        return [score for score in [*scores, *_show_judges(config, rewarder, group)] if score.failure]
    finally:
        rewarder.close()


def answers(prompt: Prompt, tokenizer: Any, max_length: int) -> list[Rollout]:
    """Two rollouts as if an engine had sampled them: a made-up answer, and the reference answer if it is a text."""
    column = prompt.columns.get("answer")
    reference = [str(column)] if isinstance(column, str | int | float) else []

    def encoded(text: str) -> Tokens:
        return Tokens.steps(np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32))

    alphabet = getattr(tokenizer, "alphabet", "")  # characters of a built model (model.build)
    candidates = (*MADE_UP, alphabet[-1:]) if alphabet else MADE_UP
    possible = [text for text in candidates if not alphabet or set(text) <= set(alphabet)]
    short_enough = [text for text in possible if text not in reference and encoded(text).num_steps <= max_length]
    group = []
    for sibling, text in enumerate([(short_enough or possible)[0], *reference]):
        response = encoded(text)
        content, zeros = prompt.content.extended(response), np.zeros(response.num_steps)
        steps: dict[str, Any] = {"logprobs_S": zeros.astype(np.float32), "versions_S": zeros.astype(np.int32)}
        group.append(Rollout(prompt, sibling, content, mask_S=zeros == 0, output=text, finish="stop", **steps))
    return group


async def _score_all(sources: Sequence[Source], group: Sequence[Rollout]) -> list[Score]:
    """Call all sources at the same time, once each, as a run does."""
    return await asyncio.gather(*(_score(source, group) for source in sources))


async def _score(source: Source, group: Sequence[Rollout]) -> Score:
    try:
        return Score(source.name, source.weight, (await source.answer(group)).values)
    except (BadAnswer, TimedOut, RewardError, UserError) as error:
        trace = hide("\n".join(getattr(error, "__notes__", ())))
        last = "\n".join(trace.strip().splitlines()[-TRACE_LINES:])
        return Score(source.name, source.weight, [], _reason(error, source.name, group[0].prompt), last)


def _reason(error: Exception, name: str, prompt: Prompt) -> str:
    """The message without the reward and the prompt, which are printed elsewhere."""
    return hide(str(error)).removeprefix(f"reward {name!r}, prompt {prompt.id}: ")


def _show_judges(config: Config, rewarder: WeightedRewarder, group: Sequence[Rollout]) -> Iterator[Score]:
    """Prints the prompt of each judge. Yields a Score for each judge whose prompt cannot be made."""
    for spec in config.rewards.judges:
        if isinstance(spec, Teacher):
            continue  # it has no prompt of its own
        source = rewarder.sources[spec.name]
        assert isinstance(source, JudgeSource)
        print()
        if spec.mode == "pairwise" and len(group) < 2:
            _show("judge", f"{spec.name}: compares two answers, and the row has no reference answer")
            continue
        what = "the two answers" if spec.mode == "pairwise" else "the made-up answer"
        try:
            text = source.preview(group)
        except (RewardError, UserError) as error:
            reason = _reason(error, spec.name, group[0].prompt)
            _show("judge", f"{spec.name} FAILED: {reason}")
            yield Score(spec.name, spec.weight, [], reason)
        else:
            _show("judge", f"prompt of {spec.name} for {what}", *_quoted(text))


# ---- lines ----------------------------------------------------------------------------------------------------


def _memory(config: Config, plan: Plan) -> str:
    """One node: at least 2.2 GB of 24 GB. Several: the same for each of them."""
    nodes = node_parts(config, plan)
    if len(nodes) == 1:
        return memory_line(nodes[0][1], nodes[0][0])
    return "; ".join(f"{node.address} {memory_line(parts, node)}" for node, parts in nodes)


def _sharing(config: Config, ready: ReadyRun) -> str:
    """What training.share_prefixes does with prompts as long as those that were checked."""
    if ready.unshared:
        return f"every sample has its own: {ready.unshared}"
    answers, wanted = answers_per_prompt(config), config.training.share_prefixes
    if answers == 1:
        return "one answer per prompt: nothing to share, unless a workflow makes more"
    prompts = [data.mean for data in ready.datasets if data.key == "data.train" and data.mean]
    when = f"where that saves {LEAST_SAVED:.0%} of an update or more" if wanted == "auto" else "in every update"
    text = f"computed once for siblings {when} (training.share_prefixes={str(wanted).lower()})"
    if not prompts or config.is_offline:
        return text
    whole, response = answers * prompts[0], config.generation.max_response_length
    least = (whole - prompts[0]) / (whole + answers * response)
    return (
        f"{text}: with {answers} siblings and {prompts[0]:.0f} tokens per prompt, {least:.0%} of the tokens if all "
        f"responses have {response}, more if they are shorter"
    )


def _dataset(data: DatasetCheck, limit: int) -> str:
    checked = "all" if data.num_checked == data.num_rows else f"{data.num_checked}"
    text = f"{data.num_rows:,} rows, {checked} checked: the longest prompt has {data.longest:,} tokens"
    if not data.too_long:
        return f"{text}, none is over data.max_prompt_length={limit}"
    rows = ", ".join(map(str, data.too_long[:5])) + (", ..." if len(data.too_long) > 5 else "")
    return f"{text}; {len(data.too_long)} are over data.max_prompt_length={limit} and will be dropped (rows {rows})"


def _table(config: Config, scores: Sequence[Score], titles: Sequence[str]) -> list[str]:
    rewards = config.rewards
    rows = [("reward", "weight", *titles)]
    rows += [
        (s.name, f"{s.weight:g}", *(["FAILED", *[""] * (len(titles) - 1)] if s.failure else map(_number, s.values)))
        for s in scores
    ]
    rows += [(m.name, f"{m.weight:g}", "not called: a model that the run serves") for m in rewards.models]
    source = "environment" if config.environment is not None else "workflow"
    rows += [(name, "-", f"not called: of the {source}") for name in rewards.by_workflow]
    for judge in rewards.judges:
        where = "behind a URL" if isinstance(judge, RemoteJudge) else "that the run serves"
        rows.append((judge.name, f"{judge.weight:g}", f"not called: a judge {where}"))
    wide, narrow = (max(len(row[i]) for row in rows) for i in range(2))
    return [
        f"{name:<{wide}}  {weight:>{narrow}}  {'  '.join(f'{cell:>10}' for cell in cells)}".rstrip()
        for name, weight, *cells in rows
    ]


def _verdict(config: Config, scores: Sequence[Score], num: int) -> list[str]:
    """Compares the two answers: a reference answer should score higher than a made-up one."""
    if any(score.failure for score in scores):
        return [f"FAILED {score.name}: {score.failure}" for score in scores if score.failure]
    if not scores or num < 2:
        return []
    made_up, reference = (sum(s.weight * (s.values[i] or 0.0) for s in scores) for i in range(2))
    called = "" if len(scores) == len(config.rewards.names) else "with the rewards that were called, "
    result = f"{called}the reference answer gets {_number(reference)} and the made-up one {_number(made_up)}"
    if reference > made_up:
        return [f"{result}: as expected"]
    advice = "(is the answer column the right one, in the format that the rewards expect?)"
    return [f"{result}: a reference answer usually gets more", advice]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _quoted(text: str) -> list[str]:
    """The text with a bar before each line, shortened."""
    return [f"│ {line}".rstrip() for line in shortened(hide(text)).split("\n")]


def shortened(text: str) -> str:
    """Head and tail of a long text, and the size of the part between them."""
    lines = text.split("\n")
    if len(lines) > HEAD_LINES + TAIL_LINES + 1:
        left_out = len(lines) - HEAD_LINES - TAIL_LINES
        lines = [*lines[:HEAD_LINES], f"... {left_out} lines ...", *lines[-TAIL_LINES:]]
    text = "\n".join(lines)
    if len(text) > HEAD_CHARS + TAIL_CHARS + 100:
        left_out = len(text) - HEAD_CHARS - TAIL_CHARS
        text = f"{text[:HEAD_CHARS]} ... {left_out:,} characters ... {text[-TAIL_CHARS:]}"
    return text


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 90 else f"{line[:60]} ... {line[-25:]}"


def _show(label: str, *lines: str) -> None:
    """Prints the lines, with the label at the left of the first."""
    for line in lines:
        print(f"{label:<{LABEL}}{hide(line)}")
        label = ""
