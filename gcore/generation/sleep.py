"""Sleep and wake of an engine: which memory is freed, and what is refused until it is allocated again.

    awake ──sleep──> asleep: "weights", "kv_cache" ──wake, all or by tags──> awake

After a sleep at level 2 the weights are lost: the engine is awake and decodes only when new ones have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gcore.types import UserError

GIB = 2**30
MEMORY = ("weights", "kv_cache")  # tags, by the names that vLLM and SGLang use


def free_gpu() -> float:
    return float(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0.0


class SleepState:
    """`memory`: the tags that this engine frees. `drops_weights`: at level 2 the weights are lost. `adapters`: weight
    updates bring only the factors of adapters, from which lost weights cannot be restored."""

    def __init__(self, memory: Sequence[str] = MEMORY, drops_weights: bool = False, adapters: bool = False) -> None:
        self._memory, self._drops_weights, self._adapters = memory, drops_weights, adapters
        self._asleep: set[str] = set()
        self.weights_dropped = False

    @property
    def awake(self) -> bool:
        """The engine can decode, if no weight update is incomplete."""
        return not (self._asleep or self.weights_dropped)

    def may_sleep(self, level: int, in_progress: int, weights_arriving: bool) -> bool:
        """False if the engine sleeps already. Raises if it must not sleep now."""
        if self._asleep == set(self._memory):
            return False
        if in_progress:
            raise RuntimeError(f"asked to sleep with {in_progress} requests under way")
        if weights_arriving or self._asleep:
            raise RuntimeError("asked to sleep " + ("while weights arrive" if weights_arriving else "when half awake"))
        if level == 2 and self._drops_weights and self._adapters:
            raise UserError(
                "generation.sleep=2 drops the weights, of which adapters (model.lora) bring a part alone; use 1"
            )
        return True

    def sleep(self, level: int) -> None:
        self._asleep, self.weights_dropped = set(self._memory), level == 2 and self._drops_weights

    def due(self, tags: Sequence[str]) -> list[str]:
        """What to allocate for `wake(*tags)`; no tags: all."""
        if unknown := set(tags) - set(MEMORY):
            raise ValueError(f"asked to wake {sorted(unknown)}, expected some of {list(MEMORY)}")
        return [tag for tag in self._memory if tag in self._asleep and tag in (tags or MEMORY)]

    def wake(self, due: Sequence[str]) -> None:
        self._asleep -= set(due)

    def check_load(self, version: int) -> None:
        if "weights" in self._asleep:
            raise RuntimeError(f"weights of version {version} for an engine that sleeps; wake 'weights' first")

    def loaded(self) -> None:
        """All weights of an update have arrived."""
        self.weights_dropped = False
