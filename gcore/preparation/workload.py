"""What a sample will cost a trainer rank, in arbitrary but consistent units.

A transformer's time is a part that grows with the tokens (matrix products) and a part that grows with their square
(attention). The crossover is where both are equal: about 6 x hidden size tokens for a dense decoder.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """CostModel(crossover=768).of(100) == 100 + 100 * 100 / 768"""

    crossover: float

    def of(self, length: int) -> float:
        return length + length * length / self.crossover
