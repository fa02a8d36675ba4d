"""An environment in the style of the library verifiers, which is not needed: guess a number, told higher or lower.

    gcore train examples/number_game.yaml

The policy writes a digit, the environment answers < (the number is smaller) or > (larger), for up to four turns. What
the environment says is masked from the loss. The reward is that of the rubric: higher for fewer guesses.
"""

from __future__ import annotations

from typing import Any

MOST = 4


class Rubric:
    """Reward functions and their weights. A function takes those of the arguments that it names."""

    def __init__(self) -> None:
        self.funcs, self.weights = [self.found, self.fast], [1.0, 0.2]

    def found(self, completion: list[dict[str, Any]], answer: str) -> float:
        return float(completion[-1]["content"] == answer)

    def fast(self, completion: list[dict[str, Any]], answer: str) -> float:
        return self.found(completion, answer) * (1 - len(completion) / (2 * MOST))


class NumberGame:
    """What gcore/environments/verifiers.py asks for: a dataset, env_response, is_completed and a rubric."""

    max_turns = MOST

    def __init__(self) -> None:
        self.dataset = [{"question": "?", "answer": str(number)} for number in range(10)]
        self.rubric = Rubric()

    async def is_completed(self, messages: list[dict[str, Any]], state: dict[str, Any]) -> bool:
        return messages[-1]["content"] == state["answer"]

    async def env_response(self, messages: list[dict[str, Any]], state: dict[str, Any]) -> list[dict[str, Any]]:
        guess = messages[-1]["content"]
        smaller = guess.isdigit() and int(state["answer"]) < int(guess)
        return [{"role": "user", "content": "<" if smaller else ">"}]
