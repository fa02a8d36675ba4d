"""What is asked of an environment before a run, in a process of its own: whether it can be loaded, and its rows, for
`data.train: {task: environment}`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gcore.config.environments import EnvironmentSettings
from gcore.environments.base import Row
from gcore.environments.hosts import Hosts
from gcore.types import EnvironmentFailure, UserError

START_S = 600.0  # an environment may read a large dataset


def rows_of(
    source: str, args: Mapping[str, Any] | None = None, split: str = "train", size: int | None = None
) -> Sequence[Row]:
    """Called in every controller, also while its event loop runs."""
    rows = ThreadPoolExecutor(1).submit(asyncio.run, _rows(source, dict(args or {}), split, size)).result()
    if rows is None:
        raise UserError(
            f"environment.source={source} has no rows; expected a method `rows`, or data.{split} with another dataset"
        )
    return rows


def check(spec: EnvironmentSettings) -> None:
    """UserError if the environment cannot be loaded, or does not take its arguments. No episode begins."""
    ThreadPoolExecutor(1).submit(asyncio.run, _load(spec)).result()


async def _load(spec: EnvironmentSettings) -> None:
    hosts = Hosts(spec, 1)
    try:
        await hosts.ask("runs")
    except EnvironmentFailure as error:
        raise UserError(str(error)) from error
    finally:
        hosts.close()


async def _rows(source: str, args: dict[str, Any], split: str, size: int | None) -> Sequence[Row] | None:
    hosts = Hosts(EnvironmentSettings(source=source, args=args, reset_s=START_S), 1)
    try:
        rows: Sequence[Row] | None = await hosts.ask("rows", split, size)
        return rows
    except EnvironmentFailure as error:
        raise UserError(f"{error} (rows, split={split})") from error
    finally:
        hosts.close()
