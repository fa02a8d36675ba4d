"""Which keys a resumed run may change: those that decide where and how fast it runs, but not what it computes.

redacted tree of the checkpoint, tree of this run ──changes──> ["training.lr: 1e-06 -> 1e-05"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gcore.config.leaves import leaves_of
from gcore.config.secrets import redacted
from gcore.types import UserError

FREE = (
    *("run.name", "run.dir", "run.resume", "run.resume_anyway", "controllers", "runtime"),
    *("run.epochs", "run.on_step", "run.max_restarts", "run.hang_s", "run.no_progress_s", "faults*"),
    *("placement.*", "checkpoint.*", "endpoint.*", "observe.*", "evaluation.*"),
    *("training.compile", "training.activation_checkpointing", "training.offload", "training.max_tokens_per_gpu"),
    *("training.max_bad_updates", "*.emulated*"),
    # The content of the prompts is compared by its checksum.
    *("data.eval*", "data.max_prompt_length", "data.system_prompt"),
    *(f"data.train.{name}" for name in ("path", "subset", "split", "revision", "size", "task", "args*")),
    # resources, patience and addresses
    *(
        "training.device",
        "*.max_concurrent",
        "*.min_step_s",
        "*.gpu_memory_utilization",
        "*.tensor_parallel",
        "*.eager",
    ),
    *("*.sleep", "*.timeout_s", "*.retries", "*.attempts", "*.replicas", "*.workers", "*.recycle_after"),
    *("sandbox.pool", "sandbox.at_once"),
    *("*.max_error_frac", "*.token_env", "*.url"),
    *(f"environment.{name}" for name in ("processes", "concurrency", "*_s", "max_failed_frac")),
)
UNSET = "not set"


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Keys whose change makes the results differ from those of one uninterrupted run."""
    old, new = dict(leaves_of(redacted(before))), dict(leaves_of(redacted(after)))
    free = list(FREE)
    is_constant = old.get("training.schedule") == new.get("training.schedule") == "constant"
    if is_constant or "auto" in (old.get("run.steps"), new.get("run.steps")):  # `auto`: not counted yet
        free.append("run.steps")  # other schedules end with the last step
    return [
        f"{key}: {old.get(key, UNSET)} -> {new.get(key, UNSET)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, UNSET) != new.get(key, UNSET) and not any(fnmatchcase(key, pattern) for pattern in free)
    ]


def refusal(checkpoint: Path, listed: Sequence[str]) -> UserError:
    return UserError(
        f"{checkpoint} was made by a run that differs: {'; '.join(listed)}. The results would be those of neither run; "
        "change it back, or set run.resume_anyway=true"
    )
