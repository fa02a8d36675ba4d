"""Environments of verifiers since 0.2, `verifiers:NAME`: NAME is the `taskset.id` of the library's configuration.

    environment.args:   the rest of the library's configuration of an environment, such as
                        {agent: {harness: {id: null}, runtime: {type: subprocess}}}

The library runs the agent's program in its own runtime. What the program asks of the model goes through the library's
server to the policy's endpoint, which records tokens. The reward is the sum over the traces of the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Sequence
from typing import Any

from gcore.environments.base import Call, Observation, Opening, Policy, Row, Trouble
from gcore.environments.own import ROWS, short
from gcore.types import UserError
from gcore.user_files import one_line

TASK = "verifiers_task"  # column: number of the row's task


def load(name: str, args: dict[str, Any]) -> V1Environment:
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    tree = {**args, "taskset": {**args.get("taskset", {}), "id": name}}
    try:
        return V1Environment(load_environment(resolve_env_config(tree)))
    except Exception as error:
        raise UserError(f"environment.source=verifiers:{name}: {one_line(error)} (got args {args})") from error


class V1Environment:
    runs = True

    def __init__(self, env: Any) -> None:
        self.env = env
        self._tasks: dict[int, Any] = {}
        self._serving: contextlib.AsyncExitStack | None = None
        self._starting = asyncio.Lock()

    def rows(self, split: str, size: int | None) -> Sequence[Row]:
        """Its tasks; of an endless taskset `size`, or 200. It has no splits."""
        most = size or (None if self.env.taskset.bounded else ROWS)
        return [self._row(task) for task in itertools.islice(self.env.taskset, most)]

    def _row(self, task: Any) -> Row:
        data = task.data
        prompt = data.prompt
        if prompt is not None and not isinstance(prompt, str):
            prompt = [m.model_dump(exclude_none=True) if hasattr(m, "model_dump") else dict(m) for m in prompt]
        return {"prompt": prompt or f"task {data.idx}", TASK: data.idx}

    def episode(self) -> V1Episode:
        return V1Episode(self)

    def task(self, number: int) -> Any:
        if number not in self._tasks:
            for task in self.env.taskset:
                self._tasks[task.data.idx] = task
                if task.data.idx >= number:
                    break
        return self._tasks[number]

    async def serve(self) -> None:
        """The library's servers, once per process."""
        async with self._starting:
            if self._serving is None:
                self._serving = contextlib.AsyncExitStack()
                await self._serving.enter_async_context(self.env.serving())


class V1Episode:
    def __init__(self, environment: V1Environment) -> None:
        self._environment = environment

    async def reset(self, row: Row, seed: int) -> Opening:
        raise NotImplementedError

    async def step(self, text: str, calls: Sequence[Call]) -> Observation:
        raise NotImplementedError

    async def run(self, row: Row, seed: int, policy: Policy) -> Observation:
        from verifiers.v1 import EvalClientConfig, ModelContext

        await self._environment.serve()
        variable = f"GCORE_POLICY_{abs(hash(policy.api_key)):x}"  # the library reads keys from the environment
        os.environ[variable] = policy.api_key
        client = EvalClientConfig(base_url=policy.base_url, api_key_var=variable)
        task = self._environment.task(int(row[TASK]))
        made = await self._environment.env.run_episode(task, ModelContext(policy.model, client))
        errors = [*made.errors, *(error for trace in made.traces for error in getattr(trace, "errors", ()))]
        if not made.ok:
            why = errors[-1].message if errors else "it did not complete"
            raise Trouble("agent_crashed", f"{type(self._environment.env).__name__}: {short(why)}")
        metrics = {
            name: float(value)
            for trace in made.traces
            for name, value in getattr(trace, "metrics", {}).items()
            if isinstance(value, int | float)
        }
        return Observation(None, float(sum(trace.reward for trace in made.traces)), True, metrics)

    async def close(self) -> None:
        pass
