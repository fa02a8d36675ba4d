"""Environments of Gymnasium, `gym:ID`: `gymnasium.make(ID, **environment.args)`.

Observations that are text are used as they are; others are written as JSON. The action is the last word of the policy's
turn, for spaces of text the whole turn, for others JSON. A turn that is no action gets a text that says so, and costs a
turn. Rows are seeds: the prompt of a row is what `reset` shows for its seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gcore.environments.base import Call, Observation, Opening, Row
from gcore.environments.own import EVAL_SEED, ROWS, OwnEpisode, observation
from gcore.types import UserError


def load(name: str, args: dict[str, Any]) -> GymEnvironment:
    return GymEnvironment(name, args)


class GymEnvironment:
    runs = False

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        import gymnasium

        self._name, self._args, self._library = name, args, gymnasium
        try:
            self._make().close()
        except (gymnasium.error.Error, TypeError) as error:
            raise UserError(f"environment.source=gym:{name}: {' '.join(str(error).split())}") from error

    def _make(self) -> Any:
        return self._library.make(self._name, **self._args)

    def rows(self, split: str, size: int | None) -> Sequence[Row]:
        made, first = self._make(), EVAL_SEED if split == "eval" else 0
        seeds = range(first, first + (size or ROWS))
        rows = [{"prompt": shown(made.reset(seed=seed)[0]), "seed": seed} for seed in seeds]
        made.close()
        return rows

    def episode(self) -> GymEpisode:
        return GymEpisode(self._make)


class GymEpisode(OwnEpisode):
    async def reset(self, row: Row, seed: int) -> Opening:
        self._game = await self._call(self._make)
        said, _ = await self._call(self._game.reset, seed=seed)
        return Opening(shown(said))

    async def step(self, text: str, calls: Sequence[Call]) -> Observation:
        space = self._game.action_space
        action, expected = parsed(text, space)
        if action is None or not space.contains(action):
            return Observation(f"{text.strip()[-40:]!r} is no action; expected {expected}", 0.0)
        said, *others = await self._call(self._game.step, action)
        return observation((shown(said), *others))


def parsed(text: str, space: Any) -> tuple[Any, str]:
    """The action, or None, and what is expected."""
    match type(space).__name__:
        case "Text":
            return text.strip(), str(space)
        case "Discrete":
            words = text.split()
            word = words[-1].strip(".,!") if words else ""
            number = space.dtype.type(int(word)) if word.lstrip("-").isdigit() else None
            return number, f"a number from {space.start} to {space.start + space.n - 1}"
    try:
        value = json.loads(text)
    except ValueError:
        return None, f"JSON for {space}"
    import numpy as np

    return (np.asarray(value, space.dtype) if hasattr(space, "shape") and space.shape else value), f"JSON for {space}"


def shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=lambda other: other.tolist() if hasattr(other, "tolist") else str(other))
