"""How fast one engine replica works, as a straight line: what the simulator, the emulated engine and the policy share.

    a decoding step of b sequences lasts   base_s + per_sequence_s * b
    a prompt of n tokens lasts             prefill_s_per_token * n     (serial on the device)

`gcore.simulate.costs.serving` fits a ReplicaSpeed to a model on a GPU; a measured one can be written by hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaSpeed:
    """The speed of one replica (of `tensor_parallel` slots) and what it costs to move it.

    ReplicaSpeed(base_s=0.012, per_sequence_s=3e-5, prefill_s_per_token=5e-5, max_concurrent=256,
                 sleep_s=0.5, wake_s=2.0, weights_s=1.0)
    """

    base_s: float  # a decoding step before its first sequence: reading the weights, launching kernels
    per_sequence_s: float  # what each running sequence adds to a step: reading its KV cache, its share of compute
    prefill_s_per_token: float  # one prompt token; prompts pass one after another
    max_concurrent: int  # how many sequences the KV cache holds at the mean context
    sleep_s: float  # give the device's memory back
    wake_s: float  # take it again, weights included where they come from host memory
    weights_s: float  # a weight update from the trainer

    def step_s(self, running: int) -> float:
        """Seconds of one decoding step with `running` sequences; more than fit wait, so they do not slow the step."""
        return self.base_s + self.per_sequence_s * min(max(running, 1), self.max_concurrent)

    def tokens_per_s(self, running: int) -> float:
        """Tokens a second of the replica with `running` sequences; 0 when idle."""
        return min(max(running, 0), self.max_concurrent) / self.step_s(running)
