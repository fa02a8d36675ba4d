"""Section `observe`: progress view, logs, trackers, and how often to evaluate."""

from __future__ import annotations

from typing import Literal

from gcore.config.base import Count, Section

Tracker = Literal["tensorboard", "wandb", "mlflow"]


class Observe(Section):
    eval_every: Count = 0
    """Steps between evaluations. 0: only before and after training."""
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """Terminal output; `live`: a live panel; `plain`: one line per step; `auto`: `live` on a terminal, else `plain`."""
    trackers: list[Tracker] = ["tensorboard"]
    """Where metrics go beside `metrics.jsonl`: `tensorboard`, `wandb` (Weights & Biases) and `mlflow`. The packages of
    the last two have to be installed."""
    trace: bool = True
    """Write `trace.json` for Perfetto."""
    samples_per_step: Count = 2
    """Groups per step whose prompt, answers, rewards and verdicts are logged in `samples/` and shown by `samples.html`;
    the same number of held-out prompts per evaluation. 0: none. A long run logs every n-th step, about 2,000 groups in
    total."""
    logs: bool = True
    """With Ray, the output of each process goes to `logs/ROLE.log` in the run directory, at most 20 MB per file; above
    this, the middle is removed. false: the output stays in Ray's log folder."""
    min_free_disk_mb: Count = 200
    """Minimum free disk space in the run directory to start a run."""
