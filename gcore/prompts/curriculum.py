"""The order in which prompts are drawn, by their pass rates.

    order(first number of a step) ──> rows of the step      update(groups of the step) ──> running pass rates

The order is a function of (seed, number, pass rates). All controllers add the same groups in the same order, so it is
the same in each of them, for any number of controllers and after a restart. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gcore.config.sampling import Curriculum
from gcore.types import UserError

# number of a prompt, its row, fraction of its responses that passed; None: it has no rewards, because it failed
Passed = tuple[int, int, float | None]
Floats64 = npt.NDArray[np.float64]
NEWEST = 0.5  # weight of the newest group in the pass rate of its prompt
START = 0.5  # pass rate of a prompt that was never drawn: the largest weight
LEAST_WEIGHT = 0.1  # of a prompt of pass rate 0 or 1


class CurriculumOrder:
    """`kept`: the rows of the dataset that are used, ascending. `start`: their pass rates before any was drawn."""

    def __init__(self, spec: Curriculum, kept: npt.NDArray[np.int64], seed: int, start: Floats64 | None = None) -> None:
        self._spec, self._kept, self._seed = spec, kept, seed
        self._rates: Floats64 = np.full(len(kept), START) if start is None else start.copy()
        self._drawn = np.zeros(len(kept), np.int64)  # groups of each row
        self._failed = np.zeros(len(kept), np.int64)  # draws of each row without a group

    def order(self, first: int) -> npt.NDArray[np.int64]:
        """The rows of prompts `first`, `first + 1`, ...; each one once. `first`: the first number of a step."""
        raw = np.random.Philox(key=np.array([self._seed % 2**64, first], np.uint64)).random_raw(len(self._kept))
        noise = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54  # above 0, below 1
        if self._spec.order == "easy_first":
            return self._kept[np.lexsort((noise, -self._rates, self._drawn + self._failed))]
        # The largest values of log weight + Gumbel noise are a weighted sample without replacement.
        return self._kept[np.argsort(np.log(-np.log(noise)) - np.log(self.weights()), kind="stable")]

    def weights(self) -> Floats64:
        return np.maximum(LEAST_WEIGHT, 4 * self._rates * (1 - self._rates))

    def passed(self, rewards: Sequence[float]) -> float:
        return sum(reward >= self._spec.pass_reward for reward in rewards) / len(rewards)

    def update(self, groups: Iterable[Passed]) -> None:
        for _, row, rate in sorted(groups):
            at = int(np.searchsorted(self._kept, row))
            if rate is None:
                self._failed[at] += 1
                continue
            newest = NEWEST if self._drawn[at] else 1.0
            self._rates[at] += newest * (rate - self._rates[at])
            self._drawn[at] += 1

    def metrics(self) -> dict[str, float]:
        """Of the rows with groups."""
        drawn = self._drawn > 0
        rates = self._rates[drawn]
        if not len(rates):
            return {}
        solved, failed = float((rates == 1).mean()), float((rates == 0).mean())
        means = {"pass_rate": float(rates.mean()), "solved_frac": solved, "unsolved_frac": failed}
        return {f"curriculum/{name}": value for name, value in (means | {"seen_frac": float(drawn.mean())}).items()}

    def state(self) -> dict[str, list[Any]]:
        """For a checkpoint: of the rows that were drawn."""
        drawn = np.flatnonzero(self._drawn + self._failed)
        columns = {"rows": self._kept, "drawn": self._drawn, "failed": self._failed, "rates": self._rates}
        return {name: column[drawn].tolist() for name, column in columns.items()}

    def restore(self, state: Mapping[str, list[Any]]) -> None:
        at = np.searchsorted(self._kept, np.array(state["rows"], np.int64))
        self._drawn[at], self._failed[at], self._rates[at] = state["drawn"], state.get("failed", 0), state["rates"]


def make_curriculum(
    spec: Curriculum | None, rows: Sequence[Mapping[str, Any]], kept: npt.NDArray[np.int64], seed: int
) -> CurriculumOrder | None:
    if spec is None:
        return None
    return CurriculumOrder(spec, kept, seed, None if spec.column is None else _start(spec, spec.column, rows, kept))


def _start(spec: Curriculum, column: str, rows: Sequence[Mapping[str, Any]], kept: npt.NDArray[np.int64]) -> Floats64:
    rates = np.full(len(kept), START)
    for at, row in enumerate(kept.tolist()):
        value = rows[row].get(column)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise UserError(
                f"sampling.curriculum.column={column}: row {row} of data.train has {value!r}; expected a number from 0 "
                "to 1"
            )
        rates[at] = value
    if not any(column in rows[row] for row in kept.tolist()):
        raise UserError(
            f"sampling.curriculum.column={column}: no row of data.train has it; expected one of {sorted(rows[0])}"
        )
    return rates
