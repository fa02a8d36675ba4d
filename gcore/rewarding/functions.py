"""A reward function of the recipe: what it is asked about a group, in the style of its signature.

group ──FunctionSource.answer──> arguments of its calls ──> a worker (workers.py), or a thread of this process
there: worker.py ──> the function ──> Answer
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from gcore.config.rewards import RewardFunction
from gcore.rewarding.signatures import LoadedReward, load_reward
from gcore.rewarding.source import Answer, Source
from gcore.rewarding.worker import await_all, call_all, read_answers
from gcore.types import RewardError, Rollout, UserError

if TYPE_CHECKING:
    from gcore.rewarding.workers import WorkerPool


class FunctionSource(Source):
    """The function is imported and its signature checked here, before the run, wherever it is called: by `pool`, or
    without one in a thread of this process, for debuggers; there, a call that hangs cannot be killed. `timeout_s`: for
    the pool.

    A function may have its own check of this machine: `function.preflight(args)`.
    """

    def __init__(
        self, spec: RewardFunction, attempts: int, key: str, pool: WorkerPool | None = None, timeout_s: float = 0.0
    ):
        super().__init__(spec.name, spec.weight, attempts)
        self.key, self.pool, self.timeout_s = key, pool, timeout_s
        self.origin = spec.path, spec.args, key  # for load_reward, in a worker
        self.loaded = load_reward(*self.origin)

    def check(self, columns: Collection[str]) -> None:
        if missing := self.loaded.missing(columns):
            raise UserError(
                f"rewards.functions: {self.name} needs {', '.join(missing)}; the dataset has "
                f"{', '.join(sorted(columns))} (change its columns, or set the function's args)"
            )
        if preflight := getattr(self.loaded.function, "preflight", None):
            preflight(self.loaded.args)

    async def answer(self, group: Sequence[Rollout]) -> Answer:
        prompt = group[0].prompt
        if missing := self.loaded.missing(prompt.columns):  # a retry would not help
            raise RewardError(f"reward {self.name!r}, prompt {prompt.id}: the row has no column {', '.join(missing)}")
        calls = calls_of(self.loaded, group)
        if self.pool is None:
            return await answer_here(self.loaded, calls, len(group))
        return await self.pool.call(self, calls, len(group))

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


async def answer_here(loaded: LoadedReward, calls: list[dict[str, Any]], siblings: int) -> Answer:
    """Without workers: async functions run on this event loop, all calls at once; sync ones in one thread, in order."""
    if loaded.is_async:
        answers = call_all(loaded, calls)
    else:
        answers = await asyncio.to_thread(call_all, loaded, calls)
    return read_answers(loaded, await await_all(answers), siblings)


def calls_of(loaded: LoadedReward, group: Sequence[Rollout]) -> list[dict[str, Any]]:
    """The arguments of all calls for the group: of one call, or with verl of one per sample. Only what the function
    takes, since it is sent to another process."""
    match loaded.style:
        case "trl":
            calls = [trl_arguments(group)]
        case "openrlhf":
            calls = [_openrlhf_arguments(group)]
        case "verl":
            calls = [_verl_arguments(rollout, loaded.named) for rollout in group]
    return [
        {name: value for name, value in {**call, **loaded.args}.items() if loaded.takes_any or name in loaded.named}
        for call in calls
    ]


def trl_arguments(group: Sequence[Rollout]) -> dict[str, Any]:
    """Columns become lists with one value per sibling. If prompts are messages, completions are messages too, as in
    TRL's conversational datasets. With the columns of the content: for language models `completion_ids`."""
    prompts, of_content = [_raw_prompt(rollout) for rollout in group], dict[str, list[Any]]()
    for rollout in group:
        for name, value in rollout.content.reward_columns().items():
            of_content.setdefault(name, []).append(value)
    completions = [
        rollout.output if isinstance(prompt, str) else [{"role": "assistant", "content": rollout.output}]
        for rollout, prompt in zip(group, prompts, strict=True)
    ]
    return {**_columns(group), "prompts": prompts, "completions": completions, **of_content}


def _openrlhf_arguments(group: Sequence[Rollout]) -> dict[str, Any]:
    return {
        **_columns(group),
        "queries": [rollout.prompt.text + rollout.text for rollout in group],
        "prompts": [rollout.prompt.text for rollout in group],
        "labels": [rollout.prompt.columns.get("answer") for rollout in group],
    }


def _verl_arguments(rollout: Rollout, named: Collection[str]) -> dict[str, Any]:
    """verl forwards no columns: its **kwargs receive only the recipe's arguments."""
    columns = rollout.prompt.columns
    return {
        **{name: value for name, value in columns.items() if name in named},
        "data_source": columns.get("data_source"),
        "solution_str": rollout.output,
        "ground_truth": columns.get("answer"),
        "extra_info": columns.get("extra_info"),
    }


def _columns(group: Sequence[Rollout]) -> dict[str, list[Any]]:
    """The columns of the siblings' prompt, one value per sibling."""
    columns = group[0].prompt.columns
    return {name: [value] * len(group) for name, value in columns.items() if name not in ("prompt", "completion")}


def _raw_prompt(rollout: Rollout) -> Any:
    """The prompt as in the dataset. A Prompt without that column is a string if it has a single user message."""
    if "prompt" in rollout.prompt.columns:
        return rollout.prompt.columns["prompt"]
    match rollout.prompt.messages:
        case ({"role": "user", "content": str(content)},):
            return content
    return list(rollout.prompt.messages)
