"""The cost of a sample for a trainer rank, in arbitrary but consistent units. preparation/balance.py balances it.

The time of a transformer has a part linear in the tokens (matrix products) and a part quadratic in them (attention).
At the crossover length both are equal: about 6 x hidden size tokens for a dense decoder.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """CostModel(crossover=768).of(100) == 100 + 100 * 100 / 768"""

    crossover: float

    def of(self, length: int) -> float:
        return length + length * length / self.crossover
