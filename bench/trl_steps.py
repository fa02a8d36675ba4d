"""Seconds of the steps of TRL's GRPOTrainer by stage, for the benches that run it beside G-Core.

steps = TrlSteps(cpu, about)
trainer = GRPOTrainer(..., callbacks=[steps.callback()])
steps.watch(trainer)
trainer.train()                # every step is saved (worker.py) as soon as it is made
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.worker import save, started_at


def grpo_config(folder: str, cpu: bool, lr: float, betas: tuple[float, float], **own: Any) -> Any:
    """Of GRPOTrainer: what all benches set. `own`: the sizes of the work, and how it generates."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        use_cpu=cpu,
        bf16=not cpu,
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        learning_rate=lr,
        lr_scheduler_type="constant",
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **own,
    )


class TrlSteps:
    """`about`: number of a step, from 0 -> what is known of it beside its seconds, when it ends."""

    def __init__(self, cpu: bool, about: Callable[[int], dict[str, Any]]) -> None:
        self._cpu, self._about = cpu, about
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of this step
        self._steps: list[dict[str, Any]] = []
        self._start_s, self._last = float("nan"), 0.0

    def callback(self) -> Any:
        from transformers import TrainerCallback

        steps = self

        class Callback(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                steps.begin()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                steps.end()

        return Callback()

    def watch(self, trainer: Any, uses_vllm: bool = True) -> None:
        if uses_vllm:
            trainer.vllm_generation.sync_weights = self._timed("weights", trainer.vllm_generation.sync_weights)
        trainer._generate = self._timed("generation", trainer._generate)
        trainer._generate_and_score_completions = self._timed("scoring", trainer._generate_and_score_completions)

    def begin(self) -> None:
        if not self._last:  # of the first step; a later one begins where the one before ended
            self._start_s, self._last = time.time() - started_at(), self._now()

    def end(self) -> None:
        ended, seconds = self._now(), self._seconds
        took = ended - self._last
        self._steps.append(
            {
                **self._about(len(self._steps)),
                "step": took,
                "generation": seconds["generation"] - seconds["weights"],
                "preparation": seconds["scoring"] - seconds["generation"],
                "training": took - seconds["scoring"],
                "weights": seconds["weights"],
            }
        )
        self._last = ended
        seconds.clear()
        save({"start_s": self._start_s, "steps": self._steps})

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*values: Any, **named: Any) -> Any:
            started = self._now()
            try:
                return function(*values, **named)
            finally:
                self._seconds[name] += self._now() - started

        return wrapped

    def _now(self) -> float:
        import torch

        if not self._cpu:
            torch.cuda.synchronize()
        return time.perf_counter()


if __name__ == "__main__":  # a part of other benches
    print(__doc__)
