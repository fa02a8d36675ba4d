"""The speed of one engine replica, as a linear model. The simulator, the emulated engine and placement rules use it.

    a decoding step of b sequences takes   base_s + per_sequence_s * b
    the prefill of n tokens takes          prefill_s_per_token * n     (one prompt after another)

`gcore.cost.costs.serving` fits a ReplicaSpeed to a model on a GPU. Measured values can be used instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ReplicaSpeed:
    """The speed of one replica (of `tensor_parallel` slots) and the seconds of its state changes.

    ReplicaSpeed(base_s=0.012, per_sequence_s=3e-5, prefill_s_per_token=5e-5, max_concurrent=256,
                 sleep_s=0.5, wake_s=2.0, weights_s=1.0)
    """

    base_s: float  # fixed part of a decoding step: reading the weights, launching kernels
    per_sequence_s: float  # added by each running sequence: reading its KV cache, its share of compute
    prefill_s_per_token: float  # per prompt token; prompts are prefilled one after another
    max_concurrent: int  # sequences that the KV cache holds at the mean context
    sleep_s: float  # free the device memory
    wake_s: float  # allocate it again; includes the weights if they come from host memory
    weights_s: float  # a weight update from the trainer

    def scaled(self, factor: float) -> ReplicaSpeed:
        """A replica that computes `factor` times as fast. Sleeping and waking take the same time."""
        if factor == 1.0:
            return self
        base_s, per_s, prefill_s = (t / factor for t in (self.base_s, self.per_sequence_s, self.prefill_s_per_token))
        return replace(self, base_s=base_s, per_sequence_s=per_s, prefill_s_per_token=prefill_s)

    def with_swap(self, swap_s: float | None) -> ReplicaSpeed:
        """With this many seconds to put one engine to sleep and wake another on the same slots. None: as it is."""
        return self if swap_s is None else replace(self, sleep_s=0.0, wake_s=swap_s, weights_s=0.0)

    def step_s(self, running: float) -> float:
        """Seconds of one decoding step. Sequences above max_concurrent wait and do not slow the step."""
        return self.base_s + self.per_sequence_s * min(max(running, 1), self.max_concurrent)
