"""Sleep and wake of an engine: which memory is freed, and which calls are errors until it is allocated again.

    awake ──sleep──> asleep: "weights", "kv_cache" ──wake, all or by tags──> awake

After a sleep at level 2 the weights are lost: the engine decodes again only when new weights have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gcore.types import UserError

GIB = 2**30
MEMORY = ("weights", "kv_cache")  # tags, named as in vLLM and SGLang


def free_gpu() -> float:
    return float(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0.0


class SleepState:
    """`memory`: the tags that this engine frees. `drops_weights`: at level 2 the weights are lost. `adapters`: weight
    updates contain only the factors of adapters, from which lost weights cannot be restored."""

    def __init__(self, memory: Sequence[str] = MEMORY, drops_weights: bool = False, adapters: bool = False) -> None:
        self._memory, self._drops_weights, self._adapters = memory, drops_weights, adapters
        self._asleep: set[str] = set()
        self.weights_lost = False  # dropped, or a mix of two versions: until a whole update has arrived

    @property
    def awake(self) -> bool:
        """The engine can decode, if no weight update is incomplete."""
        return not (self._asleep or self.weights_lost)

    def may_sleep(self, level: int, in_progress: int, weights_arriving: bool) -> bool:
        """False if the engine is asleep already. Raises if it must not sleep now."""
        if self._asleep == set(self._memory):
            return False
        if in_progress:
            raise RuntimeError(f"sleep called with {in_progress} requests in progress; abort them first")
        if weights_arriving or self._asleep:
            state = "during a weight update" if weights_arriving else "on an engine that is partly awake"
            raise RuntimeError(f"sleep called {state}")
        if level == 2 and self._drops_weights and self._adapters:
            raise UserError(
                "generation.sleep=2 drops the weights, and with model.lora only adapters are sent again; use 1"
            )
        return True

    def sleep(self, level: int) -> None:
        self._asleep = set(self._memory)
        self.weights_lost |= level == 2 and self._drops_weights

    def due(self, tags: Sequence[str]) -> list[str]:
        """The tags to allocate for `wake(*tags)`; no tags: all."""
        if unknown := set(tags) - set(MEMORY):
            raise ValueError(f"wake called with tags {sorted(unknown)}, expected some of {list(MEMORY)}")
        return [tag for tag in self._memory if tag in self._asleep and tag in (tags or MEMORY)]

    def wake(self, due: Sequence[str]) -> None:
        self._asleep -= set(due)

    def check_load(self, version: int) -> None:
        if "weights" in self._asleep:
            raise RuntimeError(f"weights of version {version} sent to an engine that is asleep; wake 'weights' first")
